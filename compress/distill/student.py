"""Where a student comes from: a folder, a config with fresh weights, or the teacher cut to size."""

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from compress.data.batch import Batch
from compress.distill.importance import calibration_batches
from compress.distill.prune import SIZES, Cut, prune
from compress.distill.settings import Distill
from compress.errors import RecipeError
from compress.models import read_config
from compress.models.config import DecoderConfig
from compress.models.decoder import init
from compress.models.folder import Model, architecture, load, to_host
from compress.settings import Common
from export.errors import ArtifactError

LAYERS = re.compile(r"layers:(\d{1,9}(?:,\d{1,9})*)")
# Only layers may also be kept evenly spread.
PART = re.compile(r"(?P<name>(layers)|hidden|ffn|kv_heads)=(?P<size>\d{1,9})(?(2)(?:@importance)?)")
PARTS = "layers=N, layers=N@importance, hidden=N, ffn=N, kv_heads=N"
KNOWN = "half, layers:N, layers:0,2,5, cut:layers=N,hidden=N,…, a config.json, or a model folder"


def even_layers(layers: int, kept: int) -> list[int]:
    """`kept` of `layers` layers, evenly spread, the first and the last among them (DistilBERT keeps such a subset,
    arXiv:1910.01108, section 2).
    """
    return [round(i) for i in np.linspace(0, layers - 1, kept)]


def read_cut(spec: str, teacher: DecoderConfig) -> Cut | None:
    """What `spec` keeps of the teacher; None where it is no cut.

    Raises:
      RecipeError: a part that is unknown or given twice, or a size that does not suit the teacher.
    """
    depth = teacher.num_hidden_layers
    match = LAYERS.fullmatch(spec)
    listed = tuple(int(layer) for layer in match[1].split(",")) if match else ()
    if len(listed) > 1:
        if sorted(set(listed)) != [*listed] or listed[-1] >= depth:
            raise RecipeError(f"student {spec!r}: give increasing layers between 0 and {depth - 1}")
        return Cut.of(teacher, listed, {})
    if spec == "half" or listed:
        parts = [f"layers={listed[0] if listed else max(1, depth // 2)}"]
    elif spec.startswith("cut:"):
        parts = spec.removeprefix("cut:").split(",")
    else:
        return None
    sizes: dict[str, int] = {}
    for part in parts:
        match = PART.fullmatch(part)
        if match is None or match["name"] in sizes:
            raise RecipeError(f"student {spec!r}: {part!r} is not one of {PARTS}, each given once")
        sizes[match["name"]] = int(match["size"])
    layers = sizes.pop("layers", depth)
    if not 1 <= layers <= depth:
        raise RecipeError(f"student {spec!r}: the teacher has {depth} layers")
    for name, size in sizes.items():
        most = getattr(teacher, SIZES[name])
        if not 1 <= size <= most:
            raise RecipeError(f"student {spec!r}: {name}={size}: must be at least 1 and at most the teacher's {most}")
    cut = Cut.of(teacher, layers if "@importance" in spec else tuple(even_layers(depth, layers)), sizes)
    if cut.sizes and cut.sizes["hidden_size"] % cut.sizes["num_attention_heads"]:
        width, heads = cut.sizes["hidden_size"], cut.sizes["num_attention_heads"]
        raise RecipeError(
            f"student {spec!r}: {heads} attention heads do not divide a width of {width}, and transformers wants that"
        )
    return cut


def make_student(spec: str, teacher: Model, *, seed: int, calibration: Callable[[], Sequence[Batch]] = tuple) -> Model:
    """The student before distillation.

    Args:
      spec: "half", "layers:N" (N layers, evenly spread), "layers:0,2,5", "cut:" and any of layers=N or
        layers=N@importance, hidden=N, ffn=N, kv_heads=N; a config.json for fresh weights, or a model folder or GGUF
        file.
      calibration: text to measure importance on; not asked for where nothing is measured.

    Raises:
      RecipeError: `spec` is none of these.
      DataError: importance is to be measured, and there is no text.
    """
    cut = read_cut(spec, teacher.config)
    if cut is not None:
        return prune(teacher, cut, calibration)
    path = existing(spec)
    return fresh_student(path, teacher, seed=seed) if path.suffix == ".json" else load(path).merged()


def initial_student(settings: Distill, common: Common, teacher: Model) -> Model:
    """The student that the stage starts from: the same one, whenever it is made again."""
    calibration = partial(calibration_batches, settings, common, teacher.tokenizer)
    return make_student(settings.student, teacher, seed=common.seed, calibration=calibration)


def student_architecture(spec: str, teacher: DecoderConfig) -> DecoderConfig:
    """What `make_student` will make of `spec`, before any weight is read.

    Raises:
      RecipeError: `spec` is none that `make_student` knows.
      ArtifactError: the config or model cannot be read.
    """
    cut = read_cut(spec, teacher)
    if cut is not None:
        return cut.architecture(teacher)
    path = existing(spec)
    return read_config(_read_config(path)) if path.suffix == ".json" else architecture(path)


def existing(spec: str) -> Path:
    """The path that `spec` names.

    Raises:
      RecipeError: nothing is there.
    """
    path = Path(spec)
    if not path.exists():
        raise RecipeError(f"student {spec!r}: give {KNOWN}")
    return path


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
