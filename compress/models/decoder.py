"""A decoder over stacked weights: embed, scan the blocks, norm, project to logits.

Letters: B batch, T time, S cache slots, V vocabulary, D model, L layers, F half of the head dimension.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from compress.models.attention import ATTENDED, Int8Slots, LayerCache, Sight, Slots, visible
from compress.models.config import DecoderConfig
from compress.models.linear import RMSNorm, bind, dense, rows
from compress.models.spread import by_rows
from export.quantized import PackedTensor, Weights

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


@partial(jax.tree_util.register_dataclass, data_fields=["rest", "layers"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Stacked:
    """Weights laid out for the scan.

    Attributes:
      rest: embedding, final norm and head, by tensor name.
      layers: segments in order; in each, names within a layer -> leaves with a leading axis over its layers.
    """

    rest: dict
    layers: list[dict]


@cache
def block_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer's tensors by their names within the layer."""
    state = nnx.state(config.block(), nnx.Param)
    return {".".join(map(str, path)): leaf.get_value().shape for path, leaf in nnx.to_flat_state(state)}


def shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors by their Hugging Face names."""
    result = {EMBEDDING: (config.vocab_size, config.hidden_size), FINAL_NORM: (config.hidden_size,)}
    for layer in range(config.num_hidden_layers):
        result |= {f"model.layers.{layer}.{name}": shape for name, shape in block_shapes(config).items()}
    if not config.tie_word_embeddings:
        result[HEAD] = (config.vocab_size, config.hidden_size)
    return result


def linears(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the blocks' linear weights: what is quantized and what takes adapters."""
    return {name: shape for name, shape in shapes(config).items() if LAYER.fullmatch(name) and len(shape) == 2}


def init(config: DecoderConfig, key: Key[Array, ""], dtype=jnp.float32) -> Weights:
    """Fresh weights: matrices from a normal of deviation 0.02, biases zero, norms one.

    Those that write to the residual stream are scaled by 1 / sqrt(2 L), as in GPT-2.
    """
    weights: Weights = {}
    for index, (name, shape) in enumerate(shapes(config).items()):
        if len(shape) == 2:
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            deviation = 0.02 / (2 * config.num_hidden_layers) ** 0.5 if residual else 0.02
            value = deviation * jax.random.normal(jax.random.fold_in(key, index), shape, jnp.float32)
        else:
            value = jnp.full(shape, 1 - config.norm_offset if name.endswith("norm.weight") else 0.0)
        weights[name] = value.astype(dtype)
    return weights


def split_layers(config: DecoderConfig, weights: Mapping[str, Any]) -> tuple[dict, list[dict]]:
    """The tensors outside the layers by name, and each layer's by their names within it."""
    rest: dict = {}
    layers: list[dict] = [{} for _ in range(config.num_hidden_layers)]
    for name, value in weights.items():
        match = LAYER.fullmatch(name)
        if match is None:
            rest[name] = value
        else:
            layers[int(match[1])][match[2]] = value
    return rest, layers


def structure(leaf) -> tuple:
    """What must agree for two layers' tensors to be stacked."""
    return tuple(leaf.shape), jax.tree.structure(leaf), tuple(str(part.dtype) for part in jax.tree.leaves(leaf))


def stack(config: DecoderConfig, weights: Mapping[str, Any]) -> Stacked:
    """Stack runs of consecutive layers that agree in names, shapes, dtypes and quantization.

    Adapters ("...q_proj.lora_A") may be among the weights; `partition` takes them out again.
    """
    rest, layers = split_layers(config, weights)
    alike = lambda layer: {name: structure(value) for name, value in layer.items()}  # noqa: E731
    runs: list[list[dict]] = []
    for layer in layers:
        if runs and alike(layer) == alike(runs[-1][0]):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    stacked = [jax.tree.map(lambda *leaves: jnp.stack(leaves), *run) for run in runs]
    return Stacked(jax.tree.map(jnp.asarray, rest), stacked)


