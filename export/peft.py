"""LoRA adapters as PEFT keeps them: adapter_config.json and adapter_model.safetensors.

An adapter "<linear>.lora_A" [rank, in] or "<linear>.lora_B" [out, rank] is on disk
"base_model.model.<linear>.lora_A.weight"; DoRA's "<linear>.lora_magnitude_vector" [out] has no ".weight".
https://huggingface.co/docs/peft
"""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from export.checkpoint import PICKLES, is_float, to_numpy
from export.errors import ArtifactError
from export.safetensors import SINGLE, read_file, read_header, write_file, write_index
from export.untrusted import read_object

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX, SUFFIX = "base_model.model.", ".weight"
MAGNITUDE = ".lora_magnitude_vector"
SCALINGS: dict[str, Callable[[float, int], float]] = {
    "lora": lambda alpha, rank: alpha / rank,
    "rslora": lambda alpha, rank: alpha / rank**0.5,
}
"""What B @ A is multiplied by, of alpha and rank: LoRA (arXiv:2106.09685, section 4.1), rsLoRA (arXiv:2312.03732)."""
# Variants of LoRA that compute something else, with the value that means "not used".
VARIANTS: dict[str, Any] = {
    "bias": "none",
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "fan_in_fan_out": False,
    "layer_replication": None,
}


@dataclasses.dataclass(frozen=True)
class Adapters:
    """Low-rank updates of linears: w + scale * B @ A, with DoRA (arXiv:2402.09353) in rows of given lengths.

    Attributes:
      weights: "<linear>.lora_A" [rank, in] and "<linear>.lora_B" [out, rank]; with DoRA also
        "<linear>.lora_magnitude_vector" [out].
      rank: of all of them.
      alpha: what the scale is made of, with the rank.
      dropout: the share of inputs dropped in training.
      base: the model that they belong to; a name or a path, for people.
      scaling: a key of `SCALINGS`.
    """

    weights: Mapping[str, np.ndarray | jax.Array]
    rank: int
    alpha: float
    dropout: float = 0.0
    base: str = ""
    scaling: str = "lora"

    @property
    def scale(self) -> float:
        """What B @ A is multiplied by."""
        return SCALINGS[self.scaling](self.alpha, self.rank)

    @property
    def dora(self) -> bool:
        """Whether rows have lengths of their own."""
        return any(name.endswith(MAGNITUDE) for name in self.weights)


def write(adapters: Adapters, path: str | os.PathLike, *, dtype: str = "float32") -> None:
    """Write adapters into a folder, which may be that of their base, if that is written first.

    Raises:
      ArtifactError: halves missing or misshaped; all are named.
    """
    folder = Path(path)
    _check(adapters, str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    stored = {
        PREFIX + (name if name.endswith(MAGNITUDE) else name + SUFFIX): np.asarray(
            to_numpy(name, value, dtype), order="C"
        )
        for name, value in adapters.weights.items()
    }
    write_file(stored, folder / WEIGHTS)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapters.base,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": adapters.dropout,
        "use_dora": adapters.dora,
        "use_rslora": adapters.scaling == "rslora",
        "target_modules": sorted({name.rpartition(".")[0] for name in adapters.weights}),
        "inference_mode": True,
        **VARIANTS,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    # vLLM takes every .safetensors of a folder for the model's, but for those that an index does not name.
    if (folder / SINGLE).exists():
        entries = read_header(folder / SINGLE)
        write_index(folder, dict.fromkeys(entries, SINGLE), sum(e.end - e.begin for e in entries.values()))


def read(path: str | os.PathLike) -> Adapters:
    """Read adapters from a folder.

    Raises:
      ArtifactError: a pickle, another method than LoRA, a variant of it, or halves missing or misshaped.
    """
    folder = Path(path)
    config = read_object(folder, CONFIG)
    where = f"{folder / CONFIG}"
    if config.get("peft_type") != "LORA":
        raise ArtifactError(f"{where}: peft_type {config.get('peft_type')!r} is not read, only LORA")
    for key, unused in VARIANTS.items():
        if config.get(key) and config[key] != unused:
            raise ArtifactError(f"{where}: {key} = {str(config[key])[:80]} is not read, only {unused!r}")
    rank, alpha, dropout = (config.get(key, 0) for key in ("r", "lora_alpha", "lora_dropout"))
    if type(rank) is not int or rank < 1 or not _is_number(alpha) or not _is_number(dropout):
        raise ArtifactError(f"{where}: r must be a positive integer, lora_alpha and lora_dropout finite numbers")
    rslora, dora = (config.get(key) or False for key in ("use_rslora", "use_dora"))
    for key, value in {"use_rslora": rslora, "use_dora": dora}.items():
        if type(value) is not bool:
            raise ArtifactError(f"{where}: {key} = {str(value)[:80]} must be true or false")
    if not os.path.lexists(folder / WEIGHTS):
        pickles = [entry.name for entry in folder.iterdir() if entry.name.endswith(PICKLES)]
        what = f"{pickles[0]} is a pickle, which is never opened; convert it to" if pickles else "no"
        raise ArtifactError(f"{folder}: {what} {WEIGHTS}")
    stored = read_file(folder, WEIGHTS)
    strange = [name for name in stored if not (name.startswith(PREFIX) and name.endswith((SUFFIX, MAGNITUDE)))]
    if strange:
        raise ArtifactError(f"{folder / WEIGHTS}: {', '.join(strange[:8])}: not {PREFIX}<linear>.lora_A{SUFFIX}")
    weights = {name.removeprefix(PREFIX).removesuffix(SUFFIX): stored[name] for name in stored}
    base = str(config.get("base_model_name_or_path") or "")
    adapters = Adapters(weights, rank, float(alpha), float(dropout), base, "rslora" if rslora else "lora")
    _check(adapters, str(folder / WEIGHTS))
    if adapters.dora != dora:
        raise ArtifactError(f"{where}: use_dora = {dora}, but {WEIGHTS} has{'' if adapters.dora else ' no'} magnitudes")
    return adapters


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30  # type: ignore[arg-type]  # so NaN is none


def _check(adapters: Adapters, where: str) -> None:
    problems = [] if adapters.weights else ["no adapters"]
    for name, value in adapters.weights.items():
        if not is_float(value.dtype):
            problems.append(f"{name} must be floats, not {value.dtype}")
        linear, _, half = name.rpartition(".")
        if adapters.dora and half == "lora_A" and f"{linear}{MAGNITUDE}" not in adapters.weights:
            problems.append(f"{linear}{MAGNITUDE} missing")
        if name == f"{linear}{MAGNITUDE}":
            if f"{linear}.lora_B" not in adapters.weights or value.ndim != 1:
                problems.append(f"{name} {value.shape} must have one dimension and a lora_B beside it")
            continue
        axis = {"lora_A": 0, "lora_B": 1}.get(half)
        if axis is None or not linear:
            problems.append(f"{name} is not <linear>.lora_A or <linear>.lora_B")
            continue
        other = f"{linear}.{'lora_B' if half == 'lora_A' else 'lora_A'}"
        if other not in adapters.weights:
            problems.append(f"{other} missing")
        if value.ndim != 2 or value.shape[axis] != adapters.rank:
            problems.append(f"{name} {value.shape} must have rank {adapters.rank} in dimension {axis}")
    if problems:
        raise ArtifactError(f"{where}: {'; '.join(problems)}")
