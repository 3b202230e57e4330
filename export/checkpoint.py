"""What every format reads and writes: a config, weights by their Hugging Face names, and the files beside them."""

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import ml_dtypes
import numpy as np

from export import FORMATS
from export.errors import ArtifactError
from export.quantized import PackedTensor
from export.untrusted import read_bytes, read_object

FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
AnyPacked = TypeVar("AnyPacked", bound=PackedTensor)
CACHED = 1 << 17  # numbers of two bytes that stay in a core's cache
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model: what it is, its numbers, and what travels with them.

    Attributes:
      config: config.json with Hugging Face field names, without `quantization_config`.
      weights: arrays (out, in) by Hugging Face name. A tied head is absent. Of what was read from disk, an access
        reads one tensor, as NumPy (bfloat16 through ml_dtypes), which may be a read-only view of the file.
      files: contents by name, of those in `FILES`.
    """

    config: dict[str, Any]
    weights: Mapping[str, Any]
    files: dict[str, bytes] = dataclasses.field(default_factory=dict)


class LazyWeights(Mapping[str, Any]):
    """A mapping whose values are made on access."""

    def __init__(self, loaders: Mapping[str, Callable[[], Any]]):
        self._loaders = dict(loaders)

    def __getitem__(self, name: str) -> Any:
        return self._loaders[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaders)

    def __len__(self) -> int:
        return len(self._loaders)

    def __contains__(self, name: object) -> bool:
        return name in self._loaders


def read(path: str | os.PathLike) -> Checkpoint:
    """Read a checkpoint of any kind: a folder of safetensors, compressed-tensors, bitsandbytes or Orbax, or
    a GGUF file.

    Raises:
      ArtifactError: there is none, it is of an unknown kind, or it is broken.
    """
    path = Path(path)
    name = kind(path)
    if name == "gguf" and path.is_dir():
        path = next(path.glob("*.gguf"))
    return FORMATS[name].read(path)


def kind(path: str | os.PathLike) -> str:
    """The key in `FORMATS` of what lies at `path`.

    Raises:
      ArtifactError: nothing that can be read lies there. Pickles are named and refused, never opened.
    """
    path = Path(path)
    if not path.exists():
        raise ArtifactError(f"{path}: no such file or folder")
    if not path.is_dir():
        return _kind_of_file(path)
    names = sorted(entry.name for entry in path.iterdir())
    if (path / "orbax").is_dir():
        return "orbax"
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names) and "config.json" in names:
        description = quantization_config(read_object(path, "config.json"))
        method = description.get("quant_method") if isinstance(description, dict) else None
        return "bitsandbytes" if method == "bitsandbytes" else "compressed-tensors" if description else "safetensors"
    ggufs = [name for name in names if name.endswith(".gguf")]
    if len(ggufs) == 1:
        return "gguf"
    if ggufs:
        raise ArtifactError(f"{path}: {len(ggufs)} GGUF files ({', '.join(ggufs[:4])}); name the one to read")
    if "adapter_config.json" in names:
        raise ArtifactError(f"{path}: adapters without their base; give the folder that holds both, or the base")
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles:
        raise ArtifactError(f"{path}: {pickles[0]} is a pickle, which is never opened; convert it to safetensors")
    wanted = "a folder with config.json and model.safetensors, or a .gguf file"
    lacking = "no config.json" if "config.json" not in names else "no weights"
    raise ArtifactError(f"{path}: {lacking}; a model is {wanted}")


def _kind_of_file(path: Path) -> str:
    if path.suffix == ".gguf":
        return "gguf"
    if path.suffix in PICKLES:
        raise ArtifactError(f"{path}: a pickle, which is never opened; convert it to safetensors")
    if path.suffix == ".safetensors":
        raise ArtifactError(f"{path}: weights without their config.json; give the folder")
    raise ArtifactError(f"{path}: not a model; give a folder or a .gguf file")


def quantization_config(config: dict[str, Any]) -> dict[str, Any] | None:
    """The description of how a checkpoint is quantized, under either of its names; None in a float one."""
    return config.get("quantization_config") or config.get("compression_config") or None


def read_files(folder: Path) -> dict[str, bytes]:
    """Those of `FILES` that lie in `folder`."""
    return {name: read_bytes(folder, name) for name in FILES if os.path.lexists(folder / name)}


def write_config(checkpoint: Checkpoint, folder: Path, dtype: str, **extra: Any) -> None:
    """Write config.json, with its weights' `dtype` under the new and the old name, and the files that go along."""
    config = {**checkpoint.config, "dtype": dtype, "torch_dtype": dtype, **extra}
    text = json.dumps(config, indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    for name, data in checkpoint.files.items():
        if name not in FILES:
            raise ArtifactError(f"{name}: not a file that travels with a model; those are {', '.join(FILES)}")
        (folder / name).write_bytes(data)


def is_float(dtype: Any) -> bool:
    """Whether a dtype holds floats, those of ml_dtypes included."""
    return np.issubdtype(dtype, np.floating) or dtype in map(np.dtype, DTYPES.values()) or "float8" in str(dtype)


def to_numpy(name: str, value: np.ndarray | jax.Array | PackedTensor, dtype: str) -> np.ndarray:
    """A tensor's numbers in `dtype`, a key of `DTYPES`; a quantized one is dequantized, integers stay.

    Raises:
      ArtifactError: a finite value is out of `dtype`'s range (float16 ends at 65504).
    """
    if isinstance(value, PackedTensor):
        value = host(value).dequantize(np.float32)
    array = np.asarray(value)
    if not is_float(array.dtype) or array.dtype == DTYPES[dtype]:
        return array
    with np.errstate(over="ignore"):
        narrow = array.astype(DTYPES[dtype])
    if dtype == "float16" and not np.array_equal(np.isfinite(narrow), np.isfinite(array)):
        raise ArtifactError(f"{name}: values out of float16's range; write bfloat16 or float32")
    return narrow


def host(tensor: AnyPacked) -> AnyPacked:
    """A packed tensor with its arrays in NumPy."""
    return jax.tree.map(np.asarray, tensor)


def check_finite(checkpoint: Checkpoint) -> None:
    """Refuse NaN and Inf.

    Raises:
      ArtifactError: it names every tensor that holds one, with their number.
    """
    bad = [found for name, value in checkpoint.weights.items() if (found := not_finite(name, value))]
    if bad:
        raise ArtifactError(f"NaN or Inf in {', '.join(bad)}; the checkpoint is damaged, fetch or make it anew")


def not_finite(name: str, value: Any) -> str:
    """The tensor's name with the number of its NaN and Inf, in words; empty if it has none."""
    floats = [array for array in map(np.asarray, jax.tree.leaves(value)) if is_float(array.dtype)]
    size = sum(array.size for array in floats)
    count = sum(map(count_not_finite, floats))
    return f"{name} ({count} of {size})" if count else ""


def count_not_finite(array: np.ndarray) -> int:
    """How many of an array's floats are NaN or Inf."""
    if array.dtype != DTYPES["bfloat16"]:
        return array.size - int(np.isfinite(array).sum())
    # ml_dtypes looks at one number at a time; an exponent of all ones is told from the bits, a piece in cache each.
    bits = np.ascontiguousarray(array).view(np.uint16).reshape(-1)
    pieces = (bits[at : at + CACHED] for at in range(0, bits.size, CACHED))
    return sum(int(np.count_nonzero(piece & 0x7F80 == 0x7F80)) for piece in pieces)