def unstack(config: DecoderConfig, stacked: Stacked) -> Weights:
    """Undo `stack`."""
    weights: Weights = dict(stacked.rest)
    first = 0
    for segment in stacked.layers:
        length = depth(segment)
        for offset in range(length):
            layer = jax.tree.map(lambda leaf, at=offset: leaf[at], segment)
            weights |= {f"model.layers.{first + offset}.{name}": value for name, value in layer.items()}
        first += length
    return weights


def depth(segment: dict) -> int:
    """Number of layers in a segment."""
    return jax.tree.leaves(segment)[0].shape[0]


def partition(stacked: Stacked, chosen: Callable[[str], bool]) -> tuple[Stacked, Stacked]:
    """Split by name into (chosen, others); `combine` puts them together again."""

    def part(keep: bool) -> Stacked:
        pick = lambda named: {name: leaf for name, leaf in named.items() if chosen(name) is keep}  # noqa: E731
        return Stacked(pick(stacked.rest), [pick(segment) for segment in stacked.layers])

    return part(True), part(False)


def combine(a: Stacked, b: Stacked) -> Stacked:
    """Both parts' tensors, segment by segment; of two with one name, b's."""
    return Stacked(a.rest | b.rest, [x | y for x, y in zip(a.layers, b.layers, strict=True)])


def layer_data(config: DecoderConfig) -> tuple[Float[np.ndarray, "L F"], Int[np.ndarray, " L"]]:
    """What differs from layer to layer and is scanned along: RoPE frequencies and windows."""
    unlimited = np.iinfo(np.int32).max
    windows = np.array([unlimited if window is None else window for window in config.windows], np.int32)
    return config.frequencies, windows


def embed(
    config: DecoderConfig, stacked: Stacked, tokens: Int[Array | np.ndarray, "B T"], dtype
) -> Float[Array, "B T D"]:
    """Embedded tokens, scaled where the family scales them (the scale is rounded to `dtype`, as in training)."""
    x = rows(stacked.rest[EMBEDDING], tokens, dtype)
    return x if config.embedding_scale == 1.0 else x * jnp.asarray(config.embedding_scale, dtype)


class View(NamedTuple):
    """Which tokens see which, before a layer's window; `segments` where causality within them is all of the mask."""

    positions: Int[Array | np.ndarray, "B T"]
    key_positions: Int[Array | np.ndarray, "B S"]
    mask: Bool[Array, "B T S"]
    segments: Int[Array | np.ndarray, "B T"] | None = None


