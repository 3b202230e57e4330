"""Every metric by its definition in NumPy, and the registry as a whole."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval import divergence, perplexity, preference, retention
from eval.errors import EvidenceError
from eval.metrics import METRICS, Evidence, measure
from eval.preference import PairScores
from eval.quantization_error import layer_error, tensor_error, total
from eval.report import Size, SizePart
from eval.scores import Chunk, TokenScores

RNG = np.random.default_rng(0)
DOCUMENT = np.repeat(np.arange(8, dtype=np.int32), [3, 10, 5, 8, 2, 9, 4, 9])


def token_scores(shift=0.0, kl=("parent", "teacher")):
    rng = np.random.default_rng(1)
    nll = rng.gamma(2, 1, 50).astype(np.float32) + np.float32(shift)
    return TokenScores(
        nll,
        DOCUMENT,
        {b: (rng.gamma(1, 0.1, 50) + shift).astype(np.float32) for b in kl},
        {b: rng.random(50) > 0.2 for b in kl},
        np.full(50, 4, np.int32),
    )


def pair_scores(pairs=40):
    rng = np.random.default_rng(2)
    chosen, rejected = rng.normal(-20, 5, pairs), rng.normal(-22, 5, pairs)
    return PairScores(chosen, rejected, chosen - rng.normal(0.3, 1, pairs), rejected + rng.normal(0.3, 1, pairs))


def kept():
    rng = np.random.default_rng(3)
    base, step = rng.normal(size=(50, 6)), rng.normal(size=(50, 6))
    logits = {"base": base, "adapted": base + step, "landed": base + 0.9 * step}
    arrays = {name: x.astype(np.float32) for name, x in logits.items()}
    return retention.accumulate([Chunk(arrays, np.zeros(50, np.int32), np.ones(50, bool), DOCUMENT)])


def evidence():
    scores = {name: token_scores(s) for name, s in (("candidate", 0.02), ("distilled", 0.01), ("cut", 0.5))}
    scores["parent"] = token_scores(0.0, kl=("teacher",))
    weight = RNG.normal(size=(4, 8)).astype(np.float32)
    return Evidence(
        scores=scores,
        preference={"candidate": pair_scores()},
        retention=kept(),
        coverage=0.5,
        tensors=[tensor_error("w", weight, weight + np.float32(0.01))],
        size=Size([SizePart("mlp", 1000, 520), SizePart("embedding", 100, 200)]),
    )


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_is_found_finite_with_the_interval_that_it_promises(name):
    found = [m for m in measure(evidence()) if m.name == name]
    assert found
    for m in found:
        assert math.isfinite(m.value)
        assert (m.low is not None) == METRICS[name].interval
        assert (m.baseline is not None) == METRICS[name].versus
        if m.low is not None:
            assert m.low <= m.value <= m.high
            assert m.documents > 0


def test_nothing_measured_is_no_metric():
    assert measure(Evidence()) == []


def test_perplexity_is_exp_of_the_mean_over_tokens():
    s = token_scores()
    e = perplexity.perplexity(s)
    assert e.value == pytest.approx(math.exp(s.nll.mean()), rel=1e-6)
    assert e.low < e.value < e.high
    bits = s.nll.sum() / math.log(2) / s.bytes.sum()
    assert perplexity.bits_per_byte(s).value == pytest.approx(bits, rel=1e-6)


def test_the_increase_of_perplexity_is_paired_by_token():
    a, b = token_scores(), token_scores(shift=0.03)
    e = perplexity.perplexity_increase(a, b)
    assert e.value == pytest.approx(math.expm1(0.03), rel=1e-4)
    # The difference is the same everywhere: pairing takes the spread of the text out of the interval.
    assert e.high - e.low < 1e-5


def test_an_overflowing_perplexity_is_infinite_and_not_an_error():
    s = token_scores(shift=1e4)
    assert math.isinf(perplexity.perplexity(s).value)
    assert math.isinf(perplexity.perplexity_increase(token_scores(), s).value)


def test_scores_of_other_tokens_are_not_paired():
    a = token_scores()
    b = TokenScores(a.nll[:-1], a.document[:-1])
    with pytest.raises(EvidenceError, match="not of the same documents"):
        perplexity.perplexity_increase(a, b)
    with pytest.raises(EvidenceError, match="compared with: parent, teacher"):
        divergence.kl_mean(a, "grandparent")
    with pytest.raises(EvidenceError, match="needs the bytes"):
        perplexity.bits_per_byte(b)


def test_divergence_by_its_definition():
    s = token_scores()
    kl = s.kl["teacher"].astype(np.float64)
    assert divergence.kl_mean(s, "teacher").value == pytest.approx(kl.mean())
    assert divergence.kl_quantile(s, "teacher", 0.99).value == pytest.approx(np.quantile(kl, 0.99))
    assert divergence.kl_quantile(s, "teacher", 1.0).value == kl.max()
    assert divergence.top1_agreement(s, "teacher").value == pytest.approx(s.agree["teacher"].mean())
    gain = divergence.kl_gain(token_scores(shift=0.5), s, "teacher")
    assert gain.value == pytest.approx(0.5, rel=1e-5)
    assert gain.low > 0.49


def test_one_nan_token_makes_the_whole_metric_nan():
    s = token_scores()
    s.kl["teacher"][7] = np.nan
    assert math.isnan(divergence.kl_mean(s, "teacher").value)
    assert math.isnan(divergence.kl_quantile(s, "teacher", 0.5).value)


def test_tensor_error_by_its_definition():
    w = RNG.normal(size=(6, 10)).astype(np.float32)
    q = w + RNG.normal(size=w.shape).astype(np.float32) * np.float32(0.1)
    e = tensor_error("w", w, q)
    difference = w.astype(np.float64) - q
    assert e.mse == pytest.approx((difference**2).mean(), rel=1e-5)
    assert e.relative_mse == pytest.approx((difference**2).sum() / (w.astype(np.float64) ** 2).sum(), rel=1e-5)
    assert e.sqnr_db == pytest.approx(-10 * math.log10(e.relative_mse))
    assert e.max_abs == pytest.approx(np.abs(difference).max(), rel=1e-6)
    assert e.count == 60


def test_errors_of_pieces_add_up_to_the_error_of_the_whole():
    w, q = RNG.normal(size=(2, 30, 4)).astype(np.float32)
    mask = RNG.random(30) > 0.4
    whole = layer_error("h", w, q, mask)
    parts = layer_error("h", w[:11], q[:11], mask[:11]) + layer_error("h", w[11:], q[11:], mask[11:])
    assert parts.relative_mse == pytest.approx(whole.relative_mse)
    assert (parts.count, parts.max_abs) == (whole.count, whole.max_abs)
    assert whole.count == mask.sum() * 4
    poisoned = layer_error("h", np.where(mask[:, None], w, np.nan), q, mask)
    assert poisoned == whole


def test_errors_at_the_edges():
    zero, one = np.zeros((2, 2), np.float32), np.ones((2, 2), np.float32)
    assert tensor_error("w", zero, zero).relative_mse == 0
    assert tensor_error("w", one, one).sqnr_db == math.inf
    assert tensor_error("w", zero, one).relative_mse == math.inf
    broken = tensor_error("w", one, np.full((2, 2), np.nan, np.float32))
    for both in (broken + tensor_error("v", one, one), tensor_error("v", one, one) + broken):
        assert math.isnan(both.relative_mse)
        assert math.isnan(both.max_abs)
    assert math.isnan(total("none", []).mse)
    assert tensor_error("bias", np.ones(3, np.float32), np.zeros(3, np.float32)).relative_mse == 1


@given(st.floats(-2, 2), st.integers(0, 100))
def test_the_retained_share_is_the_part_of_the_step_that_landed(part, seed):
    rng = np.random.default_rng(seed)
    base, step = rng.normal(size=(2, 6, 5))
    logits = {"base": base, "adapted": base + step, "landed": base + part * step}
    logits = {name: x.astype(np.float32) for name, x in logits.items()}
    mask = np.array([1, 1, 0, 1, 1, 1])
    chunk = Chunk(logits, np.zeros(6, np.int32), mask, np.arange(6, dtype=np.int32))
    found = retention.accumulate([chunk])
    assert found.tokens == 5
    assert found.share().value == pytest.approx(part, abs=1e-4)
    assert found.residual().value == pytest.approx(abs(1 - part), abs=1e-3)


def test_retention_of_nothing_taught_is_nan_and_dropped_adapters_are_zero():
    x = RNG.normal(size=(6, 5)).astype(np.float32)
    y = x + np.float32(0.5)
    rest = (np.zeros(6, np.int32), np.ones(6, bool), np.arange(6, dtype=np.int32))
    untaught = retention.accumulate([Chunk({"base": x, "adapted": x, "landed": y}, *rest)])
    assert math.isnan(untaught.share().value)
    assert math.isnan(untaught.residual().value)
    dropped = retention.accumulate([Chunk({"base": x, "adapted": y, "landed": x}, *rest)])
    assert dropped.share().value == 0
    assert dropped.residual().value == 1
    with pytest.raises(EvidenceError, match="no landed"):
        retention.accumulate([Chunk({"base": x, "adapted": y}, *rest)])
    with pytest.raises(EvidenceError, match="no token to score"):
        retention.accumulate([])


def test_preference_by_its_definition():
    p = pair_scores()
    margins = 0.1 * ((p.chosen - p.reference_chosen) - (p.rejected - p.reference_rejected))
    assert preference.reward_margin(p).value == pytest.approx(margins.mean())
    assert preference.reward_accuracy(p).value == pytest.approx((margins > 0).mean())
    assert preference.preference_accuracy(p).value == pytest.approx((p.chosen > p.rejected).mean())
    before = (p.reference_chosen > p.reference_rejected).mean()
    gain = preference.preference_accuracy_gain(p)
    assert gain.value == pytest.approx((p.chosen > p.rejected).mean() - before)
    assert gain.low <= gain.value <= gain.high


def test_a_tie_is_half_a_win_and_a_nan_is_no_answer():
    ours, theirs = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 3.0, 2.0, 1.0])
    assert preference.win_rate(ours, theirs).value == 2.5 / 4
    assert math.isnan(preference.win_rate(np.array([np.nan]), np.array([1.0])).value)
    p = PairScores(*np.array([[1.0, np.nan], [0, 0], [0, 0], [0, 0]]))
    measured = (
        preference.preference_accuracy(p),
        preference.preference_accuracy_gain(p),
        preference.reward_accuracy(p),
    )
    assert all(math.isnan(e.value) for e in measured)
    with pytest.raises((EvidenceError, TypeError)):
        PairScores(np.ones(3), np.ones(2), np.ones(3), np.ones(3))


def test_size_counts_bits_by_weight():
    size = Size([SizePart("a", 100, 50), SizePart("b", 100, 200)])
    assert size.bits_per_weight == 10
    assert size.ratio == pytest.approx(250 / 400)
    assert math.isnan(Size([]).bits_per_weight)
