"""Preference losses, each a function of one pair's log-probabilities; a new one is a function and a line below."""

from collections.abc import Callable

import jax
from jaxtyping import Array, Float

Scalar = Float[Array, ""]


def dpo(chosen: Scalar, rejected: Scalar, *, beta: float) -> Scalar:
    """`-log sigmoid(beta * (chosen - rejected))` (DPO, arXiv:2305.18290, eq. 7).

    `chosen` and `rejected` are log-ratios of policy to reference, summed over the answer's tokens, in nats.
    """
    return -jax.nn.log_sigmoid(beta * (chosen - rejected))


PREFERENCE_LOSSES: dict[str, Callable[..., Scalar]] = {"dpo": dpo}
