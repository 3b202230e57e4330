"""How much a model's layers and channels matter, measured on text.

Letters: B rows, T tokens, D model, F feed-forward channels, K key-value heads, G what the queries of one of them put
out together, L layers.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from compress.data.batch import Batch
from compress.data.batches import Batches
from compress.data.split import training_and_held_out
from compress.distill.settings import Distill
from compress.errors import DataError
from compress.models.config import DecoderConfig
from compress.models.decoder import EMBEDDING, FINAL_NORM, Stacked, embed, layer_data, run_block, split_layers
from compress.models.linear import RMSNorm
from compress.quantize.calibrate import view_of
from compress.settings import Common
from compress.tokenizer import Tokenizer

TOKENS = 1 << 14  # that importance is measured on
TINY = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a layer computed.

    Attributes:
      x, y: its input and output.
      normed: outputs of its norms over the model's width.
      heads: the input of o_proj, by key-value head.
      ffn: the input of down_proj.
    """

    x: Float[Array, "B T D"]
    y: Float[Array, "B T D"]
    normed: list[Float[Array, "B T D"]]
    heads: Float[Array, "B T K G"]
    ffn: Float[Array, "B T F"]


def block_influence(seen: Seen) -> Float[Array, "B T"]:
    """1 - cosine of the layer's input and output (ShortGPT, arXiv:2403.03853, eq. 1)."""
    x, y = seen.x.astype(jnp.float32), seen.y.astype(jnp.float32)
    norms = jnp.linalg.norm(x, axis=-1) * jnp.linalg.norm(y, axis=-1)
    return 1 - jnp.sum(x * y, axis=-1) / jnp.maximum(norms, TINY)


def channel_magnitude(seen: Seen) -> Float[Array, "B T D"]:
    """Mean over the layer's norms of |output| (Minitron, arXiv:2407.14679, section 2.2)."""
    return jnp.mean(jnp.abs(jnp.stack(seen.normed)), axis=0)


def ffn_magnitude(seen: Seen) -> Float[Array, "B T F"]:
    """|activation| of each feed-forward channel (Minitron, arXiv:2407.14679, section 2.2)."""
    return jnp.abs(seen.ffn)


def head_norm(seen: Seen) -> Float[Array, "B T K"]:
    """L2 norm of what the queries of each key-value head put out (Minitron, arXiv:2407.14679, section 2.2)."""
    return jnp.linalg.norm(seen.heads, axis=-1)


