"""manifest.json: what an artifact's files are, so that a later change, loss or addition shows."""

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from export.errors import ArtifactError
from export.untrusted import read_object

MANIFEST = "manifest.json"
UNLISTED = (MANIFEST, "stage.json")  # written after all that is listed


def write_manifest(folder: str | os.PathLike, facts: Mapping[str, Any] | None = None) -> None:
    """List every file of a folder with its size and SHA-256. To be called last.

    Args:
      folder: the artifact; its hidden files are left out.
      facts: what else is to be known, such as the source's hash or the quantization; JSON.
    """
    folder = Path(folder)
    manifest = {
        "tool": {"name": "compress", "version": _version()},
        "files": {name: describe(folder / name) for name in _names(folder)},
        "facts": dict(facts or {}),
    }
    text = json.dumps(manifest, indent=2, sort_keys=True, ensure_ascii=False)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def read_manifest(folder: str | os.PathLike) -> dict[str, Any]:
    """The manifest of a folder.

    Raises:
      ArtifactError: there is none, or it lists no files.
    """
    folder = Path(folder)
    manifest = read_object(folder, MANIFEST)
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(isinstance(entry, dict) for entry in files.values()):
        raise ArtifactError(f"{folder / MANIFEST}: files must map names to sizes and hashes")
    return manifest


def verify_files(folder: str | os.PathLike) -> list[str]:
    """What differs between a folder and its manifest: every file that is missing, changed or extra.

    Raises:
      ArtifactError: there is no manifest, or it is broken.
    """
    folder = Path(folder)
    listed = read_manifest(folder)["files"]
    present = set(_names(folder))
    problems = [f"{name}: missing" for name in sorted(listed.keys() - present)]
    problems += [f"{name}: not in {MANIFEST}" for name in sorted(present - listed.keys())]
    for name in sorted(present & listed.keys()):
        # Only names found in the folder are opened, never one that the manifest alone gives.
        if not (folder / name).is_file():
            problems.append(f"{name}: not a regular file")
            continue
        size = (folder / name).stat().st_size
        if size != listed[name].get("size"):
            problems.append(f"{name}: {size} bytes, {listed[name].get('size')} in {MANIFEST}")
        elif describe(folder / name) != listed[name]:
            problems.append(f"{name}: contents changed")
    return problems


def describe(path: Path) -> dict[str, Any]:
    """The size and the SHA-256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"sha256": digest, "size": file.tell()}


def _names(folder: Path) -> Iterator[str]:
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            relative = Path(root, name).relative_to(folder).as_posix()
            if not name.startswith(".") and relative not in UNLISTED:
                yield relative


def _version() -> str:
    try:
        return importlib.metadata.version("compress-lm")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
