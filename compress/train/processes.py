"""Several processes that train one model: what they agree on, and which of them writes."""

import contextlib
import itertools
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from export.atomic import atomic_folder

PATIENCE = 7 * 24 * 3600 * 1000  # milliseconds: the first process may have a stage to itself
_meetings = itertools.count()


def is_first() -> bool:
    """Whether this is the process that writes and prints."""
    return jax.process_index() == 0


def meet() -> None:
    """Wait until every process is here."""
    ocp.multihost.get_barrier_sync_fn()(key=f"compress {next(_meetings)}", timeout_ms=PATIENCE)


def any_says(flag: bool) -> bool:
    """Whether it holds in any process."""
    return flag if jax.process_count() == 1 else bool(multihost_utils.process_allgather(np.asarray(flag)).any())


def first_says(flag: bool) -> bool:
    """Whether it holds in the first process."""
    meet()  # device collectives are less patient
    return bool(multihost_utils.broadcast_one_to_all(np.asarray(flag)))


def remove_folder(folder: Path, *, ignore_errors: bool = False) -> None:
    """Remove a folder that all processes see, when none of them needs it any more."""
    meet()
    if is_first():
        shutil.rmtree(folder, ignore_errors)
    meet()


@contextlib.contextmanager
def shared_folder(out: Path, force: bool) -> Iterator[Path]:
    """`atomic_folder` in the first process; in place when the block ends in any.

    What the others write lies in a temporary folder and goes with it, so that all take the same path.
    """
    with atomic_folder(out, force) if is_first() else _scratch() as folder:
        yield folder
    meet()


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
