"""What training and evaluation are handed.

Letters: B rows, T tokens a row.
"""

import dataclasses

import numpy as np
from jaxtyping import Array, Float32, Int32

from export.pytree import register


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows of packed segments.

    Attributes:
      tokens: padding has any id, so it is told by `segments` and never by the id.
      segments: 0 is padding; tokens attend causally within equal segment ids of a row.
      positions: from 0 in each segment.
      mask: 1 where the token is a target, predicted from the one before it. Never set on the first token of a
        segment or of a branch, or on padding.
      branches: 0 is a segment's trunk, which all of the segment sees; a branch sees the trunk and itself, and its
        positions go on from the trunk's. None where no segment branches.
    """

    tokens: Int32[Array | np.ndarray, "B T"]
    segments: Int32[Array | np.ndarray, "B T"]
    positions: Int32[Array | np.ndarray, "B T"]
    mask: Float32[Array | np.ndarray, "B T"]
    branches: Int32[Array | np.ndarray, "B T"] | None = None


CHOSEN, REJECTED = 1, 2
"""Branches of a pair's row."""


@dataclasses.dataclass(frozen=True)
class PairBatch:
    """A pair a row: the prompt as its trunk, the answers as its branches `CHOSEN` and `REJECTED`.

    Attributes:
      rows: each branch begins with the prompt's last token, from which the answer's first is predicted.
      reference_chosen, reference_rejected: log-probability of the answer's targets under the reference policy;
        zero until it has been computed.
      weight: of the preference loss, 0 to 1; the rest of 1 is that of the chosen answer's cross-entropy.
      beta_scale: multiplies the loss's beta.
    """

    rows: Batch
    reference_chosen: Float32[Array | np.ndarray, " B"]
    reference_rejected: Float32[Array | np.ndarray, " B"]
    weight: Float32[Array | np.ndarray, " B"]
    beta_scale: Float32[Array | np.ndarray, " B"]


register(Batch)
register(PairBatch)
