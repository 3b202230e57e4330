"""Checkpoints of a training stage: Orbax saves them while training goes on, beside the output until it is done."""

import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import absl.logging
import jax
import orbax.checkpoint as ocp

from compress.errors import DataError, RecipeError
from compress.train.processes import is_first, remove_folder
from export.atomic import atomic_file

IDENTITY = "identity.json"
KEEP = 3  # checkpoints
# How Orbax's storage library ends the message of a ValueError that the operating system is the cause of.
STORAGE_ERROR = re.compile(r": ([^:]+) \[os_error_code")
# What fails in the background is raised in the foreground too, where it is told in one line.
absl.logging.set_verbosity(absl.logging.FATAL)


class Checkpoints:
    """The last checkpoints of one run; each appears whole or not at all.

    Args:
      folder: where they lie; it is made when the first is saved.
      identity: what the run is of. Checkpoints of another identity are not continued.
      anew: remove checkpoints of another identity instead of refusing.
      warn: told when one could not be saved.

    Raises:
      RecipeError: checkpoints of another identity lie there.
      DataError: what lies there is not what this class has written.
    """

    def __init__(
        self,
        folder: Path,
        identity: dict[str, Any],
        *,
        anew: bool = False,
        warn: Callable[[str], None] = lambda text: None,
    ):
        self.folder, self.warn = folder.absolute(), warn
        self.identity = json.loads(json.dumps(identity, default=str))
        self._refuse_others(anew)

    def _refuse_others(self, anew: bool) -> None:
        path = self.folder / IDENTITY
        try:
            found = json.loads(path.read_bytes())
            if not isinstance(found, dict):
                raise ValueError("must be an object")
        except FileNotFoundError:
            return
        except ValueError as error:
            raise DataError(f"{path}: {error}; remove {self.folder} to start anew") from error
        if found == self.identity:
            return
        named = [name for name in {**found, **self.identity} if found.get(name) != self.identity.get(name)]
        if not anew:
            raise RecipeError(
                f"{self.folder}: checkpoints of a run with another {', '.join(named)}; "
                "--force removes them and starts anew"
            )
        self.warn(f"{', '.join(named)} changed since the checkpoints were saved; starting anew")
        remove_folder(self.folder)

    @functools.cached_property
    def _manager(self) -> ocp.CheckpointManager:
        """Made when something is saved or restored, so that a stage which fails before leaves nothing."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if is_first():
            with atomic_file(self.folder / IDENTITY, force=True) as temporary:
                temporary.write_text(json.dumps(self.identity, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        options = ocp.CheckpointManagerOptions(max_to_keep=KEEP, create=True, cleanup_tmp_directories=True)
        return ocp.CheckpointManager(self.folder / "steps", options=options)

    def steps(self) -> list[int]:
        """The steps that can be restored, in order."""
        if not self.folder.exists():
            return []
        self.wait()
        return sorted(self._manager.all_steps())

    def save(self, step: int, arrays: Any, about: dict[str, Any]) -> None:
        """Begin to save a pytree of arrays and a JSON dict; one that fails leaves those before it, and a warning."""
        content = ocp.args.Composite(arrays=ocp.args.StandardSave(named(arrays)), about=ocp.args.JsonSave(about))
        self._attempt(lambda: self._manager.save(step, args=content, force=True))

    def wait(self) -> None:
        """Until what was begun is on disk."""
        self._attempt(self._manager.wait_until_finished)

    def about(self, step: int) -> dict[str, Any]:
        """The dict that was saved at a step."""
        return self._manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore())).about

    def arrays(self, step: int, like: Any) -> Any:
        """The arrays that were saved at a step, with the shapes, dtypes and shardings of the pytree `like`."""
        content = ocp.args.Composite(arrays=ocp.args.StandardRestore(named(like)))
        found = self._manager.restore(step, args=content).arrays
        return jax.tree.unflatten(jax.tree.structure(like), [found[name] for name in named(like)])

    def keep_until(self, step: int) -> None:
        """Remove the checkpoints of later steps."""
        for later in [found for found in self.steps() if found > step]:
            self._manager.delete(later)

    def close(self) -> None:
        """Finish what was begun."""
        if self.folder.exists():
            self.wait()
            self._manager.close()

    def remove(self) -> None:
        """The run is done: nothing is to be continued."""
        self.close()
        remove_folder(self.folder, ignore_errors=True)

    def _attempt(self, action: Callable[[], Any]) -> None:
        """Saving may fail, of a full disk most likely; training need not end for it."""
        try:
            action()
        except (OSError, ValueError) as error:
            told = STORAGE_ERROR.search(str(error))
            if isinstance(error, ValueError) and not told:
                raise
            for half in (self.folder / "steps").glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(half, ignore_errors=True)
            kept = sorted(self._manager.all_steps())
            last = f"that of step {kept[-1]} stands" if kept else "there is none yet"
            self.warn(f"{self.folder}: a checkpoint was not saved ({told[1] if told else error}); {last}")


def named(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by their paths, whatever its nodes are."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def shapes_of(tree: Any) -> Any:
    """What `Checkpoints.arrays` takes for `like`."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree)