def rotation(
    positions: Int[Array | np.ndarray, "B T"], frequencies: Float[Array | np.ndarray, "*U F"]
) -> tuple[Float[Array, "*U B T F"], Float[Array, "*U B T F"]]:
    """Cosines and sines of the rotary angles."""
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies)[..., None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def run_block(config: DecoderConfig, weights: dict, x, data, view: View, cache=None) -> tuple[nnx.Module, tuple]:
    """Run one layer: `data` is its (frequencies, window)."""
    frequencies, window = data
    return run_rotated(config, weights, x, rotation(view.positions, frequencies), window, view, cache)


def run_rotated(
    config: DecoderConfig, weights: dict, x, rotated, window, view: View, cache=None
) -> tuple[nnx.Module, tuple]:
    """`run_block` with its `rotation` at hand."""
    positions, key_positions, mask, segments = view
    cos, sin = rotated
    near = positions[:, :, None] - key_positions[:, None, :] < window
    segments = None if any(config.windows) else segments
    block = bind(config.block(), weights)
    return block, block(x, Sight(cos, sin, mask & near, segments, cache))


@dataclasses.dataclass(frozen=True)
class Tap:
    """What to keep of the run of some layers.

    Attributes:
      layers: which, each once, in any order.
      read: (a block after its run, its output [B, T, D]) -> pytree of arrays.
    """

    layers: tuple[int, ...]
    read: Callable[[nnx.Module, Array], Any]


def run_layers(
    config: DecoderConfig, stacked: Stacked, x, view: View, caches=None, *, remat: bool = False, tap: Tap | None = None
) -> tuple[Array, Any, Any]:
    """Scan all segments: the output, the caches, and what the tap read.

    Caches, if given, are stacked over all layers and come back updated. What is tapped has a leading axis over the
    tap's layers, in their order; that of other layers is never kept.
    """
    frequencies, windows = layer_data(config)
    # Once for all layers that turn alike: in each, XLA on a CPU would take a cosine anew for every head.
    distinct, kinds = np.unique(frequencies, axis=0, return_inverse=True)
    rotations = rotation(view.positions, distinct)
    kept_layers = () if tap is None else tap.layers
    slots = np.full(config.num_hidden_layers, len(kept_layers), np.int32)  # past the end: not kept
    slots[list(kept_layers)] = np.arange(len(kept_layers))

    def layer(x, weights, data, cache):
        kind, window = data
        rotated = jax.tree.map(lambda table: table[kind], rotations)
        block, (x, cache) = run_rotated(config, weights, x, rotated, window, view, cache)
        return by_rows(x), cache, None if tap is None else tap.read(block, x)

    kept_of_a_block = jax.checkpoint_policies.save_only_these_names(ATTENDED)
    layer = jax.checkpoint(layer, policy=kept_of_a_block) if remat else layer

    def body(carry, scanned):
        x, kept = carry
        *inputs, slot = scanned
        x, cache, read = layer(x, *inputs)
        return (x, jax.tree.map(lambda room, value: room.at[slot].set(value, mode="drop"), kept, read)), cache

    def slices(segment, first):
        at = slice(first, first + depth(segment))
        cache = None if caches is None else jax.tree.map(lambda leaf: leaf[at], caches)
        return segment, (kinds[at].astype(np.int32), windows[at]), cache, slots[at]

    kept = None
    if tap is not None:
        one = jax.tree.map(lambda leaf: leaf[0], slices(stacked.layers[0], 0)[:-1])
        kept = jax.tree.map(
            lambda leaf: jnp.zeros((len(kept_layers), *leaf.shape), leaf.dtype), jax.eval_shape(layer, x, *one)[2]
        )
    updated: list = []
    first = 0
    for segment in stacked.layers:
        (x, kept), cache = jax.lax.scan(body, (x, kept), slices(segment, first))
        updated.append(cache)
        first += depth(segment)
    caches = None if caches is None else jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *updated)
    return x, caches, kept


def final_norm(config: DecoderConfig, stacked: Stacked, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_offset)
    return bind(norm, {"weight": stacked.rest[FINAL_NORM]})(x)


def hidden_states(
    config: DecoderConfig,
    stacked: Stacked,
    tokens: Int[Array | np.ndarray, "B T"],
    *,
    positions: Int[Array | np.ndarray, "B T"] | None = None,
    segments: Int[Array | np.ndarray, "B T"] | None = None,
    branches: Int[Array | np.ndarray, "B T"] | None = None,
    remat: bool = False,
) -> Float[Array, "B T D"]:
    """Hidden states after the final norm, in the dtype of the final norm's weight.

    Tokens attend causally within equal `segments` (default: one segment a row); 0 is padding. `positions` default to
    0 .. T-1, `branches` to none (`compress.data.batch.Batch`). With `remat` the backward pass recomputes each block
    but its attention instead of keeping its insides.
    """
    view = {"positions": positions, "segments": segments, "branches": branches}
    return tapped_states(config, stacked, tokens, None, **view, remat=remat)[0]


