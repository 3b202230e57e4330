"""Files and folders that appear whole or not at all: a temporary sibling, fsync, rename, fsync of the parent."""

import contextlib
import errno
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from export.errors import ArtifactError, OutputExists


@contextlib.contextmanager
def atomic_folder(out: str | os.PathLike, force: bool = False) -> Iterator[Path]:
    """Yield an empty folder beside `out` that takes its place when the block ends well.

    When the block fails, in any way that Python sees, the temporary folder is removed and what stood at `out` is as
    it was; that of a process that was killed is removed when `out` is written again. With `force`, what stood there
    is moved aside, replaced, and only then removed; it is moved back if the replacement fails.

    Raises:
      OutputExists: `out` exists and `force` is not given; before the block runs.
      ArtifactError: `out` cannot be replaced: it is the working folder or holds it.
      OSError: as the block or the disk says; a full disk (ENOSPC) always comes with a path.
    """
    with _replacement(Path(out), force) as temporary:
        _remove_abandoned(Path(out))
        temporary.mkdir()
        with _lock(temporary):
            yield temporary
            _sync_tree(temporary)


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike, force: bool = False) -> Iterator[Path]:
    """Yield the name of a file beside `path`, for the block to create, that takes its place when the block ends well.

    Otherwise as `atomic_folder`.
    """
    with _replacement(Path(path), force) as temporary:
        yield temporary
        _sync(temporary)


def check_output(out: str | os.PathLike, force: bool = False) -> None:
    """Refuse an output that exists, so that a command can do so before its work.

    Raises:
      OutputExists, ArtifactError: as `atomic_folder`.
    """
    path = Path(out)
    if os.path.lexists(path) and not force:
        raise OutputExists(f"{path}: exists already; pass --force to replace it, or give another --out")
    if path.name in ("", "..") or Path.cwd().is_relative_to(os.path.realpath(path)):
        raise ArtifactError(f"{path}: the working folder lies in it, so it cannot be replaced; give another --out")


@contextlib.contextmanager
def _replacement(out: Path, force: bool) -> Iterator[Path]:
    check_output(out, force)
    out.parent.mkdir(parents=True, exist_ok=True)
    mark = secrets.token_hex(4)
    temporary = out.parent / f".{out.name}.{mark}.tmp"
    try:
        yield temporary
        check_output(out, force)  # somebody else may have been faster
        _swap(temporary, out, out.parent / f".{out.name}.{mark}.old")
    except BaseException as error:
        _remove(temporary)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC and not error.filename:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(out)) from error
        raise


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold a lock that goes with the process, so that others can tell whether it lives.

    Raises:
      BlockingIOError: somebody holds it.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _remove_abandoned(out: Path) -> None:
    for folder in out.parent.glob(f".{glob.escape(out.name)}.????????.tmp"):
        with contextlib.suppress(OSError), _lock(folder):
            shutil.rmtree(folder)


def _swap(temporary: Path, out: Path, aside: Path) -> None:
    """Move `temporary` to `out`; what stood there goes only once its successor is in place."""
    stood = os.path.lexists(out)
    try:
        if stood:
            os.rename(out, aside)
        os.rename(temporary, out)
    except BaseException:
        if os.path.lexists(aside) and not os.path.lexists(out):
            os.rename(aside, out)
        raise
    _sync(out.parent)
    if stood:
        _remove(aside)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync_tree(folder: Path) -> None:
    for root, _, names in os.walk(folder):
        for name in names:
            _sync(Path(root, name))
        _sync(Path(root))
