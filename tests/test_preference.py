"""Preference losses against their papers' formulas in NumPy, what follows from these, and a short training by each."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.align import loss as loss_module
from compress.align.loss import needs_reference, preference_loss
from compress.align.preference import PREFERENCE_LOSSES, Pairs
from compress.align.settings import OWN, Align
from compress.data.batch import CHOSEN, REJECTED
from compress.errors import RecipeError
from compress.models.decoder import Stacked
from compress.train.fit import FitSettings, fit
from tests import tiny_training as tiny


def log_sigmoid(x):
    return -np.logaddexp(0, -x)


def sigmoid(x):
    return np.exp(log_sigmoid(x))


def log_odds(x):
    return x - np.log1p(-np.exp(x))


def kto(c, r, o):
    z = max(0.0, np.concatenate([c, r]).mean())
    return ((1 - sigmoid(o["beta"] * (c - z))) + (1 - sigmoid(o["beta"] * (z - r)))) / 2


def smoothed(c, r, o):
    x, share = o["beta"] * (c - r), o["label_smoothing"]
    return -(1 - share) * log_sigmoid(x), share * log_sigmoid(-x)


# name -> definition on what the method compares, in float64: chosen, rejected, options
DEFINITIONS = {
    "dpo": lambda c, r, o: np.log1p(np.exp(-o["beta"] * (c - r))),
    "cdpo": lambda c, r, o: smoothed(c, r, o)[0] - smoothed(c, r, o)[1],
    "robust": lambda c, r, o: (smoothed(c, r, o)[0] + smoothed(c, r, o)[1]) / (1 - 2 * o["label_smoothing"]),
    "ipo": lambda c, r, o: (c - r - 0.5 / o["beta"]) ** 2,
    "hinge": lambda c, r, o: np.maximum(0, o["margin"] - o["beta"] * (c - r)),
    "kto": kto,
    "orpo": lambda c, r, o: -c - o["beta"] * log_sigmoid(log_odds(c) - log_odds(r)),
    "simpo": lambda c, r, o: -log_sigmoid(o["beta"] * c - o["beta"] * r - o["margin"]),
}
OPTIONS = {"beta": 0.3, "label_smoothing": 0.2, "margin": 0.7}
methods = pytest.mark.parametrize("method", PREFERENCE_LOSSES)
# Log-probabilities are negative, and log-ratios may be.
number = st.floats(-20, -1 / 64, width=32)
some_pairs = st.lists(st.tuples(number, number), min_size=4, max_size=4)  # one length: each is compiled anew


def loss_of(method, chosen, rejected, real=None, **options):
    chosen, rejected = (jnp.asarray(x, jnp.float32) for x in (chosen, rejected))
    real = jnp.ones(chosen.shape, bool) if real is None else jnp.asarray(real)
    return PREFERENCE_LOSSES[method].loss(Pairs(chosen, rejected, real, **{**OPTIONS, **options}))


@methods
@settings(max_examples=25, deadline=None)
@given(
    pairs=some_pairs,
    beta=st.floats(0.05, 3),
    label_smoothing=st.floats(0, 0.45),
    margin=st.floats(0, 2),
)
def test_a_preference_loss_is_its_definition(method, pairs, **options):
    chosen, rejected = np.array(pairs).T
    found = loss_of(method, chosen, rejected, **options)
    assert found.shape == chosen.shape and found.dtype == jnp.float32
    np.testing.assert_allclose(found, DEFINITIONS[method](chosen, rejected, options), rtol=2e-4, atol=2e-5)


@methods
@settings(max_examples=20, deadline=None)
@given(pairs=some_pairs, filler=st.tuples(number, number))
def test_what_fills_up_a_batch_changes_no_loss(method, pairs, filler):
    chosen, rejected = np.array(pairs).T
    filled = loss_of(method, [*chosen, filler[0]], [*rejected, filler[1]], [*[True] * len(pairs), False])
    np.testing.assert_allclose(filled[:-1], loss_of(method, chosen, rejected), rtol=1e-6)


@methods
def test_a_method_says_whether_its_pairs_depend_on_each_other(method):
    chosen, rejected = np.array([6.0, -1.0, 2.0]), np.array([1.0, -3.0, 4.0])
    whole = loss_of(method, chosen, rejected)
    alone = np.concatenate([loss_of(method, c, r) for c, r in zip(chosen[:, None], rejected[:, None])])
    assert np.allclose(whole, alone, rtol=1e-6) != PREFERENCE_LOSSES[method].whole_batch


def slopes(method, chosen, rejected, **options):
    total = lambda c, r: loss_of(method, c, r, **options).sum()  # noqa: E731
    return jax.grad(total, argnums=(0, 1))(jnp.float32([chosen]), jnp.float32([rejected]))


MONOTONE = PREFERENCE_LOSSES.keys() - {"cdpo", "ipo"}


@pytest.mark.parametrize("method", sorted(MONOTONE))
@settings(max_examples=15, deadline=None)
@given(chosen=number, rejected=number)
def test_a_loss_falls_as_the_margin_grows(method, chosen, rejected):
    up, down = slopes(method, chosen, rejected)
    assert up <= 0 <= down
    assert up < 0 or (method == "hinge" and OPTIONS["beta"] * (chosen - rejected) >= OPTIONS["margin"])


@pytest.mark.parametrize("method", ["cdpo", "ipo"])
@settings(max_examples=15, deadline=None)
@given(rejected=number, beta=st.floats(0.1, 2), share=st.floats(0.05, 0.45))
def test_a_loss_with_a_target_is_least_there(method, rejected, beta, share):
    target = {"cdpo": math.log((1 - share) / share) / beta, "ipo": 1 / (2 * beta)}[method]
    signs = [
        np.sign(slopes(method, rejected + target + off, rejected, beta=beta, label_smoothing=share)[0][0])
        for off in (-0.1, 0.1)
    ]
    assert signs == [-1, 1]


@pytest.mark.parametrize("method", ["cdpo", "robust"])
@given(pairs=some_pairs)
@settings(max_examples=20, deadline=None)
def test_without_flipped_labels_it_is_dpo(method, pairs):
    chosen, rejected = np.array(pairs).T
    np.testing.assert_array_equal(
        loss_of(method, chosen, rejected, label_smoothing=0.0), loss_of("dpo", chosen, rejected)
    )


@settings(max_examples=25, deadline=None)
@given(pairs=some_pairs, share=st.floats(0.01, 0.45))
def test_flipped_labels_bias_neither_robust_dpo_nor_what_conservative_dpo_expects(pairs, share):
    chosen, rejected = np.array(pairs).T
    mean = lambda method, **o: (  # noqa: E731
        (1 - share) * loss_of(method, chosen, rejected, **o) + share * loss_of(method, rejected, chosen, **o)
    )
    np.testing.assert_allclose(
        mean("robust", label_smoothing=share), loss_of("dpo", chosen, rejected), rtol=1e-3, atol=1e-3
    )
    np.testing.assert_allclose(loss_of("cdpo", chosen, rejected, label_smoothing=share), mean("dpo"), rtol=1e-5)


def test_kto_is_a_half_at_the_reference():
    assert loss_of("kto", [0.0, 0.0], [0.0, 0.0]).tolist() == [0.5, 0.5]


@methods
@pytest.mark.parametrize(("chosen", "rejected"), [(-2000.0, 0.0), (0.0, -2000.0), (0.0, 0.0)])
def test_a_loss_and_its_slopes_stay_finite(method, chosen, rejected):
    assert np.isfinite(loss_of(method, [chosen], [rejected])).all()
    assert np.isfinite(slopes(method, chosen, rejected)).all()


def test_dpo_of_a_hopeless_pair_keeps_its_slope():
    assert loss_of("dpo", [-2000.0], [2000.0], beta=0.5) == 2000
    assert slopes("dpo", -2000.0, 2000.0, beta=0.5)[0] == -0.5


# What the loss is handed.


@pytest.fixture
def toy(monkeypatch):
    """In place of a model: adapters and base are one factor of a row's log-probability."""
    monkeypatch.setattr(loss_module, "with_adapters", lambda base, adapters, scale, rate, keys: adapters)
    monkeypatch.setattr(
        loss_module,
        "answer_log_probabilities",
        lambda config, policy, rows, remat: -policy.rest["factor"] * _sums(rows),
    )


