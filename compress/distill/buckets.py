"""A next-token distribution as a few named tokens and one bucket for all others.

Letters: V vocabulary, K named tokens, W = K + 1 buckets.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from compress.models.attention import MASKED


def log_buckets(logits: Float[Array, " V"], ids: Int[Array, " K"]) -> Float[Array, " W"]:
    """Log-probabilities in float32 of the tokens `ids`, each named once, and of all others together.

    An id beyond V, and the others where there are none, have `MASKED`: a probability of zero.
    """
    logs = jax.nn.log_softmax(logits.astype(jnp.float32))
    named = logs.at[ids].get(mode="fill", fill_value=MASKED)
    return jnp.append(named, jax.nn.logsumexp(logs.at[ids].set(MASKED, mode="drop")))


def top_buckets(logits: Float[Array, " V"], k: int, temperature: float) -> tuple[Float[Array, " W"], Int[Array, " K"]]:
    """`log_buckets` at `temperature` of the k likeliest tokens, likeliest first, and their ids."""
    ids = jax.lax.top_k(logits, k)[1]
    return log_buckets(logits / temperature, ids), ids
