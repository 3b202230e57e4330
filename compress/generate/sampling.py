"""Choosing the next token.

Letters: B batch, V vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Temperature 0 is greedy; `top_k` 0 and `top_p` 1 keep all tokens."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


GREEDY = Sampling()


def keep_top_k(logits: Float[Array, "B V"], k: int) -> Float[Array, "B V"]:
    """All but the k largest logits of a row set to -inf; ties with the k-th stay."""
    kth = jax.lax.top_k(logits, min(k, logits.shape[-1]))[0][:, -1:]
    return jnp.where(logits < kth, -jnp.inf, logits)


def keep_top_p(logits: Float[Array, "B V"], p: float) -> Float[Array, "B V"]:
    """All but the smallest set of most likely tokens whose probability reaches p set to -inf (nucleus sampling,
    arXiv:1904.09751, eq. 2); the most likely token always stays.
    """
    order = jnp.argsort(-logits, axis=-1)
    ranked = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), order, axis=-1)
    before = jnp.cumsum(ranked, axis=-1) - ranked
    dropped = (before >= p).at[:, 0].set(False)
    return jnp.where(jnp.take_along_axis(dropped, jnp.argsort(order, axis=-1), axis=-1), -jnp.inf, logits)


def sample(logits: Float[Array, "B V"], sampling: Sampling, keys: Key[Array, " B"]) -> Int[Array, " B"]:
    """A token a row: temperature first, then top-k, then top-p, then a draw with the row's key."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1)
    logits = logits / sampling.temperature
    if sampling.top_k:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p < 1:
        logits = keep_top_p(logits, sampling.top_p)
    return jax.vmap(jax.random.categorical)(keys, logits)
