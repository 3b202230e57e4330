"""Where a model is: a folder, a GGUF file, or `org/name` in the local Hugging Face cache. Nothing is downloaded."""

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from compress.errors import RecipeError
from compress.keys import keys

# What the hub accepts; it keeps names such as ../x from leading out of the cache.
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def locate(model: str, environment: Mapping[str, str] | None = None) -> Path:
    """The path of a model named on the command line or in a recipe.

    Raises:
      RecipeError: it is nowhere; for `org/name` the message has the command that would fetch it.
    """
    if not model:
        raise RecipeError("the name of a model is empty; give a folder or a GGUF file")
    place = Path(os.path.expanduser(model))
    if place.exists():
        return place
    if not _REPOSITORY.fullmatch(model) or model.endswith(".gguf"):
        raise RecipeError(f"{model}: no such model folder or GGUF file")
    folder = cache(os.environ if environment is None else environment) / f"models--{model.replace('/', '--')}"
    snapshot = _snapshot(folder)
    if snapshot is None:
        raise RecipeError(
            f"{model}: no such folder, and not in the Hugging Face cache; to fetch it: hf download {model}"
        )
    return snapshot


def located(settings: Any) -> Any:
    """The settings with every key that names a model as an existing path.

    Raises:
      RecipeError: as `locate`.
    """
    found = {}
    for name, key in keys(type(settings)).items():
        value = getattr(settings, name)
        unless = key.metadata.get("unless")
        if key.metadata.get("model") and value is not None and not (unless and re.fullmatch(unless, value)):
            try:
                found[name] = str(locate(value))
            except RecipeError as error:
                if "unless" not in key.metadata:
                    raise
                raise RecipeError(f"{error}; {name} takes: {key.help}") from None
    return dataclasses.replace(settings, **found)


def check_apart(out: Path, read: Iterable[Path]) -> None:
    """Refuse an output that would replace, under --force, what the command reads.

    Raises:
      RecipeError: something of `read` is `out`, or lies in it.
    """
    place = os.path.realpath(out)
    for path in read:
        if Path(os.path.realpath(path)).is_relative_to(place):
            raise RecipeError(f"{out}: holds {path}, which is read; give another --out")


def inputs(settings: Any) -> list[Path]:
    """Every file and folder that the settings name."""
    found = []
    for name, key in keys(type(settings)).items():
        value = getattr(settings, name)
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, Path) or (key.metadata.get("model") and item and Path(item).exists()):
                found.append(Path(item))
    return found


def cache(environment: Mapping[str, str]) -> Path:
    """The Hugging Face cache, found as huggingface_hub finds it."""
    if "HF_HUB_CACHE" in environment:
        return Path(os.path.expanduser(environment["HF_HUB_CACHE"]))
    general = environment.get("XDG_CACHE_HOME", "~/.cache")
    return Path(os.path.expanduser(environment.get("HF_HOME", f"{general}/huggingface"))) / "hub"


def _snapshot(folder: Path) -> Path | None:
    try:
        revision = (folder / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    snapshot = folder / "snapshots" / revision
    return snapshot if re.fullmatch(r"[0-9a-f]{4,64}", revision) and snapshot.is_dir() else None
