"""A run that is killed, preempted, spoilt or short of memory goes on, and ends as if nothing had been."""

import dataclasses
import json
import os
import resource
import signal

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.device import keep_compiled
from compress.errors import DataError, Preempted, RecipeError
from compress.train import fit as loop
from compress.train.checkpoints import Checkpoints
from compress.train.course import told_of
from compress.train.fit import Resumable, fit
from compress.train.guards import Rebound
from compress.train.step import FitSettings, halved
from compress.train.trace import Trace, tell
from tests.test_train_fit import INPUTS, ROWS, squares, start

STEPS = 12
PLAN = FitSettings(
    steps=STEPS, learning_rate=0.05, warmup_steps=1, global_batch=ROWS, validate_every=3, save_every=2, seed=3
)


class Source:
    """Endless batches that know where they are; those of the `spoilt` numbers hold what spoils them."""

    def __init__(self, spoilt=(), by=np.nan):
        self.number, self.spoilt, self.by = 0, spoilt, by

    def __iter__(self):
        return self

    def __next__(self):
        rng = np.random.default_rng([7, self.number])
        factor = np.float32(self.by if self.number in self.spoilt else 1)
        self.number += 1
        x, y = rng.normal(size=(ROWS, 4, INPUTS)), rng.normal(size=(ROWS, 4))
        return factor * x.astype(np.float32), y.astype(np.float32), np.ones((ROWS, 4), np.float32)

    def state(self):
        return {"number": self.number}

    def restore(self, state):
        self.number = state["number"]


def validate(weights):
    """The lowest after a few steps, so that the best weights are not the last."""
    return {"loss": float(abs(weights["w.weight"][0] - 0.9))}


def open_at(folder, identity=("a run",), **options):
    return Checkpoints(folder, dict.fromkeys(identity, 1), **options)


def train(folder, plan=PLAN, source=None, **options):
    checkpoints = open_at(folder)
    try:
        return fit(squares, start(), None, source or Source(), plan, checkpoints=checkpoints, **options)
    finally:
        checkpoints.close()


def facts(trace):
    timeless = lambda rows: [{key: value for key, value in row.items() if key != "seconds"} for row in rows]  # noqa: E731
    return timeless(trace.steps), timeless(trace.validations)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train(tmp_path_factory.mktemp("whole"), validate=validate)


def assert_same(run, expected):
    jax.tree.map(np.testing.assert_array_equal, run[0], expected[0])
    assert facts(run[1]) == facts(expected[1])
    assert run[1].best_step == expected[1].best_step


def test_checkpoints_change_nothing(whole):
    plain = fit(squares, start(), None, Source(), PLAN, validate=validate)
    assert_same(plain, whole)
    assert 0 < whole[1].best_step < STEPS
    assert isinstance(Source(), Resumable)


@pytest.mark.parametrize("last", range(1, STEPS + 1))
def test_a_run_killed_at_any_step_ends_bit_for_bit_as_one_that_was_not(tmp_path, whole, last):
    def kill(step, row):
        if step == last:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, validate=validate, on_step=kill)
    events = []
    assert_same(train(tmp_path, validate=validate, on_event=events.append), whole)
    saved = (last - 1) // PLAN.save_every * PLAN.save_every
    assert events == ([{"step": saved, "event": "resumed"}] if saved else [])


def test_sigterm_finishes_and_saves_the_step(tmp_path, whole):
    def ask(step, row):
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Preempted, match="stopped at step 6 of 12; step 6 is saved"):
        train(tmp_path, validate=validate, on_step=ask)
    assert signal.getsignal(signal.SIGTERM) is before
    events = []
    assert_same(train(tmp_path, validate=validate, on_event=events.append), whole)
    assert events == [{"step": 6, "event": "resumed"}]


def test_a_finished_run_is_not_trained_again(tmp_path, whole):
    for _ in range(2):
        source = Source()
        assert_same(train(tmp_path, source=source, validate=validate), whole)
    assert source.number == STEPS


def test_nan_restores_a_checkpoint_and_leaves_the_batch_out(tmp_path):
    events = []
    weights, trace = train(tmp_path, source=Source(spoilt=[4]), on_event=events.append)
    (event,) = events
    assert (event["step"], event["event"], event["to"], event["scale"]) == (5, "rollback", 4, 0.8)
    assert trace.events == events
    assert [row["step"] for row in trace.steps] == list(range(1, STEPS + 1))
    assert np.isfinite(weights["w.weight"]).all()
    # Two batches lie between the checkpoint and what follows the rollback: one was spoilt.
    assert_same(train(tmp_path), (weights, trace))


