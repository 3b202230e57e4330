"""Divergences between next-token distributions, each a function of two logit vectors; a new one is a line below.

All are in nats, except the total variation, which has no unit. p is the teacher's distribution and q the student's;
their logarithms stay finite where their probabilities underflow.

Letters: V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def _kl(log_p: Array, log_q: Array) -> Array:
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q))


def _mixture(log_p: Array, log_q: Array, mix: float) -> Array:
    """`log(mix p + (1 - mix) q)`."""
    return jnp.logaddexp(np.log(mix) + log_p, np.log1p(-mix) + log_q)


def forward_kl(student: Float[Array, " V"], teacher: Float[Array, " V"]) -> Float[Array, ""]:
    """KL(p || q) (Hinton et al., arXiv:1503.02531, with the constant that makes it a KL)."""
    return _kl(jax.nn.log_softmax(teacher), jax.nn.log_softmax(student))


def reverse_kl(student: Float[Array, " V"], teacher: Float[Array, " V"]) -> Float[Array, ""]:
    """KL(q || p) (MiniLLM, arXiv:2306.08543, eq. 1)."""
    return forward_kl(teacher, student)


def generalized_jsd(student: Float[Array, " V"], teacher: Float[Array, " V"], *, mix: float) -> Float[Array, ""]:
    """`mix KL(p || m) + (1 - mix) KL(q || m)`, `m = mix p + (1 - mix) q`, 0 < mix < 1 (GKD, arXiv:2306.13649, eq. 1).

    Divided by mix it tends to the forward KL as mix -> 0.
    """
    log_p, log_q = jax.nn.log_softmax(teacher), jax.nn.log_softmax(student)
    log_m = _mixture(log_p, log_q, mix)
    return mix * _kl(log_p, log_m) + (1 - mix) * _kl(log_q, log_m)


def skew_forward_kl(student: Float[Array, " V"], teacher: Float[Array, " V"], *, mix: float) -> Float[Array, ""]:
    """`KL(p || mix p + (1 - mix) q)`, 0 < mix < 1 (DistiLLM, arXiv:2402.03898, section 3.1)."""
    log_p, log_q = jax.nn.log_softmax(teacher), jax.nn.log_softmax(student)
    return _kl(log_p, _mixture(log_p, log_q, mix))


def skew_reverse_kl(student: Float[Array, " V"], teacher: Float[Array, " V"], *, mix: float) -> Float[Array, ""]:
    """`KL(q || mix q + (1 - mix) p)`, 0 < mix < 1 (DistiLLM, arXiv:2402.03898, section 3.1)."""
    return skew_forward_kl(teacher, student, mix=mix)


def total_variation(student: Float[Array, " V"], teacher: Float[Array, " V"]) -> Float[Array, ""]:
    """Half the sum of |p - q|, in [0, 1]."""
    return 0.5 * jnp.sum(jnp.abs(jax.nn.softmax(teacher) - jax.nn.softmax(student)))


class Divergence(NamedTuple):
    """An entry of the registry.

    Attributes:
      function: `(student logits, teacher logits) -> scalar`, with the keyword `mix` where it takes one.
      mix: the default of that weight; None where it takes none.
    """

    function: Callable[..., Array]
    mix: float | None = None

    def at(self, mix: float | None = None) -> Callable[[Array, Array], Array]:
        """The function of two logit vectors, with `mix`, or its default, where it takes one."""
        return self.function if self.mix is None else partial(self.function, mix=self.mix if mix is None else mix)


DIVERGENCES: dict[str, Divergence] = {
    "forward_kl": Divergence(forward_kl),
    "reverse_kl": Divergence(reverse_kl),
    "jsd": Divergence(generalized_jsd, mix=0.5),
    "skew_forward_kl": Divergence(skew_forward_kl, mix=0.1),
    "skew_reverse_kl": Divergence(skew_reverse_kl, mix=0.1),
    "total_variation": Divergence(total_variation),
}
