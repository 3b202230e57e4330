"""What became of each weight: how it was rounded, what that cost, and where it was not done as asked.

Letters: O outputs, I inputs.
"""

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from compress.models.linear import dense
from compress.quantize.layer import JOIN, Layer
from eval import schema
from eval.quantization_error import SquaredError, tensor_error
from eval.report import QuantizedRow
from export.errors import ArtifactError
from export.quantized import NF4_BLOCK, PackedTensor, QuantizedTensor, QuantSpec

RECORD = "quantization.json"


class Rounded(NamedTuple):
    """A layer that a quantizer has been through.

    Attributes:
      task: the layer that was rounded: the given one, or an equal one whose weights were folded into each other.
      tensors: what it puts in the place of the given layer's tensors, by their names within it.
      notes: what was not done as asked, by the names of the weights that it concerns.
    """

    task: Layer
    tensors: dict[str, Array | PackedTensor]
    notes: dict[str, str]


def account(rounded: Rounded, method: str, asked: QuantSpec | None) -> list[QuantizedRow]:
    """A row for every linear of a layer, quantized or not.

    Args:
      asked: the spec that holds for all layers; None where each has its own.

    Raises:
      ArtifactError: a linear that was to be quantized was not.
    """
    task, rows = rounded.task, []
    of_input = {name: gram for joined, gram in task.grams.items() for name in joined.split(JOIN)}
    for name, w in task.weights.items():
        if w.ndim != 2:
            continue
        w, packed = jnp.asarray(w), rounded.tensors.get(name)
        if isinstance(packed, PackedTensor):
            gram = of_input.get(name.removesuffix(".weight"))
            output = None if gram is None else output_error(w, dense(packed, jnp.float32), gram)
            note = "; ".join(filter(None, (misfit(packed, asked), rounded.notes.get(name))))
            rows.append(row_of(task.prefix + name, method, w, packed, output, note or None))
        elif name in task.specs:
            raise ArtifactError(f"{task.prefix}{name}: {method} has left it unquantized")
        else:
            size = 2 * w.size
            rows.append(QuantizedRow(task.prefix + name, "none", w.size, size, fallback="excluded: stays in floats"))
    return rows


def row_of(
    name: str,
    method: str,
    w: Float[Array, "O I"],
    packed: PackedTensor,
    output: SquaredError | None = None,
    fallback: str | None = None,
) -> QuantizedRow:
    """The row of a quantized tensor."""
    bits, size = (packed.spec.bits, packed.spec.group_size) if isinstance(packed, QuantizedTensor) else (4, NF4_BLOCK)
    error = tensor_error(name, w, dense(packed, jnp.float32))
    return QuantizedRow.of(error, method, packed.nbytes, bits, size, output, fallback)


def misfit(packed: PackedTensor, asked: QuantSpec | None) -> str | None:
    """Says that a weight has other groups than those asked for."""
    if asked is not None and isinstance(packed, QuantizedTensor) and packed.spec.group_size != asked.group_size:
        inputs = packed.shape[-1]
        return f"groups of {packed.spec.group_size}: {asked.group_size} does not divide its {inputs} inputs"
    return None


def output_error(w: Float[Array, "O I"], w_hat: Float[Array, "O I"], gram: Float[Array, "I I"]) -> SquaredError:
    """The mean squared error of a linear's outputs over the calibration tokens, from the mean x x^T of its inputs."""
    error, reference = jax.device_get(_output_sums(w, w_hat, gram))
    return SquaredError("output", float(error), float(reference), len(w), 0.0)


@jax.jit
def _output_sums(w, w_hat, gram):
    def square(a):
        # The product is a quadratic form, so a negative sum is rounding.
        return jnp.maximum(jnp.sum((a @ gram) * a), 0.0)

    return square(w - w_hat), square(w)


@dataclasses.dataclass(frozen=True)
class Quantization:
    """What `quantization.json` holds.

    Attributes:
      coverage: the share of the blocks' linear weights that are quantized.
      folded: whether other weights were rounded than the given model's: those of an equal one.
      tensors: a row for every linear, and for a quantized embedding.
    """

    coverage: float
    folded: bool
    tensors: list[QuantizedRow]


def write_quantization(folder: Path, record: Quantization) -> None:
    """Write `quantization.json`."""
    text = json.dumps(schema.encode(record), indent=1, allow_nan=False)
    (folder / RECORD).write_text(text + "\n", encoding="utf-8")


def read_quantization(folder: Path) -> Quantization | None:
    """The folder's `quantization.json`; None where there is none.

    Raises:
      EvidenceError: it is not what `write_quantization` writes.
    """
    path = folder / RECORD
    return (
        schema.decode(Quantization, schema.parse(path.read_bytes(), str(path)), str(path)) if path.is_file() else None
    )


def coverage(rows: list[QuantizedRow]) -> float:
    """The share of the blocks' linear weights that are quantized."""
    linears = [row for row in rows if row.name.startswith("model.layers.")]
    return sum(row.weights for row in linears if row.bits is not None) / sum(row.weights for row in linears)