def test_a_kill_after_a_rollback_changes_nothing(tmp_path):
    expected = train(tmp_path / "a", source=Source(spoilt=[4]))

    def kill(step, row):
        if step == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "b", source=Source(spoilt=[4]), on_step=kill)
    run = train(tmp_path / "b", source=Source(spoilt=[4]))
    assert_same(run, expected)
    assert run[1].events == expected[1].events


def test_before_the_first_checkpoint_it_starts_anew(tmp_path):
    _, trace = train(tmp_path, source=Source(spoilt=[0]))
    assert [event["to"] for event in trace.events] == [0]
    assert len(trace.steps) == STEPS


def test_after_three_returns_it_stops_and_says_why(tmp_path):
    with pytest.raises(DataError, match=r"step 5: loss nan.*after 3 returns to a checkpoint; check the data"):
        train(tmp_path, source=Source(spoilt=range(4, 99)))


def test_a_loss_that_rises_restores_a_checkpoint_with_a_lower_rate(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "Rebound", lambda tolerance: Rebound(tolerance, window=2))

    def steady(trainable, frozen, batch, keys):
        """A loss of about one where the batch is as ever."""
        total, count, metrics = squares(trainable, frozen, batch, keys)
        return 1e-3 * total + count, count, metrics

    checkpoints = open_at(tmp_path)
    source = Source(spoilt=[5, 6], by=1000)
    _, trace = fit(steady, start(), None, source, PLAN, checkpoints=checkpoints)
    checkpoints.close()
    (event,) = trace.events
    assert event == {
        "step": 7, "event": "rollback", "why": "the loss has rebounded", "to": 4, "scale": 0.8
    }  # fmt: skip
    assert source.number == STEPS + 3
    assert max(row["loss"] for row in trace.steps) < 2


def test_out_of_memory_takes_half_as_many_rows_at_a_time(tmp_path, monkeypatch, whole):
    real = loop.make_step

    def make_step(loss_fn, settings, mesh):
        step, optimizer = real(loss_fn, settings, mesh)

        def run(weights, state, frozen, batch, number, scale):
            if number >= 6 and (settings.per_device_batch or ROWS) > 2:
                jax.tree.map(lambda leaf: leaf.delete(), (weights, state))
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes.")
            return step(weights, state, frozen, batch, number, scale)

        return run, optimizer

    monkeypatch.setattr(loop, "make_step", make_step)
    weights, trace = train(tmp_path, validate=validate)
    assert [event["per_device_batch"] for event in trace.events] == [4, 2]
    assert trace.best_step == whole[1].best_step
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), weights, whole[0])
    monkeypatch.setattr(loop, "halved", lambda settings, mesh: None)
    with pytest.raises(jax.errors.JaxRuntimeError):
        train(tmp_path / "other", validate=validate)


@given(rows=st.integers(1, 60), most=st.none() | st.integers(1, 60))
def test_halving_keeps_the_global_batch(rows, most):
    plan = dataclasses.replace(PLAN, global_batch=rows, per_device_batch=most)
    smaller = halved(plan, None)
    if smaller is None:
        assert (most or rows) == 1
    else:
        assert rows % smaller.per_device_batch == 0
        assert smaller.per_device_batch <= (most or rows) // 2


def test_watch_ends_the_run_and_keeps_the_weights_from_before(tmp_path):
    far = {"event": "stopped", "why": "far enough"}
    watch = lambda trace: far if trace.validations[-1]["step"] >= 9 else None  # noqa: E731
    run = train(tmp_path, validate=validate, watch=watch)
    assert run[1].events == [{"step": 9, "event": "stopped", "why": "far enough"}]
    assert 0 < run[1].best_step < 9
    assert len(run[1].steps) == 9
    assert_same(train(tmp_path, validate=validate, watch=watch), run)
    with pytest.raises(DataError, match="step 3: at once, and no weights from before"):
        train(tmp_path / "other", validate=validate, watch=lambda trace: far | {"why": "at once"})


def test_checkpoints_of_another_run_are_refused_or_removed(tmp_path):
    train(tmp_path / "c")
    with pytest.raises(RecipeError, match=r"c: checkpoints of a run with another a run, another; --force"):
        open_at(tmp_path / "c", ["another"])
    warnings = []
    with_force = open_at(tmp_path / "c", ["another"], anew=True, warn=warnings.append)
    assert with_force.steps() == []
    assert "starting anew" in warnings[0]
    with_force.remove()
    assert not (tmp_path / "c").exists()


