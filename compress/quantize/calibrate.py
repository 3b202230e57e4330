"""Quantize a model layer after layer, each on what the quantized layers before it put out.

Letters: B rows, T tokens, D model, I inputs, O outputs.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from compress.data.batch import Batch
from compress.models.attention import visible
from compress.models.config import DecoderConfig
from compress.models.decoder import EMBEDDING, Stacked, embed, iterate_blocks, layer_data, linears, run_block
from compress.quantize.preflight import spec_of_layers
from compress.quantize.quantizers import QUANTIZERS
from compress.quantize.rtn import rtn
from eval.quantization_error import SquaredError
from eval.report import ErrorRow
from export.errors import ArtifactError
from export.quantized import QuantizedTensor, QuantSpec, Weights

# Linears that share an input are quantized as one, on one Hessian; their names are joined with this.
JOIN = "|"


@dataclasses.dataclass(frozen=True)
class Calibrated:
    """A quantized model's weights, and the sums of each layer's output error.

    Attributes:
      layers: the fields of `eval.report.ErrorRow`, a layer each; empty without data.
    """

    weights: Weights
    layers: list[dict[str, Any]]


@partial(jax.jit, static_argnames="config")
def capture(config: DecoderConfig, weights: dict, x: Float[Array, "B T D"], data, batch: Batch):
    """A layer's output, and for each distinct input of its linears the sum of x x^T over real tokens [I, I]."""
    block, (y, _) = run_block(config, weights, x, data, view_of(batch))
    real = (batch.segments > 0).astype(jnp.float32)[..., None]
    inputs: dict[int, tuple[list[str], Array]] = {}
    for path, module in nnx.iter_modules(block):
        if hasattr(module, "input"):
            seen = module.input.get_value()
            inputs.setdefault(id(seen), ([], seen))[0].append(".".join(map(str, path)))
    grams = {}
    for names, seen in inputs.values():
        rows = (seen.astype(jnp.float32) * real).reshape(-1, seen.shape[-1])
        grams[JOIN.join(sorted(names))] = rows.T @ rows
    return y, grams


def view_of(batch: Batch) -> tuple:
    """Positions and mask, as a block wants them."""
    mask = visible(batch.positions, batch.segments, batch.positions, batch.segments)
    return batch.positions, batch.positions, mask


@partial(jax.jit, static_argnames="config")
def output_error(config: DecoderConfig, weights: dict, x: Float[Array, "B T D"], y: Float[Array, "B T D"], data, batch):
    """The layer's output with these weights, and (squared error, squared output, largest error) against `y`."""
    _, (actual, _) = run_block(config, weights, x, data, view_of(batch))
    real = batch.segments[..., None] > 0
    error = jnp.where(real, actual - y, 0).astype(jnp.float32)
    signal = jnp.where(real, y, 0).astype(jnp.float32)
    return actual, ((error**2).sum(), (signal**2).sum(), jnp.abs(error).max())


def quantize_model(
    config: DecoderConfig,
    weights: Weights,
    batches: Sequence[Batch],
    spec: QuantSpec,
    method: str,
    *,
    embedding_bits: int | None = None,
    fallback_group_size: int | None = None,
    settings: dict[str, Any] | None = None,
    progress: Callable[..., None] | None = None,
) -> Calibrated:
    """Quantize every linear of the blocks, and the embedding in `embedding_bits` if given.

    Args:
      batches: calibration data; without any (which only a method that needs none allows) no layer's output is
        measured.
      settings: keywords of the quantizer.

    Raises:
      RecipeError: groups that do not divide a layer's inputs, before any work.
      ArtifactError: a tensor that cannot be quantized; it is named.
    """
    specs = spec_of_layers(config, spec, fallback_group_size, embedding_bits)
    quantizer = QUANTIZERS[method]
    quantized: Weights = dict(weights)
    stem = Stacked({EMBEDDING: jnp.asarray(weights[EMBEDDING])}, [])
    states = [embed(config, stem, jnp.asarray(batch.tokens), jnp.float32) for batch in batches]
    tokens = sum(int((np.asarray(batch.segments) > 0).sum()) for batch in batches)
    frequencies, windows = layer_data(config)
    layers: list[dict[str, Any]] = []
    for index, layer in iterate_blocks(config, weights):
        prefix = f"model.layers.{index}."
        layer = {name: jnp.asarray(value, jnp.float32) for name, value in layer.items()}
        data = (jnp.asarray(frequencies[index]), jnp.asarray(windows[index]))
        grams: dict[str, Any] = {}
        targets = []
        for x, batch in zip(states, batches, strict=True):
            y, found = capture(config, layer, x, data, batch)
            targets.append(y)
            grams = found if not grams else jax.tree.map(jnp.add, grams, found)
        if not grams:
            names = [
                name.removeprefix(prefix).removesuffix(".weight") for name in linears(config) if name.startswith(prefix)
            ]
            grams = dict.fromkeys(names)
        for joined, gram in grams.items():
            names = [f"{name}.weight" for name in joined.split(JOIN)]
            w = jnp.concatenate([layer[name] for name in names])
            hessian = None if gram is None else gram / max(tokens, 1)
            try:
                whole = quantizer.quantize(w, specs[prefix + names[0]], hessian=hessian, **(settings or {}))
            except ArtifactError as error:
                raise ArtifactError(f"{prefix}{joined}: {error}") from error
            for name, part in zip(names, split(whole, [layer[name].shape[0] for name in names]), strict=True):
                layer[name] = part
                quantized[prefix + name] = jax.tree.map(np.asarray, part)
        sums, worst = np.zeros(2), 0.0
        for at, (x, y, batch) in enumerate(zip(states, targets, batches, strict=True)):
            states[at], (squared, signal, largest) = output_error(config, layer, x, y, data, batch)
            sums += (float(squared), float(signal))
            worst = max(worst, float(largest))
        if batches:
            count = tokens * config.hidden_size
            layers.append(layer_row(f"layer {index}", *sums.tolist(), count=count, worst=worst))
        if progress is not None:
            progress("quantize", index + 1, config.num_hidden_layers)
    if embedding_bits is not None:
        packed = rtn(jnp.asarray(weights[EMBEDDING], jnp.float32), specs[EMBEDDING])
        quantized[EMBEDDING] = jax.tree.map(np.asarray, packed)
    return Calibrated(quantized, layers)


def layer_row(name: str, error: float, signal: float, *, count: int, worst: float) -> dict[str, Any]:
    """A layer's output error as the report lists it."""
    whole = SquaredError(name, error, signal, count, worst)
    return dataclasses.asdict(ErrorRow.of(whole))


def split(tensor: QuantizedTensor, sizes: list[int]) -> list[QuantizedTensor]:
    """Cut a quantized tensor [sum of sizes, I] along its outputs."""
    ends = np.cumsum(sizes)
    return [
        jax.tree.map(lambda leaf, a=end - size, b=end: leaf[a:b], tensor) for size, end in zip(sizes, ends, strict=True)
    ]
