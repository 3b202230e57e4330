"""NF4 checkpoints as transformers, PEFT and vLLM load them: the 4-bit layout of bitsandbytes, doubly quantized.

Beside a linear's `weight`, uint8 [O * I / 2, 1] with the first input in the high nibble, lie

    weight.absmax                        uint8 [S]; a scale is nested_quant_map[absmax] * nested_absmax + nested_offset
    weight.nested_absmax                 float32 [S / 256, rounded up]
    weight.quant_map                     float32 [16], the levels of NF4
    weight.nested_quant_map              float32 [256], the levels of the scales
    weight.quant_state.bitsandbytes__nf4 JSON in bytes: shape, dtype, sizes of blocks, nested_offset

Kernels have the levels built in, so a file with other levels is refused. https://github.com/bitsandbytes-foundation

Letters: O outputs, I inputs, P packed bytes, S scales (O * I / 64).
"""

import json
import os
from collections.abc import Callable, Collection
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from export.checkpoint import (
    DTYPES,
    Checkpoint,
    LazyWeights,
    host,
    quantization_config,
    read_files,
    to_numpy,
    write_config,
)
from export.errors import ArtifactError
from export.quantized import NF4_BLOCK, NF4_LEVELS, SCALE_BLOCK, SCALE_LEVELS, NF4Tensor
from export.safetensors import SHARD_LIMIT, read_tensors, write_tensors
from export.untrusted import parse_object, read_object

HEAD = "lm_head.weight"
STATE, NF4 = ".quant_state.bitsandbytes__", "nf4"
MAPS = {"quant_map": NF4_LEVELS, "nested_quant_map": SCALE_LEVELS}
PARTS = ("absmax", "nested_absmax", *MAPS)


def write(
    checkpoint: Checkpoint, path: str | os.PathLike, *, dtype: str = "bfloat16", shard_limit: int = SHARD_LIMIT
) -> None:
    """Write a folder whose NF4 tensors, read back, are the same bit for bit; grouped integers are dequantized.

    Args:
      checkpoint: at least one of its weights is in NF4.
      path: a folder, empty or not there yet.
      dtype: "bfloat16", "float16" or "float32", of every other float tensor, and what engines compute in.
      shard_limit: bytes of a file.

    Raises:
      ArtifactError: nothing is in NF4, an unknown dtype, or a value that float16 cannot hold.
    """
    if dtype not in DTYPES:
        raise ArtifactError(f"dtype = {dtype!r}: one of {', '.join(DTYPES)}")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    packed = {name for name in checkpoint.weights if isinstance(checkpoint.weights[name], NF4Tensor)}
    tensors = chain.from_iterable(stored(name, checkpoint.weights[name], dtype).items() for name in checkpoint.weights)
    write_tensors(folder, tensors, shard_limit)
    write_description(checkpoint, folder, dtype, packed)


def stored(name: str, value: Any, dtype: str) -> dict[str, np.ndarray]:
    """The tensors that stand for a weight on disk: its parts, or itself in `dtype` if it is not in NF4."""
    if isinstance(value, NF4Tensor):
        return _parts(name, host(value), dtype)
    return {name: to_numpy(name, value, dtype)}


def write_description(checkpoint: Checkpoint, folder: Path, dtype: str, packed: Collection[str]) -> None:
    """Write config.json, and the files that go along, beside tensors of which those in `packed` are in NF4.

    Raises:
      ArtifactError: there are none.
    """
    if not packed:
        raise ArtifactError("no tensor is in NF4: compress quantize --method nf4 first, or write another format")
    others = [name for name in checkpoint.weights if name not in packed and not _is_embedding(name)]
    linears = {name for name in others if len(checkpoint.weights[name].shape) == 2} | {HEAD}  # tied or not, it is there
    description = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": NF4,
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": dtype,
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": sorted(name.removesuffix(".weight") for name in linears.difference(packed)),
    }
    write_config(checkpoint, folder, dtype, quantization_config=description)


def _parts(name: str, tensor: NF4Tensor, dtype: str) -> dict[str, np.ndarray]:
    state = {
        "quant_type": NF4,
        "blocksize": NF4_BLOCK,
        "dtype": dtype,
        "shape": tensor.shape,
        "nested_blocksize": SCALE_BLOCK,
        "nested_dtype": "float32",
        "nested_offset": float(tensor.mean),
    }
    parts = {"absmax": tensor.scale.reshape(-1), "nested_absmax": tensor.nested, **MAPS}
    return {
        name: swap_nibbles(np.asarray(tensor.packed)).reshape(-1, 1),
        **{f"{name}.{part}": np.asarray(value) for part, value in parts.items()},
        f"{name}{STATE}{NF4}": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }


