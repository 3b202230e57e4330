"""Logits to scores per token, against their definition in NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.errors import EvidenceError
from eval.scores import Chunk, score, score_tokens

PAIRS = [("parent", "candidate"), ("teacher", "candidate"), ("teacher", "parent")]


def log_softmax(x):
    x = np.asarray(x, np.float64)
    top = x.max(-1, keepdims=True)
    return x - top - np.log(np.exp(x - top).sum(-1, keepdims=True))


def drawn(rng, tokens, vocabulary=11, spread=2.0):
    return rng.normal(size=(tokens, vocabulary)).astype(np.float32) * spread


def stream(seed, tokens, widths=(14, 11, 11)):
    """Arrays of three related models over `tokens` tokens."""
    rng = np.random.default_rng(seed)
    teacher = drawn(rng, tokens, max(widths))
    models = {
        name: teacher[:, :width] + drawn(rng, tokens, width, 0.5)
        for name, width in zip(("teacher", "parent", "candidate"), widths)
    }
    targets = rng.integers(0, min(widths), tokens).astype(np.int32)
    return models, targets, rng.random(tokens) > 0.3, np.arange(tokens, dtype=np.int32) // 7


def cut(models, targets, mask, document, edges):
    for start, stop in zip([0, *edges], [*edges, len(targets)]):
        logits = {name: x[start:stop] for name, x in models.items()}
        yield Chunk(logits, targets[start:stop], mask[start:stop], document[start:stop])


def test_scores_are_their_definitions_in_numpy():
    models, targets, mask, document = stream(0, 40)
    scores = score(cut(models, targets, mask, document, []), PAIRS)
    rows = np.arange(40)[mask]
    log_q = log_softmax(models["candidate"])
    np.testing.assert_allclose(scores["candidate"].nll, -log_q[rows, targets[mask]], rtol=1e-5, atol=1e-6)
    for baseline in ("parent", "teacher"):
        shared = models[baseline][:, :11]
        log_p = log_softmax(shared)
        kl = (np.exp(log_p) * (log_p - log_q)).sum(-1)
        np.testing.assert_allclose(scores["candidate"].kl[baseline], kl[mask], rtol=1e-4, atol=1e-6)
        agree = shared.argmax(-1) == models["candidate"].argmax(-1)
        np.testing.assert_array_equal(scores["candidate"].agree[baseline], agree[mask])
    np.testing.assert_array_equal(scores["parent"].document, document[mask])
    assert set(scores["parent"].kl) == {"teacher"}
    assert not scores["teacher"].kl


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.01, 50))
def test_kl_is_never_negative_and_zero_on_identical_logits(seed, spread):
    rng = np.random.default_rng(seed)
    p, q = drawn(rng, 8, spread=spread), drawn(rng, 8, spread=spread)
    targets = np.zeros(8, np.int32)
    _, kl, agree = score_tokens(q, targets, {"p": p, "same": q, "shifted": q + np.float32(3)})
    assert np.all(np.asarray(kl["p"]) >= 0)
    assert np.all(np.asarray(kl["same"]) == 0)
    assert np.all(np.asarray(agree["same"]))
    np.testing.assert_allclose(kl["shifted"], 0, atol=1e-6)


def test_a_tiny_divergence_is_not_lost_in_float32():
    rng = np.random.default_rng(3)
    p = drawn(rng, 32, 300, 4.0)
    q = p + drawn(rng, 32, 300, 1e-3)
    _, kl, _ = score_tokens(q, np.zeros(32, np.int32), {"p": p})
    log_p, log_q = log_softmax(p), log_softmax(q)
    np.testing.assert_allclose(kl["p"], (np.exp(log_p) * (log_p - log_q)).sum(-1), rtol=2e-2, atol=1e-9)


def test_a_token_that_the_model_rules_out_costs_infinity_and_one_that_the_baseline_rules_out_nothing():
    p = np.array([[0.0, 0.0, -np.inf]], np.float32)
    q = np.array([[0.0, -np.inf, 0.0]], np.float32)
    zero = np.zeros(1, np.int32)
    assert np.isposinf(score_tokens(q, zero, {"p": p})[1]["p"][0])
    np.testing.assert_allclose(
        score_tokens(np.zeros((1, 3), np.float32), zero, {"p": p})[1]["p"], np.log(1.5), rtol=1e-6
    )


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([[32], [8], [8, 16, 24, 32]]))  # few sizes: each compiles
def test_chunking_never_changes_the_result(seed, edges):
    arrays = stream(seed, 40)
    whole, parts = (score(cut(*arrays, e), PAIRS)["candidate"] for e in ([], edges))
    np.testing.assert_allclose(parts.nll, whole.nll, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(parts.kl["teacher"], whole.kl["teacher"], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(parts.document, whole.document)
    np.testing.assert_array_equal(parts.agree["parent"], whole.agree["parent"])


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_masked_out_token_is_never_looked_at(poison):
    models, targets, mask, document = stream(5, 40)
    clean = score(cut(models, targets, mask, document, [16]), PAIRS)["candidate"]
    bad = {name: np.where(mask[:, None], x, poison) for name, x in models.items()}
    masked = score(cut(bad, np.where(mask, targets, -1), mask, document, [16]), PAIRS)["candidate"]
    np.testing.assert_array_equal(masked.nll, clean.nll)
    np.testing.assert_array_equal(masked.kl["teacher"], clean.kl["teacher"])
    assert masked.tokens == mask.sum()


def test_padding_columns_of_a_baseline_do_not_count():
    models, targets, mask, document = stream(1, 40)
    wide = {**models, "parent": np.concatenate([models["parent"], np.full((40, 5), 9, np.float32)], axis=1)}
    a, b = (score(cut(m, targets, mask, document, []), PAIRS)["candidate"] for m in (models, wide))
    np.testing.assert_array_equal(a.kl["parent"], b.kl["parent"])
    np.testing.assert_array_equal(a.agree["parent"], b.agree["parent"])


def test_bfloat16_logits_are_scored_in_float32():
    models, targets, _, _ = stream(2, 16)
    half = jnp.asarray(models["candidate"], jnp.bfloat16)
    nll, _, _ = score_tokens(half, targets, {})
    assert nll.dtype == jnp.float32
    np.testing.assert_allclose(nll, score_tokens(half.astype(jnp.float32), targets, {})[0], rtol=1e-6)


def test_bytes_stay_with_their_tokens():
    models, targets, mask, document = stream(4, 20)
    size = np.arange(20, dtype=np.int32)
    scores = score([Chunk(models, targets, mask, document, size)])
    np.testing.assert_array_equal(scores["parent"].bytes, size[mask])


def test_what_would_be_scored_wrongly_is_refused():
    models, targets, mask, document = stream(6, 12)
    all_in = np.ones(12, bool)
    with pytest.raises(EvidenceError, match=r"target id 11 is outside the vocabulary of parent \(11 columns\)"):
        score([Chunk(models, np.where(np.arange(12) == 3, 11, targets), all_in, document)], PAIRS)
    with pytest.raises(EvidenceError, match="target id -1 is outside"):
        score([Chunk(models, np.full(12, -1, np.int32), all_in, document)])
    with pytest.raises(EvidenceError, match="no logits of grandparent"):
        score([Chunk(models, targets, mask, document)], [("grandparent", "candidate")])
    with pytest.raises(EvidenceError, match="no token to score"):
        score([Chunk(models, targets, np.zeros(12, bool), document)])
    with pytest.raises(EvidenceError, match="no token to score"):
        score([])
    with pytest.raises(EvidenceError, match="the first one of"):
        one = {"parent": models["parent"]}
        score([Chunk(models, targets, mask, document), Chunk(one, targets, mask, document)])
