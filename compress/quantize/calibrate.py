"""Quantize a model layer after layer, each on what the quantized layers before it put out.

Letters: B rows, T tokens, D model, I inputs, O outputs.
"""

import dataclasses
import math
import os
import tempfile
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from compress.data.batch import Batch
from compress.models.attention import visible
from compress.models.config import DecoderConfig
from compress.models.decoder import EMBEDDING, Stacked, View, embed, layer_data, run_block, split_layers
from compress.models.linear import dense
from compress.quantize.account import Rounded, account, row_of
from compress.quantize.gptq import gram
from compress.quantize.layer import JOIN, Layer
from compress.quantize.preflight import spec_of_layers
from compress.quantize.quantizers import QUANTIZERS, Quantizer
from compress.quantize.rtn import rtn
from eval.quantization_error import SquaredError, layer_error
from eval.report import ErrorRow, QuantizedRow
from export.checkpoint import LazyWeights
from export.errors import ArtifactError
from export.quantized import PackedTensor, QuantizedTensor, QuantSpec, Weights

ROOM = 1 << 24
"""Bytes of activations that are held in memory; more go to a file."""


@dataclasses.dataclass(frozen=True)
class Calibrated:
    """A quantized model's weights, and the sums of each layer's output error.

    Attributes:
      layers: the fields of `eval.report.ErrorRow`, a layer each; empty without data.
      rows: of every linear, and of a quantized embedding.
    """

    weights: Weights
    layers: list[dict[str, Any]]
    rows: list[QuantizedRow]


class Part(NamedTuple):
    """A part of a quantized model.

    Attributes:
      number: 0 is the embedding, 1 + k layer k, and the last all that comes after the layers.
      weights: by their names in the model; floats as they are to be stored.
      error: the fields of `eval.report.ErrorRow` of a layer's output; None without data.
      rows: of every linear, and of a quantized embedding.
      seconds: that quantizing it took, without what goes through the layer before and after.
    """

    number: int
    weights: Weights
    error: dict[str, Any] | None
    rows: list[QuantizedRow]
    seconds: float = 0.0


class States(Sequence[np.ndarray]):
    """Float32 arrays, all of them in memory up to `ROOM` bytes, and beyond that in a file without a name."""

    def __init__(self, folder: Path | None = None):
        self._file: Any = tempfile.SpooledTemporaryFile(ROOM, dir=None if folder is None else str(folder))  # noqa: SIM115
        self._places: list[tuple[int, tuple[int, ...]]] = []
        self._end = 0

    def __del__(self) -> None:
        self._file.close()

    def append(self, array: Float[Array | np.ndarray, "..."]) -> None:
        self._places.append((self._end, array.shape))
        self._end += array.nbytes
        self[len(self) - 1] = array

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        start, shape = self._places[index]
        self._file.seek(start)
        return np.frombuffer(self._file.read(4 * math.prod(shape)), np.float32).reshape(shape)

    def __setitem__(self, index: int, array: Float[Array | np.ndarray, "..."]) -> None:
        self._file.seek(self._places[index][0])
        self._file.write(np.asarray(array, np.float32).tobytes())


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


def quantize_model(config: DecoderConfig, weights: Mapping[str, Any], *given, progress=None, **options) -> Calibrated:
    """All that `quantize_parts` makes, which takes the same arguments, in memory."""
    whole = Calibrated({}, [], [])
    for part in quantize_parts(config, weights, *given, **options):
        whole.weights.update(part.weights)
        whole.layers.extend([] if part.error is None else [part.error])
        whole.rows.extend(part.rows)
        if progress is not None and 0 < part.number <= config.num_hidden_layers:
            progress("quantize", part.number, config.num_hidden_layers)
    return whole


