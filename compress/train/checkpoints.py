"""Checkpoints of a training stage: Orbax saves them while training goes on, beside the output until it is done."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from compress.errors import DataError, RecipeError
from export.atomic import atomic_file

IDENTITY = "identity.json"


class Checkpoints:
    """The last `keep` checkpoints of one run; each appears whole or not at all.

    Args:
      folder: where they lie; it is made when the first is saved.
      identity: what the run is of. Checkpoints of another identity are not continued.
      every: steps between them.
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
        every: int,
        keep: int = 3,
        anew: bool = False,
        warn: Callable[[str], None] = lambda text: None,
    ):
        self.folder, self.every, self.warn = folder.absolute(), every, warn
        self._claim(identity, anew)
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(self.folder / "steps", options=options)

    def _claim(self, identity: dict[str, Any], anew: bool) -> None:
        path = self.folder / IDENTITY
        identity = json.loads(json.dumps(identity, default=str))
        try:
            found = json.loads(path.read_bytes())
        except FileNotFoundError:
            found = None
        except ValueError as error:
            raise DataError(f"{path}: {error}; remove {self.folder} to start anew") from error
        if found is not None and found != identity:
            named = [name for name in {**found, **identity} if found.get(name) != identity.get(name)]
            if not anew:
                raise RecipeError(
                    f"{self.folder}: checkpoints of a run with another {', '.join(named)}; "
                    "--force removes them and starts anew"
                )
            self.warn(f"{', '.join(named)} changed since the checkpoints were saved; starting anew")
            shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        if found != identity:
            with atomic_file(path, force=True) as temporary:
                temporary.write_text(json.dumps(identity, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def steps(self) -> list[int]:
        """The steps that can be restored, in order."""
        self.wait()
        return sorted(self._manager.all_steps())

    def save(self, step: int, arrays: Any, about: dict[str, Any]) -> None:
        """Begin to save a pytree of arrays and a JSON dict; one that fails leaves those before it, and a warning."""
        content = ocp.args.Composite(arrays=ocp.args.StandardSave(arrays), about=ocp.args.JsonSave(about))
        self._attempt(lambda: self._manager.save(step, args=content, force=True))

    def wait(self) -> None:
        """Until what was begun is on disk."""
        self._attempt(self._manager.wait_until_finished)

    def about(self, step: int) -> dict[str, Any]:
        """The dict that was saved at a step."""
        return self._manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore())).about

    def arrays(self, step: int, like: Any) -> Any:
        """The arrays that were saved at a step, with the shapes, dtypes and shardings of the pytree `like`."""
        content = ocp.args.Composite(arrays=ocp.args.StandardRestore(like))
        return self._manager.restore(step, args=content).arrays

    def keep_until(self, step: int) -> None:
        """Remove the checkpoints of later steps."""
        for later in [found for found in self.steps() if found > step]:
            self._manager.delete(later)

    def close(self) -> None:
        """Finish what was begun."""
        self.wait()
        self._manager.close()

    def remove(self) -> None:
        """The run is done: nothing is to be continued."""
        self.close()
        shutil.rmtree(self.folder)

    def _attempt(self, action: Callable[[], Any]) -> None:
        """Saving may fail, of a full disk most likely; training need not end for it."""
        try:
            action()
        except Exception as error:  # Orbax raises what its storage library makes of it
            kept = sorted(self._manager.all_steps())
            last = f"that of step {kept[-1]} stands" if kept else "there is none yet"
            reason = (str(error).splitlines() or [type(error).__name__])[-1][:200]
            self.warn(f"{self.folder}: a checkpoint was not saved ({reason}); {last}")


def shapes_of(tree: Any) -> Any:
    """What `Checkpoints.arrays` takes for `like`."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree)
