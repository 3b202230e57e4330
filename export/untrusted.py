"""Small files from strangers: located inside their folder and bounded before they are read."""

import json
from pathlib import Path

from export.errors import ArtifactError

OBJECT_LIMIT = 64 << 20  # an index of a million tensors fits


def locate(folder: Path, name: str) -> Path:
    """The file `name` of `folder`: a plain name, whose links do not lead out.

    In a Hugging Face cache (`…/snapshots/<revision>`) a snapshot's files are links into `…/blobs`: those are allowed.

    Raises:
      ArtifactError: `name` holds a path, or leads out of the folder. A file that is missing raises nothing.
    """
    if not name or name in (".", "..") or any(mark in name for mark in "/\\\0"):
        raise ArtifactError(f"{folder}: {name!r} is not the name of a file in this folder")
    path = folder / name
    home = folder.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    try:
        target = path.resolve()
    except (OSError, RuntimeError) as error:
        raise ArtifactError(f"{path}: a link that leads nowhere ({error})") from error
    if not any(target.is_relative_to(root) for root in allowed):
        raise ArtifactError(f"{path}: a link out of its folder, to {target}; copy the file instead")
    return path


def check_regular(path: Path) -> None:
    """Refuse what is there but is no regular file, before it is opened: a pipe would be waited for without end.

    Raises:
      ArtifactError: it is a folder, a pipe or a device.
    """
    if path.exists() and not path.is_file():
        raise ArtifactError(f"{path}: not a regular file")


def read_bytes(folder: Path, name: str, limit: int = OBJECT_LIMIT) -> bytes:
    """The contents of a regular file of at most `limit` bytes."""
    path = locate(folder, name)
    check_regular(path)
    try:
        size = path.stat().st_size
        if size > limit:
            raise ArtifactError(f"{path}: {size} bytes, more than the {limit} that such a file may have")
        with path.open("rb") as file:
            return file.read(limit)
    except FileNotFoundError as error:
        raise ArtifactError(f"{path}: no such file") from error
    except PermissionError as error:
        raise ArtifactError(f"{path}: may not be read ({error.strerror})") from error


def parse_object(text: bytes, where: str) -> dict:
    """A JSON object without doubled keys.

    Raises:
      ArtifactError: it is not UTF-8, not JSON, nested too deeply, not an object, or it has a key twice.
    """

    def unique(pairs: list[tuple[str, object]]) -> dict:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise ArtifactError(f"{where}: {twice!r} stands there twice")
        return found

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except ArtifactError:
        raise
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{where}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ArtifactError(f"{where}: a JSON object is wanted, not a {type(value).__name__}")
    return value


def read_object(folder: Path, name: str) -> dict:
    """The JSON object in a file of `folder`."""
    return parse_object(read_bytes(folder, name), str(folder / name))