def tapped_states(
    config: DecoderConfig,
    stacked: Stacked,
    tokens: Int[Array | np.ndarray, "B T"],
    tap: Tap | None,
    *,
    positions: Int[Array | np.ndarray, "B T"] | None = None,
    segments: Int[Array | np.ndarray, "B T"] | None = None,
    branches: Int[Array | np.ndarray, "B T"] | None = None,
    remat: bool = False,
) -> tuple[Float[Array, "B T D"], Any]:
    """`hidden_states`, and what the tap read of its layers, with a leading axis over them."""
    batch, time = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(time), (batch, time)) if positions is None else positions
    segments = jnp.ones((batch, time), jnp.int32) if segments is None else segments
    x = by_rows(embed(config, stacked, tokens, stacked.rest[FINAL_NORM].dtype))
    mask = visible(positions, segments, positions, segments, branches)
    view = View(positions, positions, mask, segments if branches is None else None)
    x, _, tapped = run_layers(config, stacked, x, view, remat=remat, tap=tap)
    return final_norm(config, stacked, x), tapped


def head(config: DecoderConfig, stacked: Stacked) -> Array | PackedTensor:
    """The output projection [V, D]: the embedding when tied."""
    return stacked.rest[EMBEDDING if config.tie_word_embeddings else HEAD]


def project(config: DecoderConfig, hidden: Float[Array, "*N D"], weight: Float[Array, "V D"]) -> Float[Array, "*N V"]:
    """Logits in float32 from hidden states and a dense head, soft cap included."""
    logits = by_rows(jnp.matmul(hidden, weight.T.astype(hidden.dtype), preferred_element_type=jnp.float32))
    cap = config.logit_softcap
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def logits(config: DecoderConfig, stacked: Stacked, hidden: Float[Array, "*N D"]) -> Float[Array, "*N V"]:
    """Logits in float32, soft cap included."""
    return project(config, hidden, dense(head(config, stacked), hidden.dtype))


@partial(jax.tree_util.register_dataclass, data_fields=["layers", "positions", "segments", "start"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of all layers, and where each slot's token stands; segment 0 is an empty slot.

    Attributes:
      layers: `LayerCache` whose leaves have a leading axis L.
      positions, segments: int32 [B, S].
      start: int32 [], the next free slot.
    """

    layers: LayerCache
    positions: Int[Array, "B S"]
    segments: Int[Array, "B S"]
    start: Int[Array, ""]


def empty_cache(config: DecoderConfig, batch: int, slots: int, dtype=jnp.float32) -> Cache:
    """A cache for `slots` tokens a row; of int8, each token's keys and values of a head have a float32 scale."""
    layers = config.num_hidden_layers
    shape = (layers, batch, slots, config.num_key_value_heads, config.head_dim)
    empty = jnp.zeros(shape, dtype)
    room: Slots = empty
    if dtype == jnp.int8:
        room = Int8Slots(empty, jnp.zeros((*shape[:-1], 1), jnp.float32))
    nothing = jnp.zeros((batch, slots), jnp.int32)
    return Cache(LayerCache(room, room, jnp.zeros(layers, jnp.int32)), nothing, nothing, jnp.int32(0))


def extend(
    config: DecoderConfig,
    stacked: Stacked,
    cache: Cache,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    segments: Int[Array, "B T"],
) -> tuple[Float[Array, "B T D"], Cache]:
    """Run T more tokens a row against the cache: hidden states after the final norm, and the longer cache.

    Rows of unequal length are padded with segment 0. The caller sees to it that the slots suffice.
    """
    put = partial(jax.lax.dynamic_update_slice, start_indices=(0, cache.start))
    key_positions, key_segments = put(cache.positions, positions), put(cache.segments, segments)
    x = embed(config, stacked, tokens, stacked.rest[FINAL_NORM].dtype)
    view = View(positions, key_positions, visible(positions, segments, key_positions, key_segments))
    starts = jnp.broadcast_to(cache.start, (config.num_hidden_layers,))
    layers = dataclasses.replace(cache.layers, start=starts)
    x, layers, _ = run_layers(config, stacked, x, view, layers)
    return final_norm(config, stacked, x), Cache(layers, key_positions, key_segments, cache.start + tokens.shape[1])
