"""Where a student comes from: a folder, a config with fresh weights, or the teacher cut by layers."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

from compress.errors import RecipeError
from compress.models import read_config
from compress.models.config import DecoderConfig
from compress.models.decoder import LAYER, init
from compress.models.folder import Model, architecture, load, to_host
from export.errors import ArtifactError

CUT = re.compile(r"half|layers:(\d+)|layers:(\d+(?:,\d+)+)")


def even_layers(layers: int, kept: int) -> list[int]:
    """`kept` of `layers` layers, evenly spread, the first and the last among them (DistilBERT keeps such a subset,
    arXiv:1910.01108, section 2).
    """
    return sorted({round(i) for i in np.linspace(0, layers - 1, kept)}) if kept > 1 else [0]


def cut_layers(teacher: Model, kept: list[int]) -> Model:
    """The teacher with only the layers `kept`, renumbered; everything else is its own.

    Raises:
      RecipeError: a layer isn't the teacher's.
    """
    layers = teacher.config.num_hidden_layers
    if not kept or any(not 0 <= layer < layers for layer in kept) or sorted(set(kept)) != kept:
        raise RecipeError(f"student layers {kept}: give increasing layers between 0 and {layers - 1}")
    new = {old: index for index, old in enumerate(kept)}
    weights = {}
    for name, value in teacher.weights.items():
        match = LAYER.fullmatch(name)
        if match is None:
            weights[name] = value
        elif int(match[1]) in new:
            weights[f"model.layers.{new[int(match[1])]}.{match[2]}"] = value
    hf = teacher.hf | {"num_hidden_layers": len(kept)}
    if isinstance(hf.get("layer_types"), list):
        hf["layer_types"] = [hf["layer_types"][layer] for layer in kept]
    elif any(window is not None for window in teacher.config.windows):
        kinds = ["full_attention" if w is None else "sliding_attention" for w in teacher.config.windows]
        hf["layer_types"] = [kinds[layer] for layer in kept]
    return dataclasses.replace(teacher, hf=hf, config=read_config(hf), weights=weights)


def make_student(spec: str, teacher: Model, *, seed: int) -> Model:
    """The student before distillation.

    Args:
      spec: "half", "layers:N" (N layers, evenly spread), "layers:0,2,5", a config.json for fresh weights, or a
        model folder or GGUF file.

    Raises:
      RecipeError: `spec` is none of these.
    """
    match = CUT.fullmatch(spec)
    if match:
        layers = teacher.config.num_hidden_layers
        if match[2]:
            return cut_layers(teacher, [int(layer) for layer in match[2].split(",")])
        count = int(match[1]) if match[1] else max(1, layers // 2)
        if not 0 < count <= layers:
            raise RecipeError(f"student {spec!r}: the teacher has {layers} layers")
        return cut_layers(teacher, even_layers(layers, count))
    path = Path(spec)
    if path.suffix == ".json":
        return fresh_student(path, teacher, seed=seed)
    if path.exists():
        return load(path).merged()
    raise RecipeError(f"student {spec!r}: give half, layers:N, layers:0,2,5, a config.json, or a model folder")


def student_architecture(spec: str, teacher: DecoderConfig) -> DecoderConfig:
    """What `make_student` will make of `spec`, before any weight is read; a cut differs in its depth alone.

    Raises:
      ArtifactError: the config or model cannot be read.
    """
    if CUT.fullmatch(spec) or not Path(spec).exists():
        return teacher
    return read_config(_read_config(Path(spec))) if Path(spec).suffix == ".json" else architecture(spec)


def fresh_student(path: Path, teacher: Model, *, seed: int) -> Model:
    """A student of the architecture in `path` with fresh weights and the teacher's tokenizer."""
    hf = _read_config(path)
    config = read_config(hf)
    weights = to_host(init(config, jax.random.key(seed)))
    return Model(hf, config, weights, teacher.files)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        hf = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(hf, dict):
            raise ArtifactError("must be an object")
        read_config(hf)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, ArtifactError, RecursionError) as error:
        raise ArtifactError(f"{path}: not a config.json of a model: {error}") from error
    return hf
