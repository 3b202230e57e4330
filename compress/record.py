"""stage.json: that a stage is done, what it found, and the hash of all that it read."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from export.manifest import MANIFEST

# Raised when a stage's files change their meaning, so that old ones are made anew.
VERSION = 1
RECORD, TRACE = "stage.json", "training.json"


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
