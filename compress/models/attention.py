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
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, Int8

from compress.models.config import DecoderConfig
from compress.models.flash import flash_attention
from compress.models.linear import Linear, RMSNorm
from compress.models.quantized_matmul import round_tokens

# The score of a key that the mask hides.
MASKED = float(np.finfo(np.float32).min)
ATTENDED = "attended"
BLOCKS, LEAST_BLOCK, ROUND = 8, 128, 16  # of queries: how many at most, how long at least, and a multiple of what


@partial(jax.tree_util.register_dataclass, data_fields=["codes", "scales"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Int8Slots:
    """Keys or values in 8 bits: each token's of each head on a symmetric scale of their own."""

    codes: Int8[Array, "*L B S K E"]
    scales: Float[Array, "*L B S K 1"]


Slots = Array | Int8Slots
"""Keys or values [*L, B, S, K, E]."""


def put_slots(slots: Slots, x: Float[Array, "B T K E"], start: Int[Array, ""]) -> Slots:
    """Write tokens at slot `start` and those that follow it."""
    new = Int8Slots(*round_tokens(x)) if isinstance(slots, Int8Slots) else x
    put = lambda old, part: jax.lax.dynamic_update_slice(old, part, (0, start, 0, 0))  # noqa: E731
    return jax.tree.map(put, slots, new)


def read_slots(slots: Slots, dtype) -> Float[Array, "B S K E"]:
    """What is in all slots."""
    if isinstance(slots, Int8Slots):
        return (slots.codes.astype(jnp.float32) * slots.scales).astype(dtype)
    return slots


@partial(jax.tree_util.register_dataclass, data_fields=["keys", "values", "start"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer, or of all stacked (L); the next token is written at slot `start`."""

    keys: Slots
    values: Slots
    start: Int[Array, " *L"]

    def append(self, k: Float[Array, "B T K E"], v: Float[Array, "B T K E"]) -> "LayerCache":
        return LayerCache(put_slots(self.keys, k, self.start), put_slots(self.values, v, self.start), self.start)


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


def by_group(x: Float[Array, "B T H E"], kv_heads: int) -> Float[Array, "B K GT E"]:
    """A group's queries as rows of one matrix: on a CPU twice as fast as products with an axis for the group."""
    batch, time, _, size = x.shape
    return x.reshape(batch, time, kv_heads, -1, size).transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, size)


def by_head(x: Float[Array, "B K GT E"], time: int) -> Float[Array, "B T H E"]:
    """Undo `by_group`."""
    batch, kv_heads, _, size = x.shape
    return x.reshape(batch, kv_heads, -1, time, size).transpose(0, 3, 1, 2, 4).reshape(batch, time, -1, size)


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
    batch, time, heads, _ = q.shape
    kv_heads = k.shape[2]
    rows = by_group(q, kv_heads) * jnp.asarray(scale, q.dtype)
    scores = jnp.einsum("bkre,bske->bkrs", rows, k, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, kv_heads, heads // kv_heads, time, -1)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    return jnp.where(mask[:, None, None], scores, MASKED)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def attend(
    q: Float[Array, "B T H E"],
    k: Float[Array, "B S K E"],
    v: Float[Array, "B S K E"],
    mask: Bool[Array, "B T S"],
    scale: float,
    softcap: float | None,
) -> Float[Array, "B T H E"]:
    """Values weighted by the softmax of `attention_scores`, which is taken in float32.

    The backward pass computes the scores once more from what it keeps, a number a row of them (FlashAttention,
    arXiv:2205.14135, section 3.1): the scores are the largest arrays of a block. `ATTENDED` names what is kept beside
    q, k and v, for a policy of `jax.checkpoint`.
    """
    return _attend(q, k, v, mask, scale, softcap)[0]


def query_blocks(time: int, keys: int) -> list[tuple[int, int, int]]:
    """Blocks of queries, each its first, the one past its last, and how many keys it may see.

    Where keys are the queries' own tokens, none sees what comes after it in its row, whatever else the mask hides.
    """
    if time != keys:
        return [(0, time, keys)]
    count = min(BLOCKS, max(1, time // LEAST_BLOCK))
    size = -(-time // (ROUND * count)) * ROUND
    ends = [*range(size, time, size), time]
    return [(start, end, end) for start, end in zip([0, *ends], ends, strict=False)]


def _attend_block(q, k, v, mask, scale, softcap) -> tuple[Float[Array, "B T H E"], Float[Array, "B K G T"]]:
    scores = attention_scores(q, k, mask, scale=scale, softcap=softcap)
    most = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - most)
    total = weights.sum(axis=-1)
    rows = weights.reshape(len(k), k.shape[2], -1, k.shape[1]).astype(v.dtype)
    sums = jnp.einsum("bkrs,bske->bkre", rows, v, preferred_element_type=jnp.float32)
    seen = by_head(sums / total.reshape(*sums.shape[:3], 1), q.shape[1]).astype(v.dtype)
    return seen, jnp.log(total) + most[..., 0]


def _attend(q, k, v, mask, scale, softcap) -> tuple[Float[Array, "B T H E"], Float[Array, "B K G T"]]:
    parts = [
        _attend_block(q[:, start:end], k[:, :keys], v[:, :keys], mask[:, start:end, :keys], scale, softcap)
        for start, end, keys in query_blocks(q.shape[1], k.shape[1])
    ]
    seen, log_totals = zip(*parts, strict=True)
    return jnp.concatenate(seen, axis=1), jnp.concatenate(log_totals, axis=-1)


def _attend_forward(q, k, v, mask, scale, softcap):
    seen, log_total = checkpoint_name(_attend(q, k, v, mask, scale, softcap), ATTENDED)
    return seen, (q, k, v, mask, seen, log_total)


def _attend_backward(scale, softcap, kept, d_seen):
    q, k, v, mask, seen, log_total = kept
    inner = (seen.astype(jnp.float32) * d_seen.astype(jnp.float32)).sum(axis=-1)
    d_q, d_k, d_v = [], jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for start, end, keys in query_blocks(q.shape[1], k.shape[1]):
        at = np.s_[:, start:end]
        parts = q[at], k[:, :keys], v[:, :keys], mask[*at, :keys], inner[at], log_total[..., start:end], d_seen[at]
        of_q, of_k, of_v = _attend_block_backward(scale, softcap, *parts)
        d_q.append(of_q)
        d_k, d_v = d_k.at[:, :keys].add(of_k), d_v.at[:, :keys].add(of_v)
    return jnp.concatenate(d_q, axis=1).astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None


def _attend_block_backward(scale, softcap, q, k, v, mask, inner, log_total, d_seen):
    time, kv_heads = q.shape[1], k.shape[2]
    scores = attention_scores(q, k, mask, scale=scale, softcap=softcap)
    weights = jnp.exp(scores - log_total[..., None]).reshape(len(k), kv_heads, -1, k.shape[1])
    rows, d_rows = by_group(q, kv_heads), by_group(d_seen, kv_heads)
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    d_v = product("bkrs,bkre->bske", weights.astype(v.dtype), d_rows)
    d_weights = product("bkre,bske->bkrs", d_rows, v)
    d_scores = weights * (d_weights - by_group(inner[..., None], kv_heads))
    if softcap is not None:
        d_scores *= jnp.where(weights > 0, 1 - jnp.square(scores.reshape(weights.shape) / softcap), 0)
    d_scores = (d_scores * scale).astype(q.dtype)
    d_q = by_head(product("bkrs,bske->bkre", d_scores, k), time)
    return d_q, product("bkrs,bkre->bske", d_scores, rows), d_v


attend.defvjp(_attend_forward, _attend_backward)


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
            k, v = read_slots(cache.keys, k.dtype), read_slots(cache.values, v.dtype)
        self.scores = nnx.Intermediate(attention_scores(q, k, sight.mask, scale=self.scale, softcap=self.softcap))
        flash = partial(flash_attention, scale=self.scale, softcap=self.softcap)
        seen = flash(q, k, v, sight.mask, sight.segments) if cache is None else None
        seen = attend(q, k, v, sight.mask, self.scale, self.softcap) if seen is None else seen
        return self.o_proj(seen.reshape(*x.shape[:2], -1)), cache
