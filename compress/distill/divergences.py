"""Divergences between next-token distributions, each a function of two logit vectors; a new one is a line below.

Letters: V vocabulary.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def forward_kl(student: Float[Array, " V"], teacher: Float[Array, " V"]) -> Float[Array, ""]:
    """KL(teacher || student) in nats (Hinton et al., arXiv:1503.02531, with the constant that makes it a KL)."""
    log_p, log_q = jax.nn.log_softmax(teacher), jax.nn.log_softmax(student)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q))


def reverse_kl(student: Float[Array, " V"], teacher: Float[Array, " V"]) -> Float[Array, ""]:
    """KL(student || teacher) in nats (MiniLLM, arXiv:2306.08543, eq. 1)."""
    return forward_kl(teacher, student)


Divergence = Callable[[Array, Array], Array]

DIVERGENCES: dict[str, Divergence] = {"forward_kl": forward_kl, "reverse_kl": reverse_kl}
