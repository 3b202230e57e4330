"""What is kept of a stage: that it is done, what it found, and what it read; and the folder of one that is not."""

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from compress.errors import RecipeError
from compress.settings import Common
from export.atomic import atomic_file
from export.manifest import MANIFEST
from export.untrusted import read_object

# Raised when a stage's files change their meaning, so that old ones are made anew.
VERSION = 1
RECORD, TRACE = "stage.json", "training.json"
IDENTITY = "identity.json"


def read_record(path: Path) -> dict[str, Any]:
    """A stage.json; empty if there is none that can be read."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def contents_of(settings: Any) -> dict[str, Any]:
    """The settings with every file and folder as its name and the hash of what it holds, wherever it lies."""

    def seen(value: Any) -> Any:
        if isinstance(value, tuple):
            return [seen(item) for item in value]
        if isinstance(value, str | Path) and str(value) and Path(value).exists():
            return f"{Path(value).name} {hash_of(Path(value))}"
        return str(value) if isinstance(value, Path) else value

    return {field.name: seen(getattr(settings, field.name)) for field in dataclasses.fields(settings)}


def hash_of(path: Path) -> str:
    """SHA-256 of a file, or of all files of a folder; what a stage writes of its own course is left out.

    So is the manifest, which lists the course too, and else only what is hashed here.
    """
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file() and file.name not in (RECORD, MANIFEST, TRACE):
            digest.update(str(file.relative_to(path)).encode() + b"\0")
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def open_partial(common: Common, stage: str, made_from: dict[str, Any]) -> Path:
    """The folder beside the output that a stage which can be interrupted writes into, made or found again.

    Raises:
      RecipeError: what lies there was made from something else, and `common.force` is not given.
    """
    assert common.out is not None
    folder = common.out.with_name(f"{common.out.name}.partial")
    if (folder / IDENTITY).exists():
        found = read_object(folder, IDENTITY)
        made_from = json.loads(json.dumps(made_from, default=str))
        named = [name for name in {**found, **made_from} if found.get(name) != made_from.get(name)]
        if named and not common.force:
            raise RecipeError(f"{folder}: begun with another {', '.join(named)}; --force removes it and starts anew")
        if named:
            shutil.rmtree(folder)
        else:
            common.progress.say(f"{stage}: goes on with {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    for half in folder.glob(".*.tmp"):
        half.unlink()
    write_identity(folder, made_from)
    return folder


def write_identity(folder: Path, made_from: dict[str, Any]) -> None:
    """Write what a folder is made from, whole or not at all."""
    with atomic_file(folder / IDENTITY, force=True) as temporary:
        temporary.write_text(json.dumps(made_from, indent=2, sort_keys=True, default=str) + "\n", encoding="utf-8")


def stamp_of(path: Path) -> str:
    """SHA-256 of the names, sizes and times of change of a file or of a folder's files; their contents are not read."""
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file() and file.name not in (RECORD, MANIFEST, TRACE):
            about = file.stat()
            digest.update(f"{file.relative_to(path)} {about.st_size} {about.st_mtime_ns}\n".encode())
    return digest.hexdigest()
