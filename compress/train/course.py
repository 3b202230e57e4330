"""What every training stage does around `fit`: count its steps, keep its held-out batches, say how far it is."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from compress.data.batches import Batches
from compress.device import peak_memory
from compress.errors import DataError
from compress.progress import Progress
from compress.record import VERSION, contents_of
from compress.settings import Common
from compress.train.checkpoints import Checkpoints
from compress.train.mesh import on_mesh, place_rows, rows_across
from compress.train.settings import Training
from compress.train.step import FitSettings, LossFn, mean_of, split_rows
from compress.train.trace import Trace, tell

VALIDATION_BATCHES = 16


def fit_settings(settings: Training, batches: Batches, seed: int, mesh: Mesh | None) -> FitSettings:
    """The settings of `fit`, with epochs turned into steps.

    Raises:
      RecipeError: the global batch does not divide over the mesh.
    """
    assert settings.learning_rate is not None
    steps = settings.steps or max(1, math.ceil((settings.epochs or 1) * batches.steps_per_epoch()))
    fit = FitSettings(
        steps=steps,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        global_batch=settings.global_batch,
        per_device_batch=settings.per_device_batch,
        validate_every=settings.valid_every,
        save_every=settings.save_every,
        rebound=settings.rebound,
        seed=seed,
    )
    split_rows(fit, rows_across(mesh))
    return fit


def held_out(make: Callable[..., Batches], settings: Training) -> list[Any]:
    """The first batches of one pass over held-out data, kept for every validation; the rest of it is not read.

    Args:
      make: makes batches of the held-out rows with the keywords of `Batches`.
    """
    # A pair fills two rows at most, so this many tokens always make the batches.
    enough = 2 * VALIDATION_BATCHES * settings.global_batch * settings.sequence_length
    batches = make(epochs=1, shuffle=False, buffer=enough)
    kept = list(itertools.islice(batches, VALIDATION_BATCHES))
    if not kept:
        why = "".join(f" ({where}: {reason})" for where, reason in batches.rows.quarantine.listed[:1])
        raise DataError(f"no held-out rows to validate on{why}; give more data, or a file of them with --valid")
    return kept


def validator(
    loss_fn: LossFn, frozen: Any, batches: Sequence[Any], mesh: Mesh | None
) -> Callable[[Any], dict[str, float]]:
    """A function of the trainable weights: the held-out means of the loss and its metrics, nothing dropped out."""
    measure = jax.jit(on_mesh(mesh, lambda trainable, frozen, batch: loss_fn(trainable, frozen, batch, None)))

    def validate(trainable: Any) -> dict[str, float]:
        sums: dict[str, list[float]] = {}
        for batch in batches:
            total, count, metrics = measure(trainable, frozen, place_rows(mesh, batch))
            for name, (value, weight) in {"loss": (total, count), **metrics}.items():
                kept = sums.setdefault(name, [0.0, 0.0])
                kept[0] += float(value)
                kept[1] += float(weight)
        return mean_of({name: (total, count) for name, (total, count) in sums.items()})

    return validate


def open_checkpoints(settings: Training, common: Common) -> Checkpoints:
    """The checkpoints of a stage with these settings, in a folder beside its output that is named after it.

    Raises:
      RecipeError: those of a run with other settings or data lie there, and `common.force` is not given.
    """
    assert common.out is not None
    layout = {field.name for field in dataclasses.fields(settings) if field.metadata.get("layout")}
    facts = {name: value for name, value in contents_of(settings).items() if name not in layout}
    identity = facts | {"seed": common.seed, "dtype": common.dtype, **contents_of(common.data), "version": VERSION}
    return Checkpoints(
        common.out.with_name(f"{common.out.name}.checkpoints"),
        identity,
        anew=common.force,
        warn=common.progress.warn,
    )


def told_of(trace: Trace, level: float | None) -> dict[str, Any]:
    """What a stage's result says of its training; `level` is the held-out loss that the field calls converged.

    It is told and nothing more: no run stops for it.
    """
    converged = {"loss_below": level, "from_step": trace.reached(level)} if level is not None else None
    return {
        "steps": len(trace.steps),
        "best_step": trace.best_step,
        "clipped_steps": int(sum(row["clipped"] for row in trace.steps)),
        "validation": {"before": trace.validations[0], "after": trace.best},
        **({"converged": converged} if converged else {}),
        "peak_memory_bytes": peak_memory(),
    }


def tellers(progress: Progress, stage: str, steps: int, counted: str = "tokens") -> dict[str, Any]:
    """The keywords of `fit` that tell of a stage: each step's loss and speed, each validation, what the guards did.

    Args:
      counted: what the loss is a mean over.
    """

    def on_step(step: int, row: dict[str, float]) -> None:
        speed = row["count"] / row["seconds"] if row["seconds"] else 0.0
        progress(stage, step, steps, loss=row["loss"], **{f"{counted}_per_second": speed})
        progress.log(stage, step, {name: value for name, value in row.items() if name != "step"})

    def on_validation(row: dict[str, float]) -> None:
        figures = {f"validation/{name}": value for name, value in row.items() if name != "step"}
        progress.log(stage, int(row["step"]), figures)

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "resumed":  # a run that goes on where it was is no warning
            progress.say(f"{stage}: goes on from step {event['step']}")
        else:
            progress.warn(f"{stage}, step {event['step']}: {tell(event)}")

    return {"on_step": on_step, "on_validation": on_validation, "on_event": on_event}
