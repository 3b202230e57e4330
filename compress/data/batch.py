"""What training and evaluation are handed.

Letters: B rows, T tokens a row, M micro-batches (or none).
"""

import dataclasses
from functools import partial

import jax
import numpy as np
from jaxtyping import Array, Float32, Int32


@partial(jax.tree_util.register_dataclass, data_fields=["tokens", "segments", "positions", "mask"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows of packed segments.

    Attributes:
      tokens: padding has any id, so it is told by `segments` and never by the id.
      segments: 0 is padding; tokens attend causally within equal segment ids of a row.
      positions: from 0 in each segment.
      mask: 1 where the token is a target, predicted from the one before it. Never set on the first token of a
        segment or on padding.
    """

    tokens: Int32[Array | np.ndarray, "*M B T"]
    segments: Int32[Array | np.ndarray, "*M B T"]
    positions: Int32[Array | np.ndarray, "*M B T"]
    mask: Float32[Array | np.ndarray, "*M B T"]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["chosen", "rejected", "reference_chosen", "reference_rejected"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class PairBatch:
    """Row b of `chosen` and of `rejected` answer the same prompt.

    Attributes:
      reference_chosen, reference_rejected: log-probability of the answer's targets under the reference policy;
        zero until it has been computed.
    """

    chosen: Batch
    rejected: Batch
    reference_chosen: Float32[Array | np.ndarray, "*M B"]
    reference_rejected: Float32[Array | np.ndarray, "*M B"]
