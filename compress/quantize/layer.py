"""A layer as a quantizer sees it.

Letters: B rows, T tokens, D model, I inputs.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from compress.data.batch import Batch
from compress.models.config import DecoderConfig
from export.quantized import QuantSpec

# Linears that share an input are quantized as one, on one Hessian; their names are joined with this.
JOIN = "|"


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer to quantize, and what goes through it; without calibration data `grams` and all sequences are empty.

    Attributes:
      prefix: of its tensors' names in the model.
      weights: all its tensors in float32, by their names within the layer; without calibration data as they are
        stored, read on access.
      specs: of its linears' weights.
      grams: the mean x x^T over real tokens of each distinct input, by the linears that it enters, joined by `JOIN`.
      inputs: what the quantized layers before it put out, a batch each, read on access.
      targets: what the unquantized layer makes of them.
      truths: what the unquantized model puts out here; only for a quantizer that refines.
      data: rotary frequencies and window, as `run_block` takes them.
      batches: tokens, positions and segments of `inputs`.
    """

    config: DecoderConfig
    prefix: str
    weights: Mapping[str, Float[Array | np.ndarray, "..."]]
    specs: dict[str, QuantSpec]
    grams: dict[str, Float[Array, "I I"]]
    inputs: Sequence[Float[Array | np.ndarray, "B T D"]]
    targets: Sequence[Float[Array | np.ndarray, "B T D"]]
    truths: Sequence[Float[Array | np.ndarray, "B T D"]]
    data: Any
    batches: Sequence[Batch]
