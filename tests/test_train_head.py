"""Losses at the head, chunk by chunk, against whole logits in NumPy; and that whole logits never exist."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.align.loss import policy_divergence, preference_loss, sft_loss
from compress.distill.loss import distillation_loss
from compress.models.lora import with_adapters
from compress.train.head import HeadLoss, cross_entropy, head_sum, head_tokens
from tests import tiny_training as tiny

V, D = 13, 5
HEADS = {"plain": None, "soft cap": 2.0}


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    with tiny.unoptimized():
        yield


def project(hidden, weight, *, cap):
    logits = hidden @ weight.T
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def with_mean(logits, target):
    """Cross-entropy that logs something of its own."""
    loss, _ = cross_entropy(logits, target)
    return loss, {"mean": logits.mean()}


def problem(seed, batch, time):
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(batch, time, D)).astype(np.float32)
    weight = rng.normal(size=(V, D)).astype(np.float32)
    target = rng.integers(0, V, (batch, time), dtype=np.int32)
    mask = (rng.random((batch, time)) < 0.6).astype(np.float32) * rng.choice([1, 0.5], (batch, time))
    return hidden, weight, target, mask.astype(np.float32)


def dense(hidden, weight, target, cap):
    """Losses, the logged means, and d loss / d logits before the cap, of every token, in NumPy."""
    raw = np.asarray(hidden, np.float64) @ np.asarray(weight, np.float64).T
    logits = raw if cap is None else cap * np.tanh(raw / cap)
    logs = tiny.numpy_log_softmax(logits)
    gradient = np.exp(logs) - np.eye(V)[target]
    if cap is not None:
        gradient *= 1 - (logits / cap) ** 2
    return -np.take_along_axis(logs, target[..., None], -1)[..., 0], logits.mean(-1), gradient


shapes = {
    "batch": st.integers(1, 3),
    "time": st.integers(1, 7),
    "chunk": st.integers(1, 24),
    "seed": st.integers(0, 99),
}
capped = pytest.mark.parametrize("cap", HEADS.values(), ids=HEADS.keys())
close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


@capped
@settings(max_examples=8, deadline=None)
@given(**shapes)
def test_the_sum_and_both_gradients_are_those_of_whole_logits_for_any_chunk(cap, batch, time, chunk, seed):
    hidden, weight, target, mask = problem(seed, batch, time)
    head = HeadLoss(partial(project, cap=cap), with_mean, chunk=chunk)
    run = lambda h, w: head_sum(head, h, w, None, (jnp.asarray(target),), jnp.asarray(mask))  # noqa: E731
    both = jax.jit(jax.value_and_grad(run, (0, 1), has_aux=True))
    (total, metrics), (d_hidden, d_weight) = both(hidden, weight)
    losses, means, gradient = dense(hidden, weight, target, cap)
    close(total, (losses * mask).sum())
    close(metrics["mean"], (means * mask).sum())
    gradient = gradient * mask[..., None]
    close(d_hidden, gradient @ weight)
    close(d_weight, np.einsum("btv,btd->vd", gradient, hidden))


@capped
@settings(max_examples=8, deadline=None)
@given(**shapes)
def test_losses_by_token_pass_on_the_gradient_of_any_function_of_them(cap, batch, time, chunk, seed):
    hidden, weight, target, mask = problem(seed, batch, time)
    head = HeadLoss(partial(project, cap=cap), with_mean, chunk=chunk)
    run = lambda h: head_tokens(head, h, jnp.asarray(weight), None, (jnp.asarray(target),), jnp.asarray(mask))  # noqa: E731
    outer = np.random.default_rng(seed).normal(size=target.shape).astype(np.float32)

    @jax.jit
    def forward_and_back(hidden):
        values, back, metrics = jax.vjp(run, hidden, has_aux=True)
        return values, metrics, back(jnp.asarray(outer))[0]

    values, metrics, d_hidden = forward_and_back(hidden)
    losses, means, gradient = dense(hidden, weight, target, cap)
    close(values, losses * mask)
    close(metrics["mean"], means * mask)
    close(d_hidden, (gradient * (mask * outer)[..., None]) @ weight)


@settings(max_examples=8, deadline=None)
@given(counts=st.tuples(*[st.integers(0, 9)] * 2), size=st.integers(1, 9), seed=st.integers(0, 99))
def test_no_more_chunks_are_computed_than_the_fullest_row_has_targets_for(counts, size, seed):
    hidden, weight, target, _ = map(jnp.asarray, problem(seed, 2, 9))
    draw = np.random.default_rng(seed)
    mask = np.stack([draw.permutation(np.arange(9) < count) for count in counts]).astype(np.float32)
    computed = []

    def context(frozen, inputs):
        jax.debug.callback(lambda: computed.append(1))
        return inputs

    head = HeadLoss(partial(project, cap=None), cross_entropy, context, 2 * size)
    jax.block_until_ready(head_tokens(head, hidden, weight, None, (target,), jnp.asarray(mask)))
    jax.effects_barrier()
    assert len(computed) == -(-max(counts) // size)


@pytest.mark.parametrize("chunk", [4, 512])
def test_what_is_behind_the_mask_reaches_neither_the_sum_nor_a_gradient(chunk):
    hidden, weight, target, mask = map(jnp.asarray, problem(3, 2, 7))
    other = jnp.asarray(problem(4, 2, 7)[0])

    def distance(logits, theirs, target):
        loss, _ = cross_entropy(logits, target)
        return loss + jnp.square(logits - theirs).sum(), {"their": theirs.sum()}

    context = lambda frozen, inputs: (inputs[0] @ frozen.T, inputs[1])  # noqa: E731
    head = HeadLoss(partial(project, cap=None), distance, context, chunk)
    run = jax.jit(jax.value_and_grad(partial(head_sum, head), (0, 1), has_aux=True))
    nan = lambda x: jnp.where(mask[..., None] > 0, x, jnp.nan)  # noqa: E731
    clean = run(hidden, weight, weight, (other, target), mask)
    spoilt = run(nan(hidden), weight, weight, (nan(other), jnp.where(mask > 0, target, 10**6)), mask)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(spoilt))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), clean, spoilt)


def test_the_sum_scales_with_what_comes_after_it():
    hidden, weight, target, mask = map(jnp.asarray, problem(5, 2, 6))
    head = HeadLoss(partial(project, cap=None), cross_entropy, chunk=4)
    plain, scaled = (
        jax.grad(lambda h, s=scale: s * head_sum(head, h, weight, None, (target,), mask)[0])(hidden)
        for scale in (1.0, -3.0)
    )
    close(scaled, -3 * plain)


# Rows of many chunks of the default size; nothing of this size is computed, only traced.
ROWS, LONG, CHUNK = 2, 1025, 512


def losses():
    base, adapters = tiny.base_and_adapters()
    batch, pairs = tiny.batch(0, ROWS, LONG), tiny.pairs(0, ROWS, LONG)
    distil = distillation_loss(tiny.STUDENT, tiny.TEACHER)

    def divergence(adapters, base, batch, keys):
        policy = with_adapters(base, adapters, 2.0)
        return (*policy_divergence(tiny.STUDENT, policy, base, batch), {})

    return {
        "distil": (distil, tiny.student(), tiny.teacher(), batch),
        "sft": (sft_loss(tiny.STUDENT, 2.0), adapters, base, batch),
        "dpo": (preference_loss(tiny.STUDENT, 2.0), adapters, base, pairs),
        "divergence": (divergence, adapters, base, batch),
    }


def largest_with_vocabulary(shapes) -> int:
    """Elements of the largest array that has a vocabulary's axis and a chunk's, and so is no weight."""
    vocabularies = {tiny.STUDENT.vocab_size, tiny.TEACHER.vocab_size}
    return max((int(np.prod(shape)) for shape in shapes if vocabularies & set(shape) and len(shape) > 2), default=0)


def shapes_in(jaxpr):
    for equation in jaxpr.eqns:
        yield from (tuple(variable.aval.shape) for variable in equation.outvars)
        for parameter in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from shapes_in(inner)


def with_gradient(loss):
    def run(trainable, frozen, batch):
        total, count, metrics = loss(trainable, frozen, batch, None)
        return total, (count, metrics)

    return jax.value_and_grad(run, has_aux=True)


@pytest.mark.parametrize("name", losses())
def test_no_more_than_a_chunk_of_logits_exists_in_the_program(name):
    loss, trainable, frozen, batch = losses()[name]
    most = CHUNK * tiny.TEACHER.vocab_size
    program = jax.make_jaxpr(with_gradient(loss))(trainable, frozen, batch)
    assert 0 < largest_with_vocabulary(shapes_in(program.jaxpr)) <= most < ROWS * (LONG - 1) * tiny.VOCAB / 3


def test_no_more_than_a_chunk_of_logits_exists_in_the_compiled_program():
    loss = distillation_loss(tiny.STUDENT, tiny.TEACHER, chunk=8)
    batch = tiny.batch(0, ROWS, 33)
    compiled = jax.jit(with_gradient(loss)).lower(tiny.student(), tiny.teacher(), batch).compile().as_text()
    found = {tuple(map(int, shape.split(","))) for shape in re.findall(r"\w\[(\d+(?:,\d+)*)\]", compiled)}
    whole = ROWS * 32 * tiny.VOCAB
    vocabularies = {tiny.STUDENT.vocab_size, tiny.TEACHER.vocab_size}
    assert max(int(np.prod(shape)) for shape in found if vocabularies & set(shape)) < whole


def test_whole_logits_would_have_been_seen():
    batch = tiny.batch(0, ROWS, LONG)
    program = jax.make_jaxpr(lambda stacked: tiny.logits_of(tiny.STUDENT, stacked, batch))(tiny.student())
    assert largest_with_vocabulary(shapes_in(program.jaxpr)) == ROWS * LONG * tiny.VOCAB