def _sums(rows):
    return jnp.stack([(rows.tokens * rows.mask * (rows.branches == side)).sum(1) for side in (CHOSEN, REJECTED)])


def toy_pairs(rows=5, size=8):
    pairs = tiny.pairs(4, rows=rows, size=size)
    draw = np.random.default_rng(0)
    columns = {
        "reference_chosen": -draw.uniform(50, 300, size).astype(np.float32),
        "reference_rejected": -draw.uniform(50, 300, size).astype(np.float32),
        "weight": draw.uniform(0, 1, size).astype(np.float32),
    }
    return dataclasses.replace(pairs, **columns)


@methods
@pytest.mark.parametrize("extra", [{}, {"reference_free": True}, {"sft_weight": 0.6}], ids=str)
def test_a_pair_s_loss_is_of_log_ratios_or_means_as_its_method_says_mixed_with_sft(method, extra, toy):
    pairs, theta = toy_pairs(), 0.01
    total, count, metrics = preference_loss(tiny.STUDENT, 1.0, method=method, **OPTIONS, **extra)(
        Stacked({"factor": jnp.float32(theta)}, []), Stacked({}, []), pairs, None
    )
    logs, compared, tokens = {}, {}, {}
    for side, branch in (("chosen", CHOSEN), ("rejected", REJECTED)):
        mask = pairs.rows.mask[:5] * (pairs.rows.branches[:5] == branch)
        tokens[side] = mask.sum(1).astype(np.float64)
        logs[side] = -theta * (pairs.rows.tokens[:5] * mask).sum(1).astype(np.float64)
        compared[side] = logs[side].copy()
        if needs_reference(method, extra.get("reference_free", False)):
            compared[side] -= getattr(pairs, f"reference_{side}")[:5]
        if method in ("ipo", "orpo", "simpo"):
            compared[side] /= tokens[side]
    values = DEFINITIONS[method](compared["chosen"], compared["rejected"], OPTIONS)
    nll = -logs["chosen"] / tokens["chosen"]
    weight = pairs.weight[:5].astype(np.float64)
    wanted = weight * (values + extra.get("sft_weight", 0) * nll) + (1 - weight) * nll
    assert float(count) == 5
    assert float(total) == pytest.approx(wanted.sum(), rel=1e-4)
    margin = OPTIONS["beta"] * (compared["chosen"] - compared["rejected"])
    assert float(metrics["margin"][0]) == pytest.approx(margin.sum(), rel=1e-4)
    assert float(metrics["accuracy"][0]) == (margin > 0).sum()
    nll_sum, targets = map(float, metrics["cross_entropy"])
    assert (nll_sum, targets) == (pytest.approx(-logs["chosen"].sum(), rel=1e-5), tokens["chosen"].sum())