def test_an_identity_that_is_no_json_is_refused(tmp_path):
    (tmp_path / "identity.json").write_text("{")
    with pytest.raises(DataError, match=r"identity\.json: .*; remove"):
        open_at(tmp_path)


def test_a_full_disk_keeps_the_last_checkpoint_and_says_so(tmp_path):
    """A limit on the size of files stands for the disk: the write fails in the same place."""
    warnings = []
    checkpoints = open_at(tmp_path, warn=warnings.append)
    small, large = ({"w": np.random.default_rng(0).normal(size=size)} for size in (10, 200_000))
    checkpoints.save(1, small, {})
    assert checkpoints.steps() == [1]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        checkpoints.save(2, large, {})
        assert checkpoints.steps() == [1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert warnings == [f"{tmp_path}: a checkpoint was not saved (File too large); that of step 1 stands"]
    assert [path.name for path in (tmp_path / "steps").iterdir()] == ["1"]
    checkpoints.save(3, large, {"then": 3})
    assert checkpoints.steps() == [1, 3]
    assert checkpoints.about(3) == {"then": 3}
    np.testing.assert_array_equal(checkpoints.arrays(3, large)["w"], large["w"])
    checkpoints.close()


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), noise=st.floats(0, 0.5), fall=st.floats(0, 0.01))
def test_noise_on_a_level_or_falling_loss_is_no_rebound(seed, noise, fall):
    guard = Rebound()
    losses = 2 * np.exp(-fall * np.arange(400)) * (1 + noise * np.random.default_rng(seed).uniform(-1, 1, 400))
    assert sum(map(guard.observe, losses)) == 0


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), noise=st.floats(0, 0.1), rise=st.floats(0.2, 3))
def test_a_rise_beyond_the_noise_is_a_rebound_within_a_window(seed, noise, rise):
    guard = Rebound()
    levels = np.r_[np.ones(100), np.full(guard.window, 1 + rise)]
    losses = levels * (1 + noise * np.random.default_rng(seed).uniform(-1, 1, len(levels)))
    told = [guard.observe(loss) for loss in losses]
    assert not any(told[:100])
    assert any(told)


def test_a_guard_goes_on_from_its_state():
    losses = list(1 + 0.1 * np.random.default_rng(0).uniform(size=80)) + [2.0] * 40
    whole, first = Rebound(), Rebound()
    expected = [whole.observe(loss) for loss in losses]
    told = [first.observe(loss) for loss in losses[:70]]
    second = Rebound()
    second.restore(json.loads(json.dumps(first.state())))
    assert told + [second.observe(loss) for loss in losses[70:]] == expected
    assert any(expected)


def test_a_trace_tells_when_a_level_was_reached_and_what_happened():
    rows = [{"step": float(step), "loss": loss} for step, loss in ((0, 2.0), (5, 0.6), (10, 0.4), (15, 0.45))]
    trace = Trace(validations=rows, best_step=10)
    assert (trace.reached(0.5), trace.reached(0.1)) == (10, None)
    told = told_of(trace, 0.5)
    assert told["converged"] == {"loss_below": 0.5, "from_step": 10}
    assert told["peak_memory_bytes"] > 1 << 20
    assert "converged" not in told_of(trace, None)
    rollback = {"step": 7, "event": "rollback", "why": "the loss has rebounded", "to": 4, "scale": 0.8}
    assert tell(rollback) == "the loss has rebounded; went back to step 4 with 0.8 of the learning rate"
    assert "2 rows at a time" in tell({"step": 1, "event": "out of memory", "per_device_batch": 2})
    assert tell({"step": 1, "event": "stopped", "why": "far enough"}) == "stopped: far enough"
    assert "4 times" in tell({"step": 1, "event": "beta", "kl": 0.03, "scale": 4.0})


def test_compiled_programs_are_kept_in_the_user_s_cache_unless_told_otherwise(tmp_path, monkeypatch):
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_compilation_cache_max_size
    try:
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
        keep_compiled()
        assert jax.config.jax_compilation_cache_dir == before[0]
        monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        keep_compiled()
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "compress" / "jax")
        assert (tmp_path / "compress" / "jax").is_dir()
    finally:
        jax.config.update("jax_compilation_cache_dir", before[0])
        jax.config.update("jax_compilation_cache_max_size", before[1])
