"""Quantized checkpoints as vLLM and transformers load them: compressed-tensors, format `pack-quantized`.

A code is stored as signed + 2**(bits - 1), which is our unsigned code, and words of 32 bits hold a row's codes as one
stream of bits, the low ones first, which is our order: so codes go to disk and back as a view. Zero points are packed
down the outputs instead.
https://github.com/vllm-project/compressed-tensors

Letters: O outputs, I inputs, G groups, W words.
"""

import dataclasses
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32, UInt8

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
from export.quantized import BITS, QuantizedTensor, QuantSpec, pack, unpack
from export.safetensors import SHARD_LIMIT, read_tensors, write_tensors
from export.untrusted import read_object

FORMAT = "pack-quantized"
PARTS = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")


@dataclasses.dataclass(frozen=True)
class Scheme:
    """What a config group says of its weights; `group_size` is None for one group a row."""

    bits: int
    group_size: int | None
    symmetric: bool


def write(
    checkpoint: Checkpoint,
    path: str | os.PathLike,
    *,
    dtype: str | None = None,
    pack_embedding: bool = False,
    shard_limit: int = SHARD_LIMIT,
) -> None:
    """Write a quantized folder. Reading it back gives the same codes, scales and zero points, bit for bit.

    Args:
      checkpoint: at least one of its weights is quantized.
      path: a folder, empty or not there yet.
      dtype: of the tensors that are not quantized. Engines keep one dtype for all, so it is the scales'.
      pack_embedding: keep a quantized embedding so. We read that and transformers 5.24 does not, so unless told
        otherwise an embedding is written dequantized.
      shard_limit: bytes of a file.

    Raises:
      ArtifactError: nothing (else) is quantized, scales of several dtypes, or a dtype that is not theirs.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: _kept_packed(name, checkpoint.weights[name], pack_embedding) for name in checkpoint.weights}
    specs = {name: spec for name, spec in kept.items() if spec}
    dtype = dtype or next((spec.scale_dtype for spec in specs.values()), "bfloat16")
    tensors = chain.from_iterable(
        stored(name, checkpoint.weights[name], dtype, packed=name in specs).items() for name in checkpoint.weights
    )
    write_tensors(folder, tensors, shard_limit)
    write_description(checkpoint, folder, dtype, specs)


def stored(name: str, value: Any, dtype: str, *, packed: bool = True) -> dict[str, np.ndarray]:
    """The tensors that stand for a weight on disk: its parts, or itself in `dtype` where it is not to be `packed`.

    Raises:
      ArtifactError: its scales have another dtype, or it has more than two dimensions.
    """
    if not packed or not isinstance(value, QuantizedTensor):
        return {name: to_numpy(name, value, dtype)}
    _check_writable(name, value, dtype)
    return _parts(name.removesuffix(".weight"), host(value))


def write_description(checkpoint: Checkpoint, folder: Path, dtype: str, specs: Mapping[str, QuantSpec]) -> None:
    """Write config.json, and the files that go along, beside tensors of which those in `specs` are packed.

    Raises:
      ArtifactError: there are none.
    """
    if not specs:
        raise ArtifactError("no tensor is quantized: quantize first, or write safetensors")
    linears = {module for name in checkpoint.weights if (module := _linear(name, checkpoint.weights[name]))}
    if "lm_head.weight" not in checkpoint.weights:
        linears.add("lm_head")  # tied: an engine has the module all the same
    packed = {name.removesuffix(".weight"): spec for name, spec in specs.items()}
    write_config(checkpoint, folder, dtype, quantization_config=_describe(packed, linears))


def _linear(name: str, value: Any) -> str | None:
    module = name.removesuffix(".weight")
    return module if module != name and len(value.shape) == 2 and not _is_embedding(module) else None


def _kept_packed(name: str, value: Any, pack_embedding: bool) -> QuantSpec | None:
    packed = isinstance(value, QuantizedTensor) and (pack_embedding or not _is_embedding(name.removesuffix(".weight")))
    return value.spec if packed else None


def _check_writable(name: str, tensor: QuantizedTensor, dtype: str) -> None:
    if tensor.spec.scale_dtype != dtype or dtype not in DTYPES:
        raise ArtifactError(
            f"{name}: scales in {tensor.spec.scale_dtype}, the rest in {dtype}: engines keep one dtype for both"
        )
    if tensor.ndim != 2 or not name.endswith(".weight"):
        raise ArtifactError(f"{name} {tensor.shape}: only a weight of two dimensions can be written quantized")


def _is_embedding(module: str) -> bool:
    return module.split(".")[-1].startswith("embed")


def _parts(module: str, tensor: QuantizedTensor) -> dict[str, np.ndarray]:
    parts = {
        f"{module}.weight_packed": to_words(np.asarray(tensor.packed)),
        f"{module}.weight_scale": np.asarray(tensor.scale),
        f"{module}.weight_shape": np.array(tensor.shape, np.int64),
    }
    if tensor.zero is not None:
        parts[f"{module}.weight_zero_point"] = pack_zeros(np.asarray(tensor.zero), tensor.spec.bits)
    return parts


def _describe(specs: dict[str, QuantSpec], linears: set[str]) -> dict[str, Any]:
    groups: dict[QuantSpec, list[str]] = defaultdict(list)
    for module, spec in specs.items():
        groups[spec].append(module)
    # The largest group is "every Linear but those named elsewhere"; a name goes before a class.
    ordered = sorted(groups.items(), key=lambda item: -sum(not _is_embedding(module) for module in item[1]))
    described = {}
    for k, (spec, modules) in enumerate(ordered):
        rest = [module for module in modules if k or _is_embedding(module)]
        described[f"group_{k}"] = {
            "targets": (["Linear"] if len(rest) < len(modules) else []) + rest,
            "weights": {
                "num_bits": spec.bits,
                "type": "int",
                "symmetric": spec.symmetric,
                "strategy": "group",
                "group_size": spec.group_size,
                "dynamic": False,
                "actorder": None,
            },
            "input_activations": None,
            "output_activations": None,
            "format": FORMAT,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": described,
        "ignore": sorted(linears - specs.keys()),
        "kv_cache_scheme": None,
    }


def to_words(packed: UInt8[np.ndarray, "O P"]) -> Int32[np.ndarray, "O W"]:
    """Bytes of packed codes as words: a view when a row is a whole number of words, else padded with zero bits."""
    if packed.shape[-1] % 4:
        packed = np.pad(packed, ((0, 0), (0, -packed.shape[-1] % 4)))
    return np.ascontiguousarray(packed).view("<i4")


def pack_zeros(zero: UInt8[np.ndarray, "O G"], bits: int) -> Int32[np.ndarray, "W G"]:
    """Zero points in words that run down the outputs."""
    padded = np.pad(zero.T, ((0, 0), (0, -len(zero) % 8)))
    words = to_words(np.asarray(pack(padded, bits)))[:, : -(-len(zero) * bits // 32)]
    return np.ascontiguousarray(words.T)


def unpack_zeros(words: Int32[np.ndarray, "W G"], bits: int, outputs: int) -> UInt8[np.ndarray, "O G"]:
    """Undo `pack_zeros`."""
    stream = np.ascontiguousarray(words.T).view(np.uint8)
    whole = np.pad(stream, ((0, 0), (0, -stream.shape[-1] % bits)))
    return np.ascontiguousarray(unpack(whole, bits)[:, :outputs].T)


def read(path: str | os.PathLike) -> Checkpoint:
    """Read a quantized folder, lazily; codes are views of the file.

    Raises:
      ArtifactError: another method or format, activations or caches that are quantized too, columns reordered
        (`weight_g_idx`), and every part that is missing or misshaped.
    """
    folder = Path(path)
    config = read_object(folder, "config.json")
    schemes = read_schemes(quantization_config(config), f"{folder}/config.json: quantization_config")
    config = {k: v for k, v in config.items() if k not in ("quantization_config", "compression_config")}
    stored = read_tensors(folder)
    modules: dict[str, set[str]] = defaultdict(set)
    loaders: dict[str, Callable[[], Any]] = {}
    strange = []
    for name in stored:
        module, _, part = name.rpartition(".")
        if part in PARTS:
            modules[module].add(part)
        elif part.startswith(("weight_", "input_", "output_")) or part in ("k_scale", "v_scale"):
            strange.append(name)
        else:
            loaders[name] = partial(stored.__getitem__, name)
    if strange:
        raise ArtifactError(f"{folder}: {', '.join(strange[:8])}: reordered or activation quantization is not read")
    problems = []
    for module, parts in modules.items():
        spec = _match(module, parts, stored, schemes)
        if isinstance(spec, QuantSpec):
            loaders[f"{module}.weight"] = partial(_load, stored, module, spec)
        else:
            problems.append(spec)
        if f"{module}.weight" in stored:
            problems.append(f"{module}.weight stands there both plain and packed")
    if problems:
        raise ArtifactError(f"{folder}: {'; '.join(problems)}")
    return Checkpoint(config, LazyWeights(loaders), read_files(folder))


def read_schemes(description: Any, where: str) -> list[Scheme]:
    """The schemes of a `quantization_config`.

    Raises:
      ArtifactError: it describes something other than integer weights in `pack-quantized`.
    """
    if not isinstance(description, dict):
        raise ArtifactError(f"{where}: missing, or not an object")
    method, layout = description.get("quant_method", "compressed-tensors"), description.get("format")
    if method != "compressed-tensors":
        raise ArtifactError(f"{where}: quant_method {method!r} is not read; give compressed-tensors or float weights")
    for key in ("kv_cache_scheme", "transform_config"):
        if description.get(key):
            raise ArtifactError(f"{where}: {key} is not read; give weights quantized alone")
    sparsity = description.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise ArtifactError(f"{where}: sparse weights are not read")
    groups = description.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ArtifactError(f"{where}: config_groups must describe at least one group")
    return [_read_group(group, layout, f"{where}: {name}") for name, group in groups.items()]


def _read_group(group: Any, layout: Any, where: str) -> Scheme:
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise ArtifactError(f"{where}: must be an object with weights")
    layout = group.get("format") or layout
    if layout != FORMAT:
        raise ArtifactError(f"{where}: format {layout!r} is not read, only {FORMAT}")
    if group.get("input_activations") or group.get("output_activations"):
        raise ArtifactError(f"{where}: quantized activations are not read, only weights")
    bits, strategy, size = weights.get("num_bits"), weights.get("strategy"), weights.get("group_size")
    if weights.get("type", "int") != "int" or type(bits) is not int or bits not in BITS:
        known = ", ".join(map(str, BITS))
        raise ArtifactError(f"{where}: {weights.get('type')} of {bits} bits is not read, only int of {known}")
    if weights.get("actorder") == "group":
        raise ArtifactError(f"{where}: actorder 'group' reorders columns and is not read; quantize with 'static'")
    if strategy not in (None, "group", "channel"):
        raise ArtifactError(f"{where}: strategy {strategy!r} is not read, only group and channel")
    if strategy != "channel" and (type(size) is not int or size < 2):
        raise ArtifactError(f"{where}: group_size {size!r} must be a positive even number")
    return Scheme(bits, None if strategy == "channel" else size, weights.get("symmetric", True) is True)


def _match(module: str, parts: set[str], stored: LazyWeights, schemes: list[Scheme]) -> QuantSpec | str:
    """The spec that a module's stored parts have and a scheme announces, or what is wrong with them."""
    asymmetric = all(not scheme.symmetric for scheme in schemes)
    missing = [part for part in PARTS if part not in parts and (part != PARTS[-1] or asymmetric)]
    if missing:
        return f"{module} lacks {', '.join(missing)}"
    packed, scale, shape = (stored[f"{module}.{part}"] for part in PARTS[:3])
    if shape.shape != (2,) or shape.dtype.kind != "i" or packed.dtype != np.int32 or packed.ndim != 2:
        return f"{module}: weight_packed must be int32 of two dimensions and weight_shape two integers"
    outputs, inputs = map(int, shape)
    if scale.ndim != 2 or scale.dtype.name not in DTYPES or outputs != packed.shape[0]:
        return f"{module}: weight_scale {scale.dtype} {scale.shape} and weight_packed {packed.shape} do not fit"
    specs = set()
    for scheme in schemes:
        size = scheme.group_size or inputs
        fits = inputs >= 2 and inputs % size == 0 and scale.shape == (outputs, inputs // size)
        if fits and packed.shape[1] == -(-inputs * scheme.bits // 32) and scheme.symmetric != (PARTS[-1] in parts):
            if not scheme.symmetric:
                zero = stored[f"{module}.{PARTS[-1]}"]
                wanted = (-(-outputs * scheme.bits // 32), inputs // size)
                if zero.shape != wanted or zero.dtype != np.int32:
                    return f"{module}: weight_zero_point {zero.dtype} {zero.shape} must be int32 {wanted}"
            specs.add(QuantSpec(scheme.bits, size, scheme.symmetric, scale.dtype.name))
    if len(specs) == 1:
        return specs.pop()
    found = f"weight_packed {packed.shape}, weight_scale {scale.shape}, weight_shape {(outputs, inputs)}"
    return f"{module}: {found} fit {'several groups' if specs else 'no group'} of the config"


def _load(stored: LazyWeights, module: str, spec: QuantSpec) -> QuantizedTensor:
    packed, scale, shape = (stored[f"{module}.{part}"] for part in PARTS[:3])
    outputs, inputs = map(int, shape)
    codes = packed.view(np.uint8)[:, : inputs * spec.bits // 8]
    zero = None
    if not spec.symmetric:
        zero = unpack_zeros(stored[f"{module}.{PARTS[-1]}"], spec.bits, outputs)
    return QuantizedTensor(codes, scale, zero, spec)
