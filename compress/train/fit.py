"""The one training loop: steps, validations, the best weights kept; guarded, and resumed where it was killed."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from compress.errors import DataError, Preempted, is_out_of_device_memory
from compress.train.checkpoints import Checkpoints, shapes_of
from compress.train.guards import Rebound, StopRequest, stop_requests
from compress.train.mesh import place, place_rows, weight_shardings
from compress.train.processes import any_says
from compress.train.step import FitSettings, LossFn, halved, make_step, mean_of
from compress.train.trace import Trace

SLOWER = 0.8  # what the learning rate is multiplied by when a checkpoint is restored
ROLLBACKS = 3


@runtime_checkable
class Resumable(Protocol):
    """Batches that know where they are, and can go on from there."""

    def __iter__(self) -> Iterator[Any]: ...
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: dict[str, Any]) -> None: ...


def fit(
    loss_fn: LossFn,
    trainable: Any,
    frozen: Any,
    batches: Iterable[Any],
    settings: FitSettings,
    *,
    mesh: Mesh | None = None,
    validate: Callable[[Any], dict[str, float]] | None = None,
    watch: Callable[[Trace], dict[str, Any] | None] = lambda trace: None,
    on_step: Callable[[int, dict[str, float]], None] = lambda step, row: None,
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
    on_validation: Callable[[dict[str, float]], None] = lambda row: None,
    checkpoints: Checkpoints | None = None,
) -> tuple[Any, Trace]:
    """Train for `settings.steps` steps of `global_batch` rows.

    With `checkpoints` a run goes on from the last of them and ends bit for bit as one that was never interrupted. A
    loss that rebounds, or is NaN or Inf, restores a good one, lowers the learning rate and leaves out the batches in
    between; a device that is out of memory takes half as many rows at a time. Each is an event of the trace.

    Args:
      loss_fn: returns a sum, its count and metrics as (sum, count); the mean is taken over the global batch.
      batches: at least `steps` global batches, pytrees of arrays with `global_batch` rows; `Resumable` where there
        are checkpoints.
      validate: returns metrics of which "loss" decides what is best; called every `validate_every` steps and at the
        end, and once before the first step, for comparison. The weights of the lowest are returned; without it the
        last ones are.
      watch: called after each validation but the first; what it returns is an event. One that is "stopped" ends the
        training, and the weights of that validation are not kept.
      on_step: called with the step (from 1) and its metrics.
      on_event: called with each event.
      on_validation: called with each validation's step and metrics.

    Raises:
      DataError: the batches end early, a loss is NaN or Inf and no checkpoint helped, or `watch` let no weights pass.
      Preempted: SIGTERM came; the step at hand was finished and saved.
    """
    told = (on_step, on_event, on_validation)
    loop = _Loop(loss_fn, trainable, frozen, batches, settings, mesh, validate, watch, told, checkpoints)
    if checkpoints is None:
        loop.run(StopRequest())
    else:
        with stop_requests() as stop:
            loop.run(stop)
    return loop.result()


class _Loop:
    """A run, and all that a step of it changes."""

    def __init__(self, loss_fn, trainable, frozen, batches, settings, mesh, validate, watch, told, checkpoints):
        self.loss_fn, self.first, self.settings, self.mesh = loss_fn, trainable, settings, mesh
        self.frozen = place(mesh, frozen)
        self.batches, self.stream = batches, iter(batches)
        self.validate, self.watch = validate, watch
        self.on_step, self.on_event, self.on_validation = told
        self.checkpoints = checkpoints
        self.origin = batches.state() if checkpoints else None
        self.trace, self.rollbacks, self.scale = Trace(), 0, 1.0
        self.step_fn, self.optimizer = make_step(loss_fn, settings, mesh)
        self.start()

    def start(self) -> None:
        """Take everything as it was before the first step, but the batches."""
        # The caller keeps its arrays: a step donates these.
        self.weights = place(self.mesh, jax.tree.map(jnp.copy, self.first))
        # Under jit no device ever holds more of it than its share.
        state = jax.eval_shape(self.optimizer.init, self.weights)
        shardings = None if self.mesh is None else weight_shardings(self.mesh, state)
        self.state = jax.jit(self.optimizer.init, out_shardings=shardings)(self.weights)
        self.trace = Trace(validations=self.trace.validations[:1], events=self.trace.events)
        self.guard = Rebound(self.settings.rebound)
        self.step, self.best = 0, None

    def run(self, stop: StopRequest) -> None:
        """Train to the last step, or to the end that `watch` or a signal puts to it."""
        saved = self.checkpoints.steps() if self.checkpoints else []
        if saved:
            self.batches.restore(self.restore(saved[-1])["cursor"])
            self.on_event({"step": self.step, "event": "resumed"})
        elif self.validate is not None:
            self.validated(self.validate(self.weights))
        following = None
        while self.step < self.settings.steps and not self.trace.stopped:
            batch, following = self.take() if following is None else following, None
            began = time.perf_counter()
            try:
                halt = any_says(stop.made)
                sums = self.advance(batch)
                # The next batch is made while the device computes, unless the batches' state may be asked for first.
                validates, saves = self.due(self.settings.validate_every), self.due(self.settings.save_every)
                if not (halt or validates or saves):
                    following = self.take()
                row = self.row(sums, began)
            except jax.errors.JaxRuntimeError as error:
                self.shrink(error)
                following = None
                continue
            if trouble := self.trouble(row):
                self.roll_back(trouble, row["loss"])
                continue
            self.trace.steps.append(row)
            self.on_step(self.step, row)
            if validates and self.validate is not None:
                self.check(self.validate(self.weights))
            if self.checkpoints and (halt or saves or self.trace.stopped):
                self.save(self.checkpoints)
            if halt and self.step < self.settings.steps:
                saved = [0, *self.checkpoints.steps()][-1]
                raise Preempted(f"stopped at step {self.step} of {self.settings.steps}; step {saved} is saved")

    def take(self) -> Any:
        """The next batch.

        Raises:
          DataError: there is none.
        """
        batch = next(self.stream, None)
        if batch is None:
            raise DataError(
                f"the data ended at step {self.step + 1} of {self.settings.steps}; give more data, or fewer steps"
            )
        return place_rows(self.mesh, batch)

    def due(self, every: int) -> bool:
        """Whether what happens every so many steps, and at the end, happens now."""
        return self.step == self.settings.steps or bool(every and self.step % every == 0)

    def advance(self, batch: Any) -> Any:
        """Begin a step and return its sums, which the device may still be computing."""
        self.step += 1
        number, scale = np.int32(self.step), np.float32(self.scale)
        self.weights, self.state, sums = self.step_fn(self.weights, self.state, self.frozen, batch, number, scale)
        return sums

    def row(self, sums: Any, began: float) -> dict[str, float]:
        """A step's means."""
        total, count, metrics, norm = sums
        row = {"step": float(self.step), **mean_of({"loss": (total, count), **metrics})}
        row |= {"gradient_norm": float(norm), "clipped": float(norm > self.settings.max_grad_norm)}
        return row | {"count": float(count), "seconds": time.perf_counter() - began}

    def trouble(self, row: dict[str, float]) -> str | None:
        """What is wrong with a step, if anything is.

        Raises:
          DataError: it had nothing to learn from.
        """
        if not row["count"]:
            raise DataError(f"step {self.step}: no token to train on; check the data")
        if not np.isfinite(row["loss"]) or not np.isfinite(row["gradient_norm"]):
            return f"loss {row['loss']}, gradient norm {row['gradient_norm']}"
        rose = bool(self.settings.rebound) and self.guard.observe(row["loss"])
        return "the loss has rebounded" if rose else None

    def check(self, metrics: dict[str, float]) -> None:
        """Take a validation: are these the best weights so far, and shall the run go on?"""
        before = self.trace.best_loss
        self.validated(metrics)
        if event := self.watch(self.trace):
            self.happened({"step": self.step, **event})
        if not self.trace.stopped and metrics["loss"] < before:
            self.trace.best_step = self.step
            self.best = to_host_memory(self.weights)

    def validated(self, metrics: dict[str, float]) -> None:
        """Keep a validation and tell of it."""
        self.trace.validations.append({"step": float(self.step), **metrics})
        self.on_validation(self.trace.validations[-1])

    def happened(self, event: dict[str, Any]) -> None:
        """Keep an event and tell of it."""
        self.trace.events.append(event)
        self.on_event(event)

    def save(self, checkpoints: Checkpoints) -> None:
        """Begin to save all that the next step depends on."""
        arrays = {"weights": self.weights, "optimizer": self.state}
        if self.best is not None and self.trace.best_step != self.step:
            arrays["best"] = self.best
        about = {"trace": self.trace.state(), "guard": self.guard.state(), "cursor": self.batches.state()}
        checkpoints.save(self.step, arrays, about | {"rollbacks": self.rollbacks, "scale": self.scale})

    def restore(self, step: int) -> dict[str, Any]:
        """Take a checkpoint's place in all but the batches; what was saved about it."""
        assert self.checkpoints is not None
        about = self.checkpoints.about(step)
        self.trace = Trace(**about["trace"])
        self.guard.restore(about["guard"])
        self.rollbacks, self.scale, self.step = about["rollbacks"], about["scale"], step
        wanted = {"weights": shapes_of(self.weights), "optimizer": shapes_of(self.state)}
        if self.trace.best_step not in (0, step):
            wanted["best"] = shapes_of(self.weights)
        arrays = self.checkpoints.arrays(step, wanted)
        self.weights, self.state = arrays["weights"], arrays["optimizer"]
        self.best = to_host_memory(arrays.get("best", self.weights)) if self.trace.best_step else None
        return about

    def roll_back(self, trouble: str, loss: float) -> None:
        """Restore a good checkpoint with a lower learning rate; the batches go on from where they are.

        Raises:
          DataError: there are no checkpoints, or they have not helped.
        """
        cure = "check the data, or lower the learning rate"
        if self.checkpoints is None:
            raise DataError(f"step {self.step}: {trouble}; {cure}")
        if self.rollbacks == ROLLBACKS:
            raise DataError(f"step {self.step}: {trouble}, after {ROLLBACKS} returns to a checkpoint; {cure}")
        # A rebound began up to a window ago; where nothing that old is kept, the oldest must do.
        found = [step for step in self.checkpoints.steps() if step < self.step]
        sound = [step for step in found if step <= self.step - self.guard.window] if np.isfinite(loss) else found
        target = (sound or found[:1] or [0])[-1]
        rollbacks, scale, events = self.rollbacks + 1, self.scale * SLOWER, self.trace.events
        event = {"step": self.step, "event": "rollback", "why": trouble, "to": target, "scale": scale}
        if target:
            self.restore(target)
            self.checkpoints.keep_until(target)
        else:
            self.start()
        self.rollbacks, self.scale, self.trace.events = rollbacks, scale, events
        self.happened(event)

    def shrink(self, error: Exception) -> None:
        """After an out-of-memory error, go back to the last checkpoint with fewer rows at a time.

        Raises:
          JaxRuntimeError: the error, if it was another, or nothing can be made smaller, or there is no way back.
        """
        smaller = halved(self.settings, self.mesh)
        if smaller is None or self.checkpoints is None or not is_out_of_device_memory(error):
            raise error
        event = {"step": self.step, "event": "out of memory", "per_device_batch": smaller.per_device_batch}
        self.settings = smaller
        self.step_fn, _ = make_step(self.loss_fn, smaller, self.mesh)
        saved, events = self.checkpoints.steps(), self.trace.events
        # The step that failed may have consumed the weights that were donated to it.
        if saved:
            cursor = self.restore(saved[-1])["cursor"]
        else:
            self.start()
            cursor = self.origin
        self.batches.restore(cursor)
        self.trace.events = events
        self.happened(event)

    def result(self) -> tuple[Any, Trace]:
        """The weights that are kept, and the trace.

        Raises:
          DataError: `watch` let none pass.
        """
        if self.best is not None:
            return jax.tree.map(to_device_memory, self.best), self.trace
        if self.trace.stopped:
            raise DataError(f"step {self.step}: {self.trace.events[-1]['why']}, and no weights from before to keep")
        self.trace.best_step = self.step
        return self.weights, self.trace


def to_host_memory(tree: Any) -> Any:
    """A copy beside the devices' memory, sharded as it was."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding.with_memory_kind("pinned_host")), tree)


def to_device_memory(leaf: jax.Array) -> jax.Array:
    """The way back."""
    return jax.device_put(leaf, leaf.sharding.with_memory_kind("device"))
