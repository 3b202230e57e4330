"""Intervals: they cover the truth about as often as they say, and never hide that there is too little to know."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.errors import EvidenceError
from eval.stats import (
    MIN_DOCUMENTS,
    mcnemar,
    mean_by_document,
    paired_proportion,
    proportion,
    ratio,
    sums_by_document,
)

numbers = st.floats(-1e3, 1e3)


@pytest.mark.parametrize("documents", [10, 25])
def test_the_interval_covers_the_truth_at_roughly_its_nominal_rate(documents):
    """Documents of unequal length and skewed means, whose true token-weighted mean is 1."""
    rng = np.random.default_rng(documents)
    rounds, above, below = 250, 0, 0
    for i in range(rounds):
        tokens = np.ceil(np.exp(rng.normal(0, 0.7, documents)) * 500)
        means = np.exp(rng.normal(0, 0.4, documents) - 0.08)
        e = ratio(means * tokens, tokens, seed=i, resamples=400)
        above += e.low > 1
        below += e.high < 1
    assert 0.86 <= 1 - (above + below) / rounds <= 0.99
    assert above / rounds < 0.06
    assert below / rounds < 0.11


def test_tokens_of_one_document_are_not_taken_for_independent():
    rng = np.random.default_rng(0)
    document = np.repeat(np.arange(10), 200)
    values = np.repeat(rng.normal(size=10), 200) + 0.01 * rng.normal(size=2000)
    by_document = mean_by_document(values, document)
    by_token = mean_by_document(values, np.arange(2000))
    assert by_document.high - by_document.low > 5 * (by_token.high - by_token.low)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(numbers, st.integers(1, 50)), min_size=MIN_DOCUMENTS, max_size=12), st.integers(0, 9))
def test_an_interval_holds_its_value_and_is_the_same_every_time(rows, seed):
    x, n = np.array([r[0] for r in rows]), np.array([float(r[1]) for r in rows])
    first, second = (ratio(x, n, seed=seed, resamples=100) for _ in range(2))
    assert first == second
    assert first.value == pytest.approx(x.sum() / n.sum())
    assert first.low <= first.value <= first.high
    wider = ratio(x, n, seed=seed, resamples=100, confidence=0.99)
    assert wider.low <= first.low
    assert wider.high >= first.high


def test_equal_documents_leave_no_doubt():
    e = ratio(np.full(6, 2.0), np.full(6, 4.0))
    assert (e.low, e.value, e.high) == (0.5, 0.5, 0.5)


def test_a_few_documents_give_a_value_without_an_interval():
    e = ratio(np.arange(MIN_DOCUMENTS - 1.0), np.ones(MIN_DOCUMENTS - 1))
    assert e.value == 1.0
    assert e.low is None
    assert e.high is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_has_no_interval(bad):
    e = ratio(np.array([1.0, bad, 1.0, 1.0, 2.0]), np.ones(5))
    assert not math.isfinite(e.value)
    assert e.low is None


def test_no_denominator_is_not_a_number():
    assert math.isnan(ratio(np.zeros(5), np.zeros(5)).value)
    with pytest.raises(EvidenceError, match="confidence"):
        ratio(np.ones(5), np.ones(5), confidence=95.0)


def test_sums_by_document_need_no_order():
    sums = sums_by_document(np.array([1.0, 2.0, 4.0, 8.0], np.float32), np.array([7, -1, 7, 3]))
    np.testing.assert_array_equal(sums, [2.0, 8.0, 5.0])


def test_many_documents_are_resampled_in_blocks_without_changing_the_result(monkeypatch):
    x = np.random.default_rng(1).normal(size=40)
    whole = ratio(x, np.ones(40), seed=3)
    monkeypatch.setattr("eval.stats._BLOCK", 400)
    parts = ratio(x, np.ones(40), seed=3)
    assert (parts.low, parts.high) == (pytest.approx(whole.low), pytest.approx(whole.high))


def test_wilson_against_the_published_example():
    """Newcombe (1998), table I: 81 of 263 gives 0.2553 to 0.3662, and 0 of 20 gives 0 to 0.1611."""
    e = proportion(81, 263)
    assert (e.low, e.high) == (pytest.approx(0.2553, abs=5e-5), pytest.approx(0.3662, abs=5e-5))
    e = proportion(0, 20)
    assert (e.low, e.high) == (0.0, pytest.approx(0.1611, abs=5e-5))
    assert math.isnan(proportion(0, 0).value)


def test_paired_proportions_cover_their_truth():
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        u = rng.random(30)
        before, after = u < 0.5, (u < 0.45) | (u > 0.85)  # truth: 0.45 + 0.15 - 0.5 = 0.1
        e = paired_proportion(before, after)
        hits += e.low <= 0.1 <= e.high
    assert 0.92 <= hits / 400 <= 0.99


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40))
def test_paired_proportions_mirror_when_the_sides_are_swapped(rows):
    a, b = np.array(rows).T
    ab, ba = paired_proportion(a, b), paired_proportion(b, a)
    assert ab.value == pytest.approx(b.mean() - a.mean())
    assert (ab.low, ab.high) == (pytest.approx(-ba.high), pytest.approx(-ba.low))
    assert -1 <= ab.low <= ab.value <= ab.high <= 1
    assert mcnemar(a, b) == mcnemar(b, a)


def test_mcnemar_is_the_exact_binomial():
    before = np.array([False] * 8 + [True] * 2)
    after = ~before  # 8 won, 2 lost
    assert mcnemar(before, after) == pytest.approx(2 * (1 + 10 + 45) / 2**10)
    assert mcnemar(before, before) == 1.0
