"""One optimizer step: gradients accumulated as sums and counts, divided once, and AdamW."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from compress.errors import RecipeError
from compress.train.mesh import batch_sharding, on_mesh, rows_across

# (trainable, frozen, batch, keys [rows]) -> (sum, count, {name: (sum, count)})
LossFn = Callable[
    [Any, Any, Any, jax.Array | None], tuple[jax.Array, jax.Array, dict[str, tuple[jax.Array, jax.Array]]]
]


@dataclasses.dataclass(frozen=True)
class FitSettings:
    """How to train.

    Attributes:
      per_device_batch: rows that go through a device at a time; it changes memory, never the result.
      validate_every, save_every: steps between them; 0 is only at the end.
      rebound: share by which the loss may rise before a checkpoint is restored (`compress.train.guards.Rebound`); 0
        lets it.
    """

    steps: int
    learning_rate: float
    warmup_steps: int = 100
    weight_decay: float = 0.01
    max_grad_norm: float = 10.0
    global_batch: int = 8
    per_device_batch: int | None = None
    validate_every: int = 0
    save_every: int = 0
    rebound: float = 0.05
    seed: int = 0


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
    """AdamW (arXiv:1711.05101); norms, biases and magnitudes do not decay."""

    def decays(tree):
        def is_matrix(path, leaf):
            return not str(path[-1]).rstrip("'])").endswith(("norm.weight", "bias", "magnitude_vector"))

        return jax.tree_util.tree_map_with_path(is_matrix, tree)

    return optax.adamw(schedule(settings), b2=0.95, weight_decay=settings.weight_decay, mask=decays)


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


def halved(settings: FitSettings, mesh: Mesh | None) -> FitSettings | None:
    """The settings with at most half as many rows at a time; None where one row is all there is."""
    devices = rows_across(mesh)
    share = max(1, settings.global_batch // devices)
    most = (settings.per_device_batch or share) // 2
    fitting = [rows for rows in range(most, 0, -1) if share % rows == 0]
    return dataclasses.replace(settings, per_device_batch=fitting[0]) if fitting else None


def make_step(loss_fn: LossFn, settings: FitSettings, mesh: Mesh | None):
    """A jitted step, and its optimizer: (trainable, state, frozen, batch, step, scale) -> (trainable, state, sums).

    Micro-batches are scanned; gradients, losses and metrics are summed over them and divided once, by the global
    count. `scale` multiplies the schedule's learning rate. Trainable and state are donated.
    """
    optimizer = make_optimizer(settings)
    parts = split_rows(settings, rows_across(mesh))

    def micro(trainable, frozen, batch, keys):
        total, count, metrics = loss_fn(trainable, frozen, batch, keys)
        return total, (count, metrics)

    def step(trainable, state, frozen, batch, number, scale):
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
        count_or_one = jnp.where(count > 0, count, 1)
        norm = optax.tree.norm(grads) / count_or_one
        # The mean and the clipping are one factor, so that the gradients are not written out once more.
        factor = jnp.minimum(1, settings.max_grad_norm / norm) / count_or_one
        grads = jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)
        updates, state = optimizer.update(grads, state, trainable)
        updates = jax.tree.map(lambda u: u * scale.astype(u.dtype), updates)
        return optax.apply_updates(trainable, updates), state, (total, count, metrics, norm)

    return jax.jit(on_mesh(mesh, step), donate_argnums=(0, 1)), optimizer


def mean_of(sums: dict[str, tuple[Any, Any]]) -> dict[str, float]:
    """Global means from (sum, count) pairs; a count of zero gives NaN."""
    return {name: float(total) / float(count) if float(count) else math.nan for name, (total, count) in sums.items()}