def swap_nibbles(packed: UInt8[np.ndarray, "*P"]) -> UInt8[np.ndarray, "*P"]:
    """From our order of inputs within a byte to bitsandbytes', and back."""
    return (packed >> 4) | (packed << 4)


def _is_embedding(name: str) -> bool:
    return name.removesuffix(".weight").split(".")[-1].startswith("embed")


def read(path: str | os.PathLike) -> Checkpoint:
    """Read an NF4 folder with doubly quantized scales, lazily.

    Raises:
      ArtifactError: 8 bits, FP4, scales that are not quantized, other levels or sizes of blocks, rows that are no whole
        number of blocks, and every part that is missing or misshaped.
    """
    folder = Path(path)
    config = read_object(folder, "config.json")
    description = quantization_config(config)
    if not isinstance(description, dict) or description.get("quant_method") != "bitsandbytes":
        raise ArtifactError(f"{folder}/config.json: quantization_config says nothing of bitsandbytes")
    if description.get("load_in_8bit"):
        raise ArtifactError(f"{folder}/config.json: bitsandbytes of 8 bits is not read; give NF4 or float weights")
    config = {k: v for k, v in config.items() if k not in ("quantization_config", "compression_config")}
    stored = read_tensors(folder)
    packed = [name.partition(STATE)[0] for name in stored if STATE in name]
    parts = {f"{name}.{part}" for name in packed for part in PARTS}
    loaders: dict[str, Callable[[], Any]] = {
        name: partial(stored.__getitem__, name) for name in stored if name not in parts and STATE not in name
    }
    problems = []
    for name in packed:
        try:
            loaders[name] = _loader(stored, name)
        except ArtifactError as error:
            problems.append(str(error))
    if problems:
        raise ArtifactError(f"{folder}: {'; '.join(problems)}")
    return Checkpoint(config, LazyWeights(loaders), read_files(folder))


def _loader(stored: LazyWeights, name: str) -> Callable[[], NF4Tensor]:
    """What reads an NF4 tensor whose parts have been checked."""
    if f"{name}{STATE}{NF4}" not in stored or _is_embedding(name):
        raise ArtifactError(f"{name}: only linears are read, and of 4-bit types only {NF4}")
    missing = [part for part in (name, *(f"{name}.{part}" for part in PARTS)) if part not in stored]
    if missing:
        raise ArtifactError(f"{', '.join(missing)} missing; scales must be quantized too (bnb_4bit_use_double_quant)")
    state = parse_object(stored[f"{name}{STATE}{NF4}"].tobytes(), f"{name}: quant_state")
    shape, mean = state.get("shape"), state.get("nested_offset")
    is_matrix = isinstance(shape, list) and len(shape) == 2 and all(type(n) is int and 0 < n < 1 << 32 for n in shape)
    if not is_matrix or shape[1] % NF4_BLOCK:  # type: ignore[index]
        raise ArtifactError(f"{name}: shape {str(shape)[:40]} must be two sizes, the second a multiple of {NF4_BLOCK}")
    if type(mean) is not float or not abs(mean) <= float(np.finfo(np.float32).max):
        raise ArtifactError(f"{name}: nested_offset {str(mean)[:40]} must be a number of float32")
    found = [state.get(key) for key in ("quant_type", "blocksize", "nested_blocksize")]
    if found != [NF4, NF4_BLOCK, SCALE_BLOCK]:
        said = str(found)[:80]
        raise ArtifactError(f"{name}: {said} is not read, only {NF4} in blocks of {NF4_BLOCK} and {SCALE_BLOCK}")
    outputs, inputs = shape  # type: ignore[misc]
    scales = outputs * inputs // NF4_BLOCK
    sizes = {
        name: (np.uint8, (outputs * inputs // 2, 1)),
        f"{name}.absmax": (np.uint8, (scales,)),
        f"{name}.nested_absmax": (np.float32, (-(-scales // SCALE_BLOCK),)),
        **{f"{name}.{part}": (np.float32, levels.shape) for part, levels in MAPS.items()},
    }
    for part, (dtype, wanted) in sizes.items():
        if stored[part].dtype != dtype or stored[part].shape != wanted:
            raise ArtifactError(f"{part}: {stored[part].dtype} {stored[part].shape} must be {dtype.__name__} {wanted}")
    for part, levels in MAPS.items():
        if not np.allclose(stored[f"{name}.{part}"], levels, atol=1e-6):
            raise ArtifactError(f"{name}.{part}: other levels than those of {NF4} and its scales")
    return partial(_load, stored, name, outputs, np.asarray(mean, np.float32))


def _load(stored: LazyWeights, name: str, outputs: int, mean: np.ndarray) -> NF4Tensor:
    packed = swap_nibbles(stored[name].reshape(outputs, -1))
    scale = stored[f"{name}.absmax"].reshape(outputs, -1)
    return NF4Tensor(packed, scale, stored[f"{name}.nested_absmax"], mean)
