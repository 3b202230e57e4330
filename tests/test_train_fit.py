"""The training loop on a linear model: what is averaged, what is kept, what stops it."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.errors import DataError, RecipeError
from compress.models.decoder import Stacked
from compress.train.fit import fit
from compress.train.step import FitSettings, make_optimizer, make_step, row_keys, schedule, split_rows
from compress.train.trace import Trace

ROWS, INPUTS = 8, 5
PLAN = FitSettings(steps=5, learning_rate=0.05, warmup_steps=1, global_batch=ROWS, seed=3)


def squares(trainable, frozen, batch, keys):
    """Masked squared errors with noise from each row's key; the batch is (x, y, mask) [rows, time, ...]."""
    x, y, mask = batch
    noise = jax.vmap(lambda key: jax.random.normal(key, x.shape[1:]))(keys)
    error = (x + 0.1 * noise) @ trainable["w.weight"] + trainable["b.bias"] - y
    total, count = (jnp.square(error) * mask).sum(), mask.sum()
    return total, count, {"error": ((jnp.abs(error) * mask).sum(), count), "rows": (mask.max(1).sum(), len(keys))}


def start():
    return {"w.weight": jnp.arange(1.0, INPUTS + 1), "b.bias": jnp.float32(0.5)}


def batches(steps=5, seed=0):
    """Batches whose rows have from no target to four."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        mask = (np.arange(4) < rng.permutation(np.arange(ROWS) % 5)[:, None]).astype(np.float32)
        yield rng.normal(size=(ROWS, 4, INPUTS)).astype(np.float32), rng.normal(size=(ROWS, 4)).astype(np.float32), mask


def train(plan=PLAN, loss=squares, data=None, **options):
    return fit(loss, start(), None, batches(plan.steps) if data is None else data, plan, **options)


def without_time(trace):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in trace.steps]


@pytest.fixture(scope="module")
def whole():
    """Training with the whole batch at a time."""
    return train()


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_many_small_batches_are_one_large_one(whole, rows):
    weights, trace = train(dataclasses.replace(PLAN, per_device_batch=rows))
    for ours, theirs in zip(without_time(trace), without_time(whole[1]), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), weights, whole[0])


def test_the_first_step_takes_the_mean_over_all_targets_of_the_global_batch(whole):
    x, y, mask = next(batches())
    keys = row_keys(PLAN.seed, 1, ROWS)
    noise = np.stack([jax.random.normal(key, x.shape[1:]) for key in keys])
    w, b = np.asarray(start()["w.weight"]), 0.5
    x = x + 0.1 * noise
    error = x @ w + b - y
    row, count = whole[1].steps[0], mask.sum()
    assert row["count"] == count
    assert row["loss"] == pytest.approx((error**2 * mask).sum() / count, rel=1e-5)
    assert row["error"] == pytest.approx((abs(error) * mask).sum() / count, rel=1e-5)
    gradient = [*np.einsum("bti,bt->i", x, 2 * error * mask) / count, (2 * error * mask).sum() / count]
    assert row["gradient_norm"] == pytest.approx(np.linalg.norm(gradient), rel=1e-5)


def test_the_same_seed_gives_the_same_run_and_another_seed_another(whole):
    again, other = train(), train(dataclasses.replace(PLAN, seed=4))
    assert without_time(again[1]) == without_time(whole[1])
    assert [row["loss"] for row in other[1].steps] != [row["loss"] for row in whole[1].steps]


def test_a_row_s_key_depends_on_seed_step_and_row_alone():
    keys = jax.random.key_data(row_keys(1, 2, 6))
    np.testing.assert_array_equal(keys[:3], jax.random.key_data(row_keys(1, 2, 3)))
    others = [jax.random.key_data(row_keys(seed, step, 6)) for seed, step in [(1, 3), (2, 2), (2, 1)]]
    distinct = {tuple(key) for group in [keys, *others] for key in group.tolist()}
    assert len(distinct) == 24


def test_the_caller_keeps_its_arrays():
    mine = start()
    fit(squares, mine, None, batches(), PLAN)
    jax.tree.map(np.testing.assert_array_equal, mine, start())


def test_loss_goes_down_on_what_can_be_learnt():
    rng = np.random.default_rng(0)
    truth = rng.normal(size=INPUTS).astype(np.float32)

    def data():
        while True:
            x = rng.normal(size=(ROWS, 4, INPUTS)).astype(np.float32)
            yield x, x @ truth, np.ones((ROWS, 4), np.float32)

    plan = FitSettings(steps=150, learning_rate=0.2, warmup_steps=5, global_batch=ROWS, weight_decay=0.0)
    _, trace = train(plan, data=data())
    assert trace.steps[-1]["loss"] < 0.01 * trace.steps[0]["loss"]


def test_the_weights_of_the_best_validation_come_back():
    seen, losses = [], iter([9.0, 3.0, 1.0, 2.0, math.nan, 4.0])

    def validate(trainable):
        seen.append(jax.tree.map(np.asarray, trainable))
        return {"loss": next(losses)}

    weights, trace = train(dataclasses.replace(PLAN, validate_every=1), validate=validate)
    assert trace.best_step == 2
    assert trace.best == {"step": 2.0, "loss": 1.0}
    jax.tree.map(np.testing.assert_array_equal, weights, seen[2])
    assert not np.array_equal(seen[2]["w.weight"], seen[3]["w.weight"])


def test_the_untrained_model_is_measured_but_never_returned():
    losses = iter([0.0, 5.0, 4.0, 6.0])
    _, trace = train(dataclasses.replace(PLAN, validate_every=2), validate=lambda weights: {"loss": next(losses)})
    assert [row["step"] for row in trace.validations] == [0, 2, 4, 5]
    assert trace.best == {"step": 4.0, "loss": 4.0}


def test_without_a_comparable_validation_the_last_weights_come_back(whole):
    for validate in (None, lambda weights: {"loss": math.nan}):
        weights, trace = train(validate=validate)
        assert trace.best_step == PLAN.steps
        jax.tree.map(np.testing.assert_array_equal, weights, whole[0])


def test_every_step_is_told_as_it_happens():
    told = []
    _, trace = train(on_step=lambda step, row: told.append((step, row)))
    assert told == list(enumerate(trace.steps, 1))


def test_data_that_ends_early_is_an_error_that_says_where():
    with pytest.raises(DataError, match=r"ended at step 4 of 5"):
        train(data=batches(3))


def test_a_loss_that_is_not_a_number_stops_the_run():
    spoilt = [(x * np.float32(np.nan if step == 1 else 1), y, mask) for step, (x, y, mask) in enumerate(batches())]
    with pytest.raises(DataError, match=r"step 2: loss nan"):
        train(data=spoilt)


def test_an_infinite_gradient_of_a_finite_loss_stops_the_run():
    def root(trainable, frozen, batch, keys):
        total, count, metrics = squares(trainable, frozen, batch, keys)
        return total + jnp.sqrt(trainable["w.weight"][0] - 1), count, metrics

    with pytest.raises(DataError, match=r"step 1: .*gradient norm (inf|nan)"):
        train(loss=root)


def test_a_batch_without_a_target_stops_the_run():
    empty = [(x, y, 0 * mask) for x, y, mask in batches()]
    with pytest.raises(DataError, match="step 1: no token to train on"):
        train(data=empty)


@pytest.mark.parametrize(("rows", "devices", "at_once"), [(8, 3, None), (8, 1, 3), (4, 2, 4)])
def test_a_batch_that_does_not_divide_is_refused_before_training(rows, devices, at_once):
    plan = dataclasses.replace(PLAN, global_batch=rows, per_device_batch=at_once)
    with pytest.raises(RecipeError, match=rf"global_batch = {rows} is not a multiple of"):
        split_rows(plan, devices)


@given(parts=st.integers(1, 9), at_once=st.integers(1, 9), devices=st.integers(1, 9))
def test_the_global_batch_is_cut_into_what_the_devices_hold(parts, at_once, devices):
    plan = dataclasses.replace(PLAN, global_batch=parts * at_once * devices, per_device_batch=at_once)
    assert split_rows(plan, devices) == parts
    assert split_rows(dataclasses.replace(plan, per_device_batch=None), devices) == 1


@settings(max_examples=25, deadline=None)
@given(steps=st.integers(1, 500), warmup=st.integers(0, 300))
def test_the_schedule_warms_up_for_at_most_a_fifth_then_falls_to_a_tenth(steps, warmup):
    plan = FitSettings(steps=steps, learning_rate=2.0, warmup_steps=warmup)
    rates = np.asarray(schedule(plan)(jnp.arange(501)))[: steps + 1]
    peak = min(warmup, steps // 5)
    assert rates[peak] == pytest.approx(2.0, rel=1e-5)
    assert np.all(np.diff(rates[: peak + 1]) > 0)
    assert np.all(np.diff(rates[peak:]) <= 1e-6)
    assert rates[0] > 0
    assert rates[-1] == pytest.approx(0.2, rel=1e-4)


def test_only_matrices_decay():
    names = ["self_attn.q_proj.weight", "self_attn.q_proj.lora_A", "mlp.up_proj.bias", "input_layernorm.weight"]
    names += ["self_attn.q_norm.weight"]
    tree = Stacked(
        {"model.embed_tokens.weight": jnp.ones((3, 2)), "model.norm.weight": jnp.ones(2)},
        [{name: jnp.ones((2, 2)) for name in names}],
    )
    plan = FitSettings(steps=10, learning_rate=0.1, warmup_steps=0, weight_decay=0.5)
    optimizer = make_optimizer(plan)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, tree), optimizer.init(tree), tree)
    moved = {name for name, leaf in (updates.rest | updates.layers[0]).items() if np.any(leaf)}
    assert moved == {"model.embed_tokens.weight", "self_attn.q_proj.weight", "self_attn.q_proj.lora_A"}
    np.testing.assert_allclose(updates.layers[0]["self_attn.q_proj.weight"], -0.1 * 0.5, rtol=1e-5)


def test_a_step_is_adamw_on_the_clipped_mean_gradient():
    """Kingma and Ba's first step, and Loshchilov and Hutter's decay, in NumPy: the sign of the gradient."""
    step, optimizer = make_step(squares, PLAN, None)
    weights = start()
    now = (np.int32(1), np.float32(1))
    weights, _, (_, _, _, norm) = step(weights, optimizer.init(weights), None, next(batches()), *now)
    assert norm > PLAN.max_grad_norm
    rate = float(schedule(PLAN)(0))
    old, new = np.asarray(start()["w.weight"]), np.asarray(weights["w.weight"])
    signs = (new - old + rate * PLAN.weight_decay * old) / rate
    np.testing.assert_allclose(abs(signs), 1, rtol=1e-3)


def test_weights_below_one_still_give_a_mean():
    """Half the mask's weight on every token changes nothing."""
    plan = dataclasses.replace(PLAN, steps=1)
    x, y, mask = next(batches())
    one = np.zeros_like(mask)
    one[0, 0] = 1
    full, half = (train(plan, data=[(x, y, scale * one)])[1].steps[0] for scale in (1, np.float32(0.25)))
    assert half["loss"] == pytest.approx(full["loss"], rel=1e-5)
    assert half["gradient_norm"] == pytest.approx(full["gradient_norm"], rel=1e-5)


def test_the_trace_is_json_with_null_for_what_is_not_a_number():
    trace = Trace([{"step": 1.0, "loss": 2.0, "accuracy": math.nan}], [{"step": 0.0, "loss": math.inf}], [], 1)
    assert json.loads(trace.to_json()) == {
        "steps": [{"step": 1.0, "loss": 2.0, "accuracy": None}],
        "validations": [{"step": 0.0, "loss": None}],
        "events": [],
        "best_step": 1,
    }
