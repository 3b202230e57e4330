"""The one training loop: gradients accumulated as sums and counts, AdamW, validation, the best weights kept."""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from compress.errors import DataError, RecipeError
from compress.train.mesh import batch_sharding, place, weight_shardings

# (trainable, frozen, batch, keys [rows]) -> (sum, count, {name: (sum, count)})
LossFn = Callable[
    [Any, Any, Any, jax.Array | None], tuple[jax.Array, jax.Array, dict[str, tuple[jax.Array, jax.Array]]]
]


@dataclasses.dataclass(frozen=True)
class FitSettings:
    """How to train. `per_device_batch` rows go through a device at a time; it changes memory, never the result."""

    steps: int
    learning_rate: float
    warmup_steps: int = 100
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    global_batch: int = 8
    per_device_batch: int | None = None
    validate_every: int = 0
    seed: int = 0


@dataclasses.dataclass
class Trace:
    """What happened: a row a step, a row a validation."""

    steps: list[dict[str, float]] = dataclasses.field(default_factory=list)
    validations: list[dict[str, float]] = dataclasses.field(default_factory=list)
    best_step: int = 0

    @property
    def best(self) -> dict[str, float]:
        """The validation of the weights that were kept."""
        return next(row for row in self.validations if row["step"] == self.best_step)

    def to_json(self) -> str:
        """What a stage keeps beside its model; NaN becomes null."""
        clean = lambda row: {name: value if math.isfinite(value) else None for name, value in row.items()}  # noqa: E731
        rows = {"steps": [clean(row) for row in self.steps], "validations": [clean(row) for row in self.validations]}
        return json.dumps({**rows, "best_step": self.best_step}, allow_nan=False) + "\n"