def quantize_parts(
    config: DecoderConfig,
    weights: Mapping[str, Any],
    batches: Sequence[Batch],
    spec: QuantSpec,
    method: str,
    *,
    embedding_bits: int | None = None,
    fallback_group_size: int | None = None,
    specs: dict[str, QuantSpec] | None = None,
    exclude: Sequence[str] = (),
    settings: dict[str, Any] | None = None,
    done: Collection[int] = (),
    kept: Mapping[str, Any] | None = None,
    scratch: Path | None = None,
) -> Iterator[Part]:
    """Quantize every linear of the blocks, and the embedding in `embedding_bits` if given, part by part.

    Each tensor is read from `weights` when its turn comes, and none is held beyond its part.

    Args:
      weights: floats.
      batches: calibration data; without any (which only a method that needs none allows) no layer's output is
        measured.
      specs: of every linear of the blocks, and of embedding and head if they are to be quantized; in place of `spec`,
        `embedding_bits`, `fallback_group_size` and `exclude`. Linears that share an input have one.
      exclude: patterns of linears that stay floats.
      settings: keywords of the quantizer.
      done: parts that an earlier run has made; they are not made again.
      kept: at least their weights, of which the layers among them put out what the next ones see.
      scratch: where activations go that do not fit in memory; the system's folder for such files if None.

    Raises:
      RecipeError: groups that do not divide a layer's inputs, before any work.
      ArtifactError: a tensor that cannot be quantized; it is named.
    """
    asked = None if specs else spec
    specs = specs or spec_of_layers(config, spec, fallback_group_size, embedding_bits, exclude)
    rest, layers = split_layers(config, {name: name for name in weights})
    stored = jnp.dtype(spec.scale_dtype)
    last = len(layers) + 1

    def outside(number: int, names: Sequence[str]) -> Part:
        """Tensors outside the layers: rounded to nearest if they have a spec."""
        made: Weights = {}
        rows = []
        for name in names:
            value = weights[name]
            if name in specs:
                made[name] = packed = rtn(value, specs[name])
                rows.append(row_of(name, "rtn", jnp.asarray(value), packed))
            else:
                made[name] = as_stored(value, stored)
        return Part(number, jax.tree.map(np.asarray, made), None, rows)

    if 0 not in done:
        yield outside(0, [EMBEDDING])
    missing = [number for number in range(1, last) if number not in done]
    quantizer = QUANTIZERS[method]
    states = embed_all(config, weights, batches, scratch)
    truths = embed_all(config, weights, batches if quantizer.refine else [], scratch)
    frequencies, windows = layer_data(config)

    def open_layer(number: int, weights: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[Array, Array]]:
        """A layer's tensors by their names within it, read on access, and what is scanned along with them."""
        names = layers[number - 1]
        data = (jnp.asarray(frequencies[number - 1]), jnp.asarray(windows[number - 1]))
        return LazyWeights({own: partial(weights.__getitem__, name) for own, name in names.items()}), data

    def quantize(number: int) -> Part:
        prefix = f"model.layers.{number - 1}."
        layer, data = open_layer(number, weights)
        if batches:
            layer = {own: jnp.asarray(value, jnp.float32) for own, value in layer.items()}
        targets, grams = capture_all(config, layer, states, data, batches, scratch)
        if truths:
            run_layer(config, layer, truths, None, data, batches)
        own_specs = {name.removeprefix(prefix): found for name, found in specs.items() if name.startswith(prefix)}
        task = Layer(config, prefix, layer, own_specs, grams, states, targets, truths, data, batches)
        began = monotonic()
        rounded = quantize_layer(task, quantizer, **(settings or {}))
        made: Weights = {**jax.block_until_ready(rounded.tensors)}
        took = monotonic() - began
        rows = account(rounded, method, asked)
        made |= {own: layer[own] for own in layer if own not in made}
        # Later layers see what is stored.
        made = {own: v if isinstance(v, PackedTensor) else as_stored(v, stored) for own, v in made.items()}
        error = None
        if batches:
            total = run_layer(config, made, states, targets, data, batches)
            error = dataclasses.asdict(ErrorRow.of(dataclasses.replace(total, name=f"layer {number - 1}")))
        named = {prefix + own: jax.tree.map(np.asarray, value) for own, value in made.items()}
        return Part(number, named, error, rows, took)

    if batches:
        for number in range(1, max(missing, default=0) + 1):
            if number in missing:
                yield quantize(number)
            elif kept is not None:
                for through, source in ((states, kept), (truths, weights)):
                    layer, data = open_layer(number, source)
                    run_layer(config, layer, through, None, data, batches)
    else:
        yield from side_by_side(quantize, missing)
    if last not in done:
        yield outside(last, [name for name in rest if name != EMBEDDING])


def side_by_side(function: Callable[[int], Part], numbers: Iterable[int]) -> Iterator[Part]:
    """The function of each number, in order; as many at a time as there are cores, of which a call keeps one busy."""
    cores = os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as pool:
        begun: deque[Future] = deque()
        for number in numbers:
            if len(begun) == cores:
                yield begun.popleft().result()
            begun.append(pool.submit(function, number))
        while begun:
            yield begun.popleft().result()


