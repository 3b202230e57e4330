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
from compress.models.decoder import EMBEDDING, Stacked, View, embed, layer_data, run_block, split_layers
from compress.quantize.gptq import gram
from compress.quantize.layer import JOIN, Layer
from compress.quantize.preflight import spec_of_layers
from compress.quantize.quantizers import QUANTIZERS, Quantizer
from compress.quantize.rtn import rtn
from eval.quantization_error import SquaredError, layer_error
from eval.report import ErrorRow
from export.errors import ArtifactError
from export.quantized import PackedTensor, QuantizedTensor, QuantSpec, Weights


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
    real = jnp.asarray(batch.segments).reshape(-1) > 0
    inputs: dict[int, tuple[list[str], Array]] = {}
    for path, module in nnx.iter_modules(block):
        if hasattr(module, "input"):
            seen = module.input.get_value()
            inputs.setdefault(id(seen), ([], seen))[0].append(".".join(map(str, path)))
    grams = {}
    for names, seen in inputs.values():
        grams[JOIN.join(sorted(names))] = gram(seen.reshape(-1, seen.shape[-1]), real)
    return y, grams


def view_of(batch: Batch) -> View:
    """Positions and mask, as a block wants them."""
    mask = visible(batch.positions, batch.segments, batch.positions, batch.segments)
    return View(batch.positions, batch.positions, mask)


@partial(jax.jit, static_argnames="config")
def output(config: DecoderConfig, weights: dict, x: Float[Array, "B T D"], data, batch: Batch) -> Float[Array, "B T D"]:
    """A layer's output."""
    return run_block(config, weights, x, data, view_of(batch))[1][0]


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
    quantized: Weights = dict(weights)
    stem = Stacked({EMBEDDING: jnp.asarray(weights[EMBEDDING])}, [])
    states = [embed(config, stem, jnp.asarray(batch.tokens), jnp.float32) for batch in batches]
    frequencies, windows = layer_data(config)
    layers: list[dict[str, Any]] = []
    for index, layer in enumerate(split_layers(config, weights)[1]):
        prefix = f"model.layers.{index}."
        layer = {name: jnp.asarray(value, jnp.float32) for name, value in layer.items()}
        data = (jnp.asarray(frequencies[index]), jnp.asarray(windows[index]))
        targets, grams = capture_all(config, layer, states, data, batches)
        own = {name.removeprefix(prefix): spec for name, spec in specs.items() if name.startswith(prefix)}
        task = Layer(config, prefix, layer, own, grams, states, targets, data, batches)
        made = quantize_layer(task, QUANTIZERS[method], **(settings or {}))
        quantized |= {prefix + name: jax.tree.map(np.asarray, value) for name, value in made.items()}
        if batches:
            states, error = run_quantized(config, layer | made, states, targets, data, batches)
            layers.append(dataclasses.asdict(ErrorRow.of(dataclasses.replace(error, name=f"layer {index}"))))
        if progress is not None:
            progress("quantize", index + 1, config.num_hidden_layers)
    if embedding_bits is not None:
        packed_embedding = rtn(jnp.asarray(weights[EMBEDDING], jnp.float32), specs[EMBEDDING])
        quantized[EMBEDDING] = jax.tree.map(np.asarray, packed_embedding)
    return Calibrated(quantized, layers)


def capture_all(config, layer: dict, states: list[Array], data, batches: Sequence[Batch]) -> tuple[list[Array], dict]:
    """The layer's outputs, and the mean x x^T over all real tokens of each distinct input of its linears."""
    targets, sums = [], None
    for x, batch in zip(states, batches, strict=True):
        y, found = capture(config, layer, x, data, batch)
        targets.append(y)
        sums = found if sums is None else jax.tree.map(jnp.add, sums, found)
    tokens = sum(int((np.asarray(batch.segments) > 0).sum()) for batch in batches)
    return targets, jax.tree.map(lambda total: total / max(tokens, 1), sums or {})


def quantize_layer(task: Layer, quantizer: Quantizer, **settings) -> dict[str, Array | PackedTensor]:
    """What the quantizer puts in the place of the layer's tensors, by their names within it.

    A method of single weights takes those that share an input as one if it wants Hessians, else each by itself.
    """
    if quantizer.layer is not None:
        return quantizer.layer(task, **settings)
    alone = dict.fromkeys(name.removesuffix(".weight") for name in task.specs)
    hessians: dict[str, Any] = task.grams if quantizer.calibrated else alone
    packed: dict[str, Array | PackedTensor] = {}
    for joined, hessian in hessians.items():
        names = [f"{name}.weight" for name in joined.split(JOIN)]
        w = jnp.concatenate([task.weights[name] for name in names])
        try:
            whole = quantizer.quantize(w, task.specs[names[0]], hessian=hessian, **settings)
        except ArtifactError as error:
            raise ArtifactError(f"{task.prefix}{joined}: {error}") from error
        sizes = [task.weights[name].shape[0] for name in names]
        parts = split(whole, sizes) if isinstance(whole, QuantizedTensor) else [whole]
        packed |= zip(names, parts, strict=True)
    return packed


def run_quantized(config, layer: dict, states: list[Array], targets: list[Array], data, batches: Sequence[Batch]):
    """The quantized layer's outputs, and their summed error against the unquantized layer's on the same inputs."""
    outputs, total = [], SquaredError("layer", 0.0, 0.0, 0, 0.0)
    for x, y, batch in zip(states, targets, batches, strict=True):
        actual = output(config, layer, x, data, batch)
        wanted, found = (value.reshape(-1, config.hidden_size) for value in (y, actual))
        total += layer_error("layer", wanted, found, np.asarray(batch.segments).reshape(-1) > 0)
        outputs.append(actual)
    return outputs, total


def split(tensor: QuantizedTensor, sizes: list[int]) -> list[QuantizedTensor]:
    """Cut a quantized tensor [sum of sizes, I] along its outputs."""
    ends = np.cumsum(sizes)
    return [
        jax.tree.map(lambda leaf, a=end - size, b=end: leaf[a:b], tensor) for size, end in zip(sizes, ends, strict=True)
    ]