def schedule(settings: FitSettings) -> optax.Schedule:
    """Linear warm-up, then a cosine to a tenth of the peak; a warm-up never takes over a fifth of the run."""
    warmup = min(settings.warmup_steps, settings.steps // 5)
    return optax.warmup_cosine_decay_schedule(
        settings.learning_rate / (warmup + 1),
        settings.learning_rate,
        warmup,
        max(settings.steps, warmup + 1),
        settings.learning_rate / 10,
    )


def make_optimizer(settings: FitSettings) -> optax.GradientTransformation:
    """Clip by the global norm, then AdamW (arXiv:1711.05101); norms and biases do not decay."""

    def decays(tree):
        def is_matrix(path, leaf):
            return not str(path[-1]).rstrip("'])").endswith(("norm.weight", "bias"))

        return jax.tree_util.tree_map_with_path(is_matrix, tree)

    return optax.chain(
        optax.clip_by_global_norm(settings.clip_norm),
        optax.adamw(schedule(settings), b2=0.95, weight_decay=settings.weight_decay, mask=decays),
    )


def row_keys(seed: int, step: int | jax.Array, rows: int) -> jax.Array:
    """One key a row of the global batch, from (seed, step, row): how rows are grouped never changes them."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(rows))


def split_rows(settings: FitSettings, devices: int) -> int:
    """Number of micro-batches that the global batch is cut into.

    Raises:
      RecipeError: the global batch isn't a multiple of what goes through the devices at a time.
    """
    at_a_time = (settings.per_device_batch or max(1, settings.global_batch // devices)) * devices
    if settings.global_batch % at_a_time:
        raise RecipeError(
            f"global_batch = {settings.global_batch} is not a multiple of per_device_batch x devices = {at_a_time}"
        )
    return settings.global_batch // at_a_time


def make_step(loss_fn: LossFn, settings: FitSettings, mesh: Mesh | None):
    """A jitted step: (trainable, state, frozen, batch, step) -> (trainable, state, sums).

    Micro-batches are scanned; gradients, losses and metrics are summed over them and divided once, by the global
    count. Trainable and state are donated.
    """
    optimizer = make_optimizer(settings)
    rows_across = 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]
    parts = split_rows(settings, rows_across)

    def micro(trainable, frozen, batch, keys):
        total, count, metrics = loss_fn(trainable, frozen, batch, keys)
        return total, (count, metrics)

    def step(trainable, state, frozen, batch, number):
        keys = row_keys(settings.seed, number, settings.global_batch)
        cut = lambda leaf: leaf.reshape(parts, leaf.shape[0] // parts, *leaf.shape[1:])  # noqa: E731
        batches = jax.tree.map(cut, (batch, keys))
        if mesh is not None:
            batches = jax.lax.with_sharding_constraint(batches, batch_sharding(mesh, rows_axis=1))

        def accumulate(sums, chunk):
            (total, (count, metrics)), grads = jax.value_and_grad(micro, has_aux=True)(trainable, frozen, *chunk)
            return jax.tree.map(jnp.add, sums, (grads, total, count, metrics)), None

        shapes = jax.eval_shape(
            lambda: jax.value_and_grad(micro, has_aux=True)(trainable, frozen, *jax.tree.map(lambda x: x[0], batches))
        )
        (total, (count, metrics)), grads = shapes
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), (grads, total, count, metrics))
        if parts == 1:
            sums, _ = accumulate(zeros, jax.tree.map(lambda leaf: leaf[0], batches))
        else:
            sums, _ = jax.lax.scan(accumulate, zeros, batches)
        grads, total, count, metrics = sums
        grads = jax.tree.map(lambda g: g / jnp.where(count > 0, count, 1).astype(g.dtype), grads)
        norm = optax.tree.norm(grads)
        updates, state = optimizer.update(grads, state, trainable)
        return optax.apply_updates(trainable, updates), state, (total, count, metrics, norm)

    return jax.jit(step, donate_argnums=(0, 1)), optimizer


def mean_of(sums: dict[str, tuple[Any, Any]]) -> dict[str, float]:
    """Global means from (sum, count) pairs; a count of zero gives NaN."""
    return {name: float(total) / float(count) if float(count) else math.nan for name, (total, count) in sums.items()}


def fit(
    loss_fn: LossFn,
    trainable: Any,
    frozen: Any,
    batches: Iterable[Any],
    settings: FitSettings,
    *,
    mesh: Mesh | None = None,
    validate: Callable[[Any], dict[str, float]] | None = None,
    on_step: Callable[[int, dict[str, float]], None] | None = None,
) -> tuple[Any, Trace]:
    """Train for `settings.steps` steps of `global_batch` rows.

    Args:
      loss_fn: returns a sum, its count and metrics as (sum, count); the mean is taken over the global batch.
      batches: at least `steps` global batches, pytrees of arrays with `global_batch` rows.
      validate: returns metrics of which "loss" decides what is best; called every `validate_every` steps and at the
        end, and once before the first step, for comparison. The weights of the lowest are returned; without it the
        last ones are.
      on_step: called with the step (from 1) and its metrics.

    Raises:
      DataError: the batches end early, or a loss is NaN or Inf.
    """
    # The caller keeps its arrays: the first step donates these.
    trainable = jax.tree.map(jnp.copy, trainable)
    if mesh is not None:
        trainable, frozen = place(mesh, trainable), place(mesh, frozen)
    step, optimizer = make_step(loss_fn, settings, mesh)
    state = optimizer.init(trainable)
    if mesh is not None:
        state = jax.device_put(state, weight_shardings(mesh, state))
    trace = Trace()
    best, best_loss = None, math.inf
    stream = iter(batches)
    if validate is not None:
        trace.validations.append({"step": 0.0, **validate(trainable)})
    for number in range(1, settings.steps + 1):
        batch = next(stream, None)
        if batch is None:
            raise DataError(f"the data ended at step {number} of {settings.steps}; give more data, or fewer steps")
        if mesh is not None:
            batch = jax.device_put(batch, batch_sharding(mesh))
        began = time.perf_counter()
        trainable, state, (total, count, metrics, norm) = step(trainable, state, frozen, batch, np.int32(number))
        row = {"step": float(number), **mean_of({"loss": (total, count), **metrics})}
        row |= {"gradient_norm": float(norm), "count": float(count), "seconds": time.perf_counter() - began}
        trace.steps.append(row)
        if not math.isfinite(row["loss"]) or not math.isfinite(row["gradient_norm"]):
            what = (
                "no token to train on"
                if not row["count"]
                else f"loss {row['loss']}, gradient norm {row['gradient_norm']}"
            )
            raise DataError(f"step {number}: {what}; check the data, or lower the learning rate")
        if on_step is not None:
            on_step(number, row)
        due = settings.validate_every and number % settings.validate_every == 0
        if validate is not None and (due or number == settings.steps):
            trace.validations.append({"step": float(number), **validate(trainable)})
            if trace.validations[-1]["loss"] < best_loss:
                best_loss, trace.best_step = trace.validations[-1]["loss"], number
                best = jax.tree.map(np.asarray, trainable)
    if best is None:
        trace.best_step = settings.steps
        return trainable, trace
    return jax.tree.map(jnp.asarray, best), trace
