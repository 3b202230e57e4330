"""Attention against its definition, the softmax of scaled dot products, and the gradients autodiff finds for that."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.models.attention import attend, visible

SCALE = 0.3
shapes = {
    "batch": st.integers(1, 2),
    "time": st.integers(1, 9),
    "kv_heads": st.integers(1, 3),
    "groups": st.integers(1, 3),
    "seed": st.integers(0, 99),
}
capped = pytest.mark.parametrize("softcap", [None, 2.0])
close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


def problem(batch, time, kv_heads, groups, seed):
    """Queries, keys, values, a gradient of what is seen, and the mask of rows with segments and padding."""
    draw = np.random.default_rng(seed)
    shapes = [(batch, time, heads, 4) for heads in (kv_heads * groups, kv_heads, kv_heads, kv_heads * groups)]
    segments = np.sort(draw.integers(0, 3, (batch, time)))[:, ::-1]
    positions = np.broadcast_to(np.arange(time), (batch, time))
    mask = visible(positions, segments, positions, segments)
    return [jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in shapes], mask


def definition(q, k, v, mask, softcap, numpy=jnp):
    """One head at a time, nothing kept back."""
    heads = []
    for head in range(q.shape[2]):
        group = head // (q.shape[2] // k.shape[2])
        scores = numpy.einsum("bte,bse->bts", q[:, :, head], k[:, :, group]) * SCALE
        scores = scores if softcap is None else softcap * numpy.tanh(scores / softcap)
        weights = numpy.exp(scores - scores.max(axis=-1, keepdims=True)) * mask
        heads.append(numpy.einsum("bts,bse->bte", weights / weights.sum(axis=-1, keepdims=True), v[:, :, group]))
    return numpy.stack(heads, axis=2)


@capped
@settings(max_examples=8, deadline=None)
@given(**shapes)
def test_attention_and_its_gradients_are_those_of_the_definition(softcap, **shape):
    (q, k, v, d_seen), mask = problem(**shape)
    seen, back = jax.vjp(lambda *qkv: attend(*qkv, mask, SCALE, softcap), q, k, v)
    close(seen, definition(*map(np.asarray, (q, k, v, mask)), softcap, np))
    _, expected = jax.vjp(lambda *qkv: definition(*qkv, mask, softcap), q, k, v)
    jax.tree.map(close, back(d_seen), expected(d_seen))


@capped
def test_in_bfloat16_attention_stays_by_its_float32_self(softcap):
    arrays, mask = problem(2, 9, 2, 3, 0)

    def run(dtype):
        *qkv, d_seen = (array.astype(dtype) for array in arrays)
        seen, back = jax.vjp(lambda *qkv: attend(*qkv, mask, SCALE, softcap), *qkv)
        return seen, *back(d_seen)

    for half, whole in zip(run(jnp.bfloat16), run(jnp.float32), strict=True):
        assert half.dtype == jnp.bfloat16
        np.testing.assert_allclose(half.astype(jnp.float32), whole, rtol=0.1, atol=0.05)
