"""A next-token distribution as a few named tokens and one bucket for all others.

Letters: V vocabulary, K named tokens, W = K + 1 buckets, or V where there are none.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float16, Int

from compress.distill.cache import LOWEST
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


def kept(
    logits: Float[Array, " V"], k: int, temperature: float
) -> tuple[Float16[Array, " W"], Int[Array, " K"] | None]:
    """What a cache has of a token: all log-probabilities, or where k > 0 `top_buckets`."""
    log_probs, ids = top_buckets(logits, k, temperature) if k else (jax.nn.log_softmax(logits), None)
    return jnp.maximum(log_probs, LOWEST).astype(jnp.float16), ids
