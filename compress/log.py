"""Training figures for TensorBoard and Weights & Biases, each an extra of its own."""

import importlib
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compress.errors import RecipeError
from compress.settings import Log

# (stage, step, figures by name): a step's, or a validation's.
Sink = Callable[[str, int, dict[str, float]], None]


def tensorboard(folder: Path) -> Sink:
    """Scalars in an event file of a folder, an event a call, on disk when it returns."""
    # Not `SummaryWriter`: that one leaves the writing to a thread, which may not get to the last events.
    files = _module("tensorboardX.event_file_writer", "tensorboard")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, FileNotFoundError, NotADirectoryError) as error:
        raise RecipeError(f"--tensorboard {folder}: no folder can be there ({error}); name another place") from error
    writer = files.EventsWriter(str(folder / "events"))

    def log(stage: str, step: int, figures: dict[str, float]) -> None:
        event = files.event_pb2.Event(step=step, wall_time=time.time())
        for name, value in figures.items():
            event.summary.value.add(tag=f"{stage}/{name}", simple_value=value)
        writer.write_event(event)
        writer.flush()

    weakref.finalize(log, writer.close)
    return log


def wandb(project: str) -> Sink:
    """Figures of a new run of a project; each stage counts its own steps."""
    package = _module("wandb", "wandb")
    try:
        run = package.init(project=project)
    except package.errors.Error as error:
        raise RecipeError(f"--wandb {project}: {error}; WANDB_MODE=offline needs no account") from error
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
      RecipeError: its package is not installed, or will not have the place.
    """
    given = {name: getattr(log, name) for name in SINKS}
    return [SINKS[name](place) for name, place in given.items() if place is not None]


def _module(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        cure = f"pip install 'compress-lm[{extra}]'"
        raise RecipeError(f"--{extra} needs {package}, which is not installed: {cure}") from error
