"""What training and evaluation are handed.

Letters: B rows, T tokens a row.
"""

import dataclasses
from collections.abc import Iterable

import jax
import numpy as np
from jaxtyping import Array, Float32, Int32


@dataclasses.dataclass(frozen=True)
class PairBatch:
    """Row b of `chosen` and of `rejected` answer the same prompt.

    Attributes:
      reference_chosen, reference_rejected: log-probability of the answer's targets under the reference policy;
        zero until it has been computed.
    """

    chosen: Batch
    rejected: Batch
    reference_chosen: Float32[Array | np.ndarray, "B"]
    reference_rejected: Float32[Array | np.ndarray, "B"]


def _register(kind: type) -> None:
    names = [field.name for field in dataclasses.fields(kind)]

    def flatten(batch):
        return tuple((jax.tree_util.GetAttrKey(name), getattr(batch, name)) for name in names), None

    def unflatten(_, leaves: Iterable):
        # JAX puts shapes, shardings and bare objects in the leaves' places, so the constructor's checks are passed by.
        batch = object.__new__(kind)
        for name, value in zip(names, leaves):
            object.__setattr__(batch, name, value)
        return batch

    jax.tree_util.register_pytree_with_keys(kind, flatten, unflatten)


_register(Batch)
_register(PairBatch)
