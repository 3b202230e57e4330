"""The schedule that moves from SFT to a preference loss."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.align.mix import STAGES, TOLERANCE, Staged

rates = st.lists(st.floats(0, 1), max_size=20)


def weights(mix, win_rates):
    """The weight after each validation, with a batch trained before each."""
    found = []
    for rate in win_rates:
        mix.take()
        mix.observe(rate)
        found.append(mix.weight)
    return found


@pytest.mark.parametrize(
    ("win_rates", "wanted"),
    [
        ([0.5, 0.6, 0.7, 0.8, 0.8], [0.25, 0.5, 0.75, 1.0, 1.0]),  # it rises by quarters and stays
        ([0.8, 0.73, 0.8], [0.25, 0.5, 0.75]),  # less than a tenth is no fall
        ([0.8, 0.8, 0.71, 0.71, 0.75], [0.25, 0.5, 0.0, 0.0, 0.25]),  # of the best, not of the last; it rises anew
        ([0.8, math.nan, 0.8], [0.25, 0.0, 0.25]),
        ([0.0, 0.0], [0.25, 0.5]),
    ],
)
def test_the_weight_rises_while_the_win_rate_holds_and_falls_to_sft(win_rates, wanted):
    mix = Staged()
    assert mix.weight == 0
    assert weights(mix, win_rates) == wanted


@given(rates=rates)
def test_the_weight_goes_up_one_stage_or_to_zero(rates):
    before, best = 0.0, 0.0
    for rate, after in zip(rates, weights(Staged(), rates)):
        best = max(best, rate)
        assert after == (min(1.0, before + 1 / STAGES) if rate >= (1 - TOLERANCE) * best else 0.0)
        before = after


def test_a_weight_that_no_batch_has_had_is_not_judged():
    mix = Staged()
    mix.observe(1.0)  # before training
    assert weights(mix, [0.5, 0.5]) == [0.25, 0.5]
    mix.observe(0.0)  # the same validation again
    assert mix.weight == 0.5


@given(rates=rates, at=st.integers(0, 20), is_used=st.booleans())
def test_a_schedule_continues_exactly_from_its_state(rates, at, is_used):
    one, other = Staged(), Staged()
    weights(one, rates[:at])
    if is_used:
        one.take()
    other.restore(json.loads(json.dumps(one.state())))
    assert other.weight == one.weight
    one.observe(0.4)
    other.observe(0.4)
    assert weights(one, rates[at:]) == weights(other, rates[at:])