IMPORTANCES: dict[str, Callable[[Seen], Float[Array, "B T *N"]]] = {
    "layers": block_influence,
    "hidden": channel_magnitude,
    "ffn": ffn_magnitude,
    "kv_heads": head_norm,
}
"""Importance, to each token, of what a part of a cut chooses from."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """Means over tokens.

    Attributes:
      importance: a part of a cut -> [L] or [L, N], as in `IMPORTANCES`.
      energy: a norm's name -> the mean square of each of its normalized channels [D].
    """

    importance: dict[str, np.ndarray]
    energy: dict[str, np.ndarray]


@partial(jax.jit, static_argnames="config")
def layer_sums(config: DecoderConfig, weights: dict, x: Float[Array, "B T D"], data, batch: Batch):
    """A layer's output; and sums over real tokens of its importances, and of its normalized channels' squares."""
    block: Any
    block, (y, _) = run_block(config, weights, x, data, view_of(batch))
    norms = {name: norm for name, norm in vars(block).items() if isinstance(norm, RMSNorm)}
    squares = {f"{name}.weight": jnp.square(norm.normed.get_value()) for name, norm in norms.items()}
    heads = block.self_attn.o_proj.input.get_value()
    seen = Seen(
        x,
        y,
        [norm.normed.get_value() * (norm.offset + norm.weight.get_value()) for norm in norms.values()],
        heads.reshape(*heads.shape[:2], config.num_key_value_heads, -1),
        block.mlp.down_proj.input.get_value(),
    )
    importances = {name: importance(seen) for name, importance in IMPORTANCES.items()}
    return y, jax.tree.map(partial(sum_over_tokens, batch), (importances, squares))


@partial(jax.jit, static_argnames="config")
def final_sums(config: DecoderConfig, x: Float[Array, "B T D"], batch: Batch) -> Float[Array, " D"]:
    """Sum over real tokens of the squares of the channels that the final norm normalizes."""
    mean = jnp.mean(x * x, axis=-1, keepdims=True)
    return sum_over_tokens(batch, x * x / (mean + config.rms_norm_eps))


def sum_over_tokens(batch: Batch, value: Float[Array, "B T *N"]) -> Float[Array, "*N"]:
    """The sum over tokens that are not padding."""
    return jnp.einsum("bt...,bt->...", value, jnp.asarray(batch.segments > 0, jnp.float32))


def measure(config: DecoderConfig, weights: Mapping[str, Any], batches: Sequence[Batch]) -> Measured:
    """Run the model layer after layer over `batches`, in float32.

    Raises:
      DataError: there is no token.
    """
    tokens = sum(int((np.asarray(batch.segments) > 0).sum()) for batch in batches)
    if not tokens:
        raise DataError("no text to measure importance on; give more data")
    stem = Stacked({EMBEDDING: jnp.asarray(weights[EMBEDDING], jnp.float32)}, [])
    states = [embed(config, stem, jnp.asarray(batch.tokens), jnp.float32) for batch in batches]
    frequencies, windows = layer_data(config)
    importances: list[dict] = []
    energy: dict[str, np.ndarray] = {}
    mean = lambda sums: jax.tree.map(lambda *parts: np.asarray(sum(parts)) / tokens, *sums)  # noqa: E731
    for index, layer in enumerate(split_layers(config, weights)[1]):
        layer = {name: jnp.asarray(value, jnp.float32) for name, value in layer.items()}
        data = (jnp.asarray(frequencies[index]), jnp.asarray(windows[index]))
        found = [layer_sums(config, layer, x, data, batch) for x, batch in zip(states, batches, strict=True)]
        states = [y for y, _ in found]
        importance, squares = mean([sums for _, sums in found])
        importances.append(importance)
        energy |= {f"model.layers.{index}.{name}": value for name, value in squares.items()}
    energy[FINAL_NORM] = mean([final_sums(config, x, batch) for x, batch in zip(states, batches, strict=True)])
    return Measured({name: np.stack([layer[name] for layer in importances]) for name in IMPORTANCES}, energy)


def most_important(importance: Float[np.ndarray, "*L N"], count: int) -> np.ndarray:
    """Indices of the `count` greatest along the last axis, increasing; of equals the first."""
    return np.sort(np.argsort(-importance, axis=-1, kind="stable")[..., :count], axis=-1)


def important_layers(importance: Float[np.ndarray, " L"], count: int) -> list[int]:
    """The first layer, the last one, and the most important between them."""
    always = np.isin(np.arange(len(importance)), (0, len(importance) - 1))
    return most_important(np.where(always, np.inf, importance), count).tolist()


def calibration_batches(settings: Distill, common: Common, tokenizer: Tokenizer) -> list[Batch]:
    """The first `TOKENS` tokens of the training rows, packed.

    Raises:
      DataError: the data cannot be read, or none of it is of use.
    """
    options: dict[str, Any] = {"columns": common.data.columns, "bad_rows": common.data.bad_rows}
    rows, _ = training_and_held_out(settings.data, settings.valid, **options)
    length = settings.sequence_length
    size = max(1, min(4, TOKENS // length))
    batches = Batches(
        rows, tokenizer, size=size, length=length, seed=common.seed, epochs=1, shuffle=False, buffer=TOKENS
    )
    return list(itertools.islice(batches, max(1, TOKENS // (size * length))))