def test_which_methods_have_no_reference():
    assert [method for method in PREFERENCE_LOSSES if not needs_reference(method, False)] == ["orpo", "simpo"]
    assert not any(needs_reference(method, True) for method in PREFERENCE_LOSSES)


# The settings.


@methods
def test_a_key_that_is_another_method_s_is_refused_by_name(method):
    data = {"data": (), "method": method}
    assert Align(**data).own == OWN[method]
    for key, value in {"beta": 0.7, "label_smoothing": 0.0, "margin": 0.0, "reference_free": True}.items():
        if key in OWN[method]:
            assert Align(**data, **{key: value}).own == OWN[method] | {key: value}
        else:
            with pytest.raises(RecipeError, match=f"{key} = .*method '{method}' has no such key"):
                Align(**data, **{key: value})


@methods
def test_a_batch_is_not_cut_where_its_pairs_depend_on_each_other(method):
    if PREFERENCE_LOSSES[method].whole_batch:
        with pytest.raises(RecipeError, match="per_device_batch cuts the batch"):
            Align(data=(), method=method, per_device_batch=1)
    else:
        assert Align(data=(), method=method, per_device_batch=1).per_device_batch == 1


@pytest.mark.parametrize("key", [{"sft_weight": 0.5}, {"mix": "staged"}, {"beta": 0.1}])
def test_sft_has_no_key_of_preferences(key):
    with pytest.raises(RecipeError, match=next(iter(key))):
        Align(data=(), method="sft", **key)


# Training.


@methods
def test_a_few_steps_widen_the_margin(method):
    base, adapters = tiny.base_and_adapters()
    with tiny.unoptimized():
        _, trace = fit(
            preference_loss(tiny.STUDENT, 2.0, method=method, **OWN[method]),
            adapters,
            base,
            itertools.repeat(dataclasses.replace(tiny.pairs(0), **reference_columns())),
            FitSettings(steps=6, learning_rate=0.02, warmup_steps=0, global_batch=8),
        )
    first, last = trace.steps[0], trace.steps[-1]
    assert last["margin"] > first["margin"] + 0.02
    assert last["loss"] < first["loss"]


def reference_columns():
    base, _ = tiny.base_and_adapters()
    pairs = tiny.pairs(0)
    found = tiny.dense_answers(tiny.STUDENT, base, pairs)
    return dict(zip(("reference_chosen", "reference_rejected"), np.float32(found)))
