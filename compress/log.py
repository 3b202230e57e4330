"""Training figures for TensorBoard and Weights & Biases, each an extra of its own."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compress.errors import RecipeError
from compress.settings import Log

# (stage, step, figures by name): a step's, or a validation's.
Sink = Callable[[str, int, dict[str, float]], None]


def tensorboard(folder: Path) -> Sink:
    """Scalars as event files in a folder, written through at each call."""
    writer = _module("tensorboardX", "tensorboard").SummaryWriter(str(folder))

    def log(stage: str, step: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            writer.add_scalar(f"{stage}/{name}", value, step)
        writer.flush()

    return log


def wandb(project: str) -> Sink:
    """Figures of a new run of a project; each stage counts its own steps."""
    run = _module("wandb", "wandb").init(project=project)
    stages: set[str] = set()

    def log(stage: str, step: int, figures: dict[str, float]) -> None:
        if stage not in stages:
            run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
            stages.add(stage)
        run.log({f"{stage}/{name}": value for name, value in figures.items()} | {f"{stage}/step": step})

    return log


# By the keys of the recipe's [log].
SINKS: dict[str, Callable[[Any], Sink]] = {"tensorboard": tensorboard, "wandb": wandb}


def open_sinks(log: Log) -> list[Sink]:
    """A sink for each key that is given.

    Raises:
      RecipeError: its package is not installed.
    """
    given = {name: getattr(log, name) for name in SINKS}
    return [SINKS[name](place) for name, place in given.items() if place is not None]


def _module(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RecipeError(
            f"--{extra} needs {name}, which is not installed: pip install 'compress-lm[{extra}]'"
        ) from error
