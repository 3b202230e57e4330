"""What quantization did to a tensor or to a layer's output, as sums that add up over pieces and chunks.

Letters: N tokens, D features.
"""

import dataclasses
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from eval.errors import EvidenceError


@dataclasses.dataclass(frozen=True)
class SquaredError:
    """Sums of one tensor's (or layer output's) error; two of the same name add.

    Attributes:
      error: sum of (original - quantized)^2.
      reference: sum of original^2.
      count: elements summed.
      max_abs: largest |original - quantized|.
    """

    name: str
    error: float
    reference: float
    count: int
    max_abs: float

    def __add__(self, other: "SquaredError") -> "SquaredError":
        # max() of a NaN depends on the order; a NaN anywhere must stay visible.
        worst = math.nan if math.isnan(self.max_abs + other.max_abs) else max(self.max_abs, other.max_abs)
        return SquaredError(
            self.name,
            self.error + other.error,
            self.reference + other.reference,
            self.count + other.count,
            worst,
        )

    @property
    def mse(self) -> float:
        """Mean squared error, in the square of the tensor's unit."""
        return self.error / self.count if self.count else math.nan

    @property
    def relative_mse(self) -> float:
        """Error over signal: sum of squared errors over sum of squares. 0 / 0 is 0: a zero tensor kept as zeros."""
        if self.reference > 0:
            return self.error / self.reference
        return 0.0 if self.error == 0 else math.nan if math.isnan(self.error) else math.inf

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise in decibels, -10 log10 of `relative_mse`; infinite without error."""
        share = self.relative_mse
        if math.isnan(share) or math.isinf(share):
            return -share
        return -10 * math.log10(share) if share > 0 else math.inf


def tensor_error(
    name: str, original: Float[Array | np.ndarray, "*S"], quantized: Float[Array | np.ndarray, "*S"]
) -> SquaredError:
    """The error of a dequantized tensor. For a large one, call it on pieces and add.

    Raises:
      EvidenceError: if the shapes differ.
    """
    if original.shape != quantized.shape:
        raise EvidenceError(f"{name}: original {original.shape}, quantized {quantized.shape}; they must agree")
    rows = original.reshape(-1, original.shape[-1]) if original.ndim else original.reshape(1, 1)
    return layer_error(name, rows, quantized.reshape(rows.shape), np.ones(len(rows), bool))


def layer_error(
    name: str,
    reference: Float[Array | np.ndarray, "N D"],
    actual: Float[Array | np.ndarray, "N D"],
    mask: Shaped[Array | np.ndarray, " N"],
) -> SquaredError:
    """The error of a layer's output on a chunk of tokens, where `mask` is true; add the chunks."""
    if reference.shape != actual.shape:
        raise EvidenceError(f"{name}: reference {reference.shape}, actual {actual.shape}; they must agree")
    error, signal, worst = jax.device_get(_row_sums(reference, actual, mask))
    count = int(np.sum(np.asarray(mask) > 0)) * reference.shape[-1]
    largest = float(np.max(worst)) if len(worst) else 0.0
    # Rows are summed in float32, the rows' sums in float64: a long accumulation loses nothing.
    return SquaredError(name, float(error.sum(dtype=np.float64)), float(signal.sum(dtype=np.float64)), count, largest)


@jax.jit
def _row_sums(reference, actual, mask):
    # Sums of a masked-out row are replaced, not multiplied: it may hold NaN.
    reference, actual = reference.astype(jnp.float32), actual.astype(jnp.float32)
    difference = jnp.where(mask[:, None] > 0, reference - actual, 0)
    signal = jnp.where(mask[:, None] > 0, reference, 0)
    worst = jnp.max(jnp.abs(difference), axis=-1, initial=0)
    return jnp.sum(difference**2, axis=-1), jnp.sum(signal**2, axis=-1), worst


def total(name: str, errors: Iterable[SquaredError]) -> SquaredError:
    """All tensors as one: each weighs by its energy, not one vote a tensor."""
    out = SquaredError(name, 0.0, 0.0, 0, 0.0)
    for error in errors:
        out = out + error
    return out
