"""Generation with a key-value cache: one pass over the prompts, then a token a step for all rows.

Letters: B batch, T prompt tokens, N new tokens, S stop tokens.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from compress.generate.sampling import GREEDY, Sampling, sample
from compress.models.config import DecoderConfig
from compress.models.decoder import Stacked, empty_cache, extend, logits

# Prompts and answers are padded to multiples of this, so that nearby lengths share a compiled program.
STRIDE = 64


@partial(jax.jit, static_argnames=("config", "sampling", "new", "int8_cache"))
def continue_rows(
    config: DecoderConfig,
    stacked: Stacked,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    keys: Key[Array, " B"],
    stop: Int[Array, " S"],
    limit: Int[Array, ""],
    *,
    sampling: Sampling,
    new: int,
    int8_cache: bool = False,
) -> Int[Array, "B N"]:
    """At most `limit` of N = `new` tokens for every row; -1 after one of `stop`.

    A row's prompt is its first `lengths` tokens; of a row without one, the tokens mean nothing. Token n of a row is
    drawn with `fold_in(key, n)` of the row's key.
    """
    batch, time = tokens.shape
    columns = jnp.broadcast_to(jnp.arange(time), (batch, time))
    segments = (columns < lengths[:, None]).astype(jnp.int32)
    cache = empty_cache(config, batch, time + new, jnp.int8 if int8_cache else stacked.rest["model.norm.weight"].dtype)
    hidden, cache = extend(config, stacked, cache, tokens, columns, segments)
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)

    def choose(hidden, number):
        row_keys = jax.vmap(partial(jax.random.fold_in, data=number))(keys)
        return sample(logits(config, stacked, hidden[:, 0]), sampling, row_keys).astype(jnp.int32)

    def unfinished(state):
        number, _, _, _, done = state
        return (number < limit) & ~done.all()

    def step(state):
        number, hidden, cache, out, done = state
        token = choose(hidden, number)
        out = out.at[:, number].set(jnp.where(done, -1, token))
        done = done | jnp.isin(token, stop)
        position = (lengths + number)[:, None]
        hidden, cache = extend(config, stacked, cache, token[:, None], position, jnp.ones((batch, 1), jnp.int32))
        return number + 1, hidden, cache, out, done

    start = (jnp.int32(0), last, cache, jnp.full((batch, new), -1, jnp.int32), jnp.zeros(batch, bool))
    return jax.lax.while_loop(unfinished, step, start)[3]


def generate(
    config: DecoderConfig,
    stacked: Stacked,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int = 64,
    sampling: Sampling = GREEDY,
    stop: Sequence[int] = (),
    seed: int = 0,
    int8_cache: bool = False,
) -> list[list[int]]:
    """New token ids for every prompt, the stop token left out.

    A row's tokens depend on its prompt, its place and `seed` alone, not on the other rows. With `int8_cache`, keys and
    values are kept in 8 bits.

    Raises:
      ValueError: a prompt has no token.
    """
    if any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("a prompt has no token; begin with at least one")
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    longest, new = (-(-int(n) // STRIDE) * STRIDE for n in (lengths.max(), max_tokens))
    tokens = np.zeros((len(prompts), longest), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    keys = jax.vmap(partial(jax.random.fold_in, jax.random.key(seed)))(jnp.arange(len(prompts)))
    ends = np.array(list(stop) or [-2], np.int32)
    options: dict[str, Any] = {"sampling": sampling, "new": new, "int8_cache": int8_cache}
    out = continue_rows(config, stacked, tokens, lengths, keys, ends, max_tokens, **options)
    stops = set(stop)
    return [[int(t) for t in row if t >= 0 and int(t) not in stops] for row in np.asarray(out)]