def as_stored(value: Float[Array | np.ndarray, "..."], dtype: Any) -> Float[Array | np.ndarray, "..."]:
    """A float tensor in the dtype that it is stored in: itself if it has it."""
    return value if value.dtype == dtype else jnp.asarray(value).astype(dtype)


def embed_all(config: DecoderConfig, weights: Mapping[str, Any], batches: Sequence[Batch], scratch) -> States:
    """The embedded tokens of each batch."""
    states = States(scratch)
    if batches:
        stem = Stacked({EMBEDDING: jnp.asarray(weights[EMBEDDING])}, [])
        for batch in batches:
            states.append(embed(config, stem, batch.tokens, jnp.float32))
    return states


def capture_all(
    config, layer: Mapping, states: Sequence, data, batches: Sequence[Batch], scratch: Path | None = None
) -> tuple[States, dict]:
    """The layer's outputs, and the mean x x^T over all real tokens of each distinct input of its linears."""
    targets, sums = States(scratch), None
    for x, batch in zip(states, batches, strict=True):
        y, found = capture(config, layer, x, data, batch)
        targets.append(y)
        sums = found if sums is None else jax.tree.map(jnp.add, sums, found)
    tokens = sum(int((np.asarray(batch.segments) > 0).sum()) for batch in batches)
    return targets, jax.tree.map(lambda total: total / max(tokens, 1), sums or {})


def quantize_layer(task: Layer, quantizer: Quantizer, **settings) -> Rounded:
    """The layer as the quantizer makes it.

    Linears that share an input are taken as one if the quantizer wants Hessians, else each by itself.
    """
    own = {name: settings.pop(name) for name in quantizer.refine_settings}
    given, task = task, task if quantizer.prepare is None else quantizer.prepare(task)
    alone = dict.fromkeys(name.removesuffix(".weight") for name in task.specs)
    hessians: dict[str, Any] = task.grams if quantizer.calibrated else alone
    packed: dict[str, Array | PackedTensor] = {}
    notes: dict[str, str] = {}
    for joined, hessian in hessians.items():
        names = [name for part in joined.split(JOIN) if (name := f"{part}.weight") in task.specs]
        if not names:
            continue
        said: list[str] = []
        told = {"notes": said} if quantizer.calibrated else {}
        parts = [task.weights[name] for name in names]
        w = jnp.concatenate(parts) if len(parts) > 1 else parts[0]
        try:
            whole = quantizer.quantize(w, task.specs[names[0]], hessian=hessian, **told, **settings)
        except ArtifactError as error:
            raise ArtifactError(f"{task.prefix}{joined}: {error}") from error
        cut = split(whole, [part.shape[0] for part in parts]) if isinstance(whole, QuantizedTensor) else [whole]
        packed |= zip(names, cut, strict=True)
        notes |= dict.fromkeys(names, "; ".join(said))
    if quantizer.refine is not None:
        packed |= quantizer.refine(task, packed, **own)
    if task is not given:
        packed |= {n: jnp.asarray(v) for n, v in task.weights.items() if n not in packed and v is not given.weights[n]}
    return Rounded(task, packed, notes)


def run_layer(
    config, layer: Mapping[str, Any], states: States, targets: Sequence | None, data, batches: Sequence[Batch]
) -> SquaredError:
    """Put what a layer puts out in the place of its inputs; the error against `targets`, summed."""
    total = SquaredError("layer", 0.0, 0.0, 0, 0.0)
    layer = {name: dense(jax.tree.map(jnp.asarray, value), jnp.float32) for name, value in layer.items()}
    for index, batch in enumerate(batches if states else []):
        found = output(config, layer, states[index], data, batch)
        states[index] = found
        if targets is not None:
            wanted, actual = (value.reshape(-1, config.hidden_size) for value in (targets[index], found))
            total += layer_error("layer", wanted, actual, np.asarray(batch.segments).reshape(-1) > 0)
    return total


def split(tensor: QuantizedTensor, sizes: list[int]) -> list[QuantizedTensor]:
    """Cut a quantized tensor [sum of sizes, I] along its outputs."""
    ends = np.cumsum(sizes)
    return [
        jax.tree.map(lambda leaf, a=end - size, b=end: leaf[a:b], tensor) for size, end in zip(sizes, ends, strict=True)
    ]
