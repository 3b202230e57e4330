"""Rotary positions, masks and grouped-query attention.

Letters: L stacked layers (or none), B batch, T queries, S keys, H heads, K key-value heads, G query heads a key-value
head, D model, E head dimension.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from compress.models.config import DecoderConfig
from compress.models.flash import flash_attention
from compress.models.linear import Linear, RMSNorm

# The score of a key that the mask hides.
MASKED = float(np.finfo(np.float32).min)


@partial(jax.tree_util.register_dataclass, data_fields=["keys", "values", "start"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer, or of all stacked (L); the next token is written at slot `start`."""

    keys: Float[Array, "*L B S K E"]
    values: Float[Array, "*L B S K E"]
    start: Int[Array, " *L"]

    def append(self, k, v) -> "LayerCache":
        at = (0, self.start, 0, 0)
        put = jax.lax.dynamic_update_slice
        return LayerCache(put(self.keys, k, at), put(self.values, v, at), self.start)


@partial(jax.tree_util.register_dataclass, data_fields=["cos", "sin", "mask", "segments", "cache"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Sight:
    """What a layer's attention may see: rotary tables, the mask, and a cache when decoding.

    Where `segments` are given, the mask is causality within them and nothing else.
    """

    cos: Float[Array, "B T F"]
    sin: Float[Array, "B T F"]
    mask: Bool[Array, "B T S"]
    segments: Int[Array | np.ndarray, "B T"] | None = None
    cache: LayerCache | None = None


def rotate(x: Float[Array, "B T H E"], cos: Float[Array, "B T F"], sin: Float[Array, "B T F"]) -> Array:
    """Rotate the pairs (i, i + E/2) of each head (RoFormer, arXiv:2104.09864, eq. 34, in Hugging Face's pairing)."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def visible(
    positions: Int[Array | np.ndarray, "B T"],
    segments: Int[Array | np.ndarray, "B T"],
    key_positions: Int[Array | np.ndarray, "B S"],
    key_segments: Int[Array | np.ndarray, "B S"],
    branches: Int[Array | np.ndarray, "B T"] | None = None,
) -> Bool[Array, "B T S"]:
    """A token sees those of its own segment that are not behind it in position; segment 0 is padding.

    Padding sees padding, so that no row of the softmax is empty. With `branches`, whose keys are the queries' own
    tokens, a token sees of its segment the trunk (0) and its own branch.
    """
    seen = segments[:, :, None] == key_segments[:, None, :]
    seen &= key_positions[:, None, :] <= positions[:, :, None]
    if branches is not None:
        theirs = branches[:, None, :]
        seen &= (theirs == 0) | (theirs == branches[:, :, None])
    return jnp.asarray(seen)


def attention_scores(
    q: Float[Array, "B T H E"],
    k: Float[Array, "B S K E"],
    mask: Bool[Array, "B T S"],
    *,
    scale: float,
    softcap: float | None = None,
) -> Float[Array, "B K G T S"]:
    """Scores in float32 of each key's G = H / K queries, `MASKED` where the mask hides the key.

    With `softcap` c the scores are `c * tanh(scores / c)` before the mask (Gemma 2, arXiv:2408.00118, section 2).
    """
    batch, time, heads, size = q.shape
    kv_heads = k.shape[2]
    # A group's queries are rows of one matrix: on a CPU twice as fast as products with an axis for the group.
    rows = q.reshape(batch, time, kv_heads, -1, size).transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, size)
    scores = jnp.einsum("bkre,bske->bkrs", rows * jnp.asarray(scale, q.dtype), k, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, kv_heads, heads // kv_heads, time, -1)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    return jnp.where(mask[:, None, None], scores, MASKED)


def attend(scores: Float[Array, "B K G T S"], v: Float[Array, "B S K E"]) -> Float[Array, "B T H E"]:
    """Values weighted by the softmax of the scores, which is taken in float32; H = K G."""
    batch, kv_heads, groups, time, keys = scores.shape
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    seen = jnp.einsum("bkrs,bske->bkre", weights.reshape(batch, kv_heads, -1, keys), v)
    seen = seen.reshape(batch, kv_heads, groups, time, -1).transpose(0, 3, 1, 2, 4)
    return seen.reshape(batch, time, -1, v.shape[-1])


class Attention(nnx.Module):
    """Grouped-query attention; `qk_norm` normalizes each head's queries and keys before the rotation.

    The scores are kept as an `nnx.Intermediate`, which costs nothing unless the caller of the block asks for it
    (distillation does).
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        bias: bool = False,
        output_bias: bool = False,
        qk_norm: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
    ):
        head_dim, heads, kv_heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
        self.q_proj = Linear(config.hidden_size, heads * head_dim, bias=bias)
        self.k_proj = Linear(config.hidden_size, kv_heads * head_dim, bias=bias)
        self.v_proj = Linear(config.hidden_size, kv_heads * head_dim, bias=bias)
        self.o_proj = Linear(heads * head_dim, config.hidden_size, bias=output_bias)
        norm = partial(RMSNorm, head_dim, config.rms_norm_eps, config.norm_offset)
        self.q_norm = norm() if qk_norm else None
        self.k_norm = norm() if qk_norm else None
        self.head_dim = head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.softcap = softcap

    def __call__(self, x: Float[Array, "B T D"], sight: Sight) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        q, k, v = (
            project(x).reshape(*x.shape[:2], -1, self.head_dim) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, sight.cos, sight.sin), rotate(k, sight.cos, sight.sin)
        cache = None
        if sight.cache is not None:
            cache = sight.cache.append(k, v)
            k, v = cache.keys, cache.values
        scores = attention_scores(q, k, sight.mask, scale=self.scale, softcap=self.softcap)
        self.scores = nnx.Intermediate(scores)
        flash = partial(flash_attention, scale=self.scale, softcap=self.softcap)
        seen = flash(q, k, v, sight.mask, sight.segments) if cache is None else None
        seen = attend(scores, v) if seen is None else seen
        return self.o_proj(seen.reshape(*x.shape[:2], -1)), cache
