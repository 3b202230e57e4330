"""GGUF, llama.cpp's format: one file with config, vocabulary and tensors, both ways."""

import mmap
import os
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, LlamaFileType

from export.checkpoint import Checkpoint, LazyWeights
from export.errors import ArtifactError
from export.gguf_blocks import FLOAT_TYPES, READABLE, block_type, dequantize, encode
from export.gguf_config import llama3_factors, read_config, rope, write_keys
from export.gguf_header import Header, TensorInfo, parse
from export.gguf_names import (
    ARCHITECTURES,
    MODEL_TYPES,
    Architecture,
    check_shapes,
    heads_permuted,
    names,
    row_order,
    shapes,
)
from export.gguf_vocabulary import read_vocabulary, write_vocabulary

FILE_NAME = "model.gguf"
ROPE_FACTORS = "rope_freqs.weight"


def read(path: str | os.PathLike) -> Checkpoint:
    """Read a GGUF file: config and vocabulary at once, each tensor on access, as float32.

    Only the header is read here; block types, shapes and names are checked before any tensor is.

    Raises:
      ArtifactError: the file is broken, or its architecture, vocabulary or a tensor's type is not supported.
    """
    path = Path(path)
    header = parse(path / FILE_NAME if path.is_dir() else path)
    unreadable = [f"{info.name} ({info.type.name})" for info in header.tensors.values() if info.type not in READABLE]
    if unreadable:
        known = ", ".join(kind.name for kind in READABLE)
        listed = ", ".join(unreadable[:10]) + (", ..." if len(unreadable) > 10 else "")
        raise ArtifactError(f"{header.path}: cannot read the types of {listed}; {known} can be read")
    factors = header.tensors.get(ROPE_FACTORS)
    config = read_config(header, None if factors is None else _load(header, factors))
    arch = ARCHITECTURES[header.text("general.architecture")]
    table = names(arch, config["num_hidden_layers"])
    infos = {table.get(name, name): info for name, info in header.tensors.items() if name != ROPE_FACTORS}
    check_shapes(str(header.path), shapes(arch, config), {name: info.shape for name, info in infos.items()})
    files, ids = read_vocabulary(header, config["vocab_size"])
    loaders = {name: partial(_load_as_hf, header, info, arch, config, name) for name, info in infos.items()}
    return Checkpoint(config | ids, LazyWeights(loaders), files)


def _load(header: Header, info: TensorInfo) -> np.ndarray:
    """A tensor's values in float32; a copy, so that the file may go, and what was read of it leaves the memory."""
    raw = np.frombuffer(header.data, np.uint8, info.nbytes, info.start)
    values = np.array(dequantize(raw, info.type)).reshape(info.shape)
    page = info.start - info.start % mmap.PAGESIZE
    header.data.madvise(mmap.MADV_DONTNEED, page, info.start + info.nbytes - page)
    if not np.isfinite(values).all():
        raise ArtifactError(f"{header.path}: {info.name}: NaN or Inf; the file is damaged, fetch or make it anew")
    return values


def _load_as_hf(header: Header, info: TensorInfo, arch: Architecture, config: dict, name: str) -> np.ndarray:
    values = _load(header, info)
    heads = heads_permuted(arch, config, name)
    if heads:
        values = values[np.argsort(row_order(values.shape[0], heads))]
    if arch.norm_offset and name.endswith("norm.weight"):
        values -= np.float32(arch.norm_offset)
    return values


def write(checkpoint: Checkpoint, path: str | os.PathLike, *, float_type: str = "F16") -> None:
    """Write a GGUF file at `path` if that ends in .gguf, else `model.gguf` in the folder `path`.

    Quantized tensors keep their integers and scales: 4 bits become Q4_0, with zero points Q4_1, 5 bits Q5_0 or Q5_1,
    8 bits Q8_0. Other matrices are stored as `float_type`, vectors as F32. Tensors are encoded one at a time.

    Raises:
      ArtifactError: the architecture, tokenizer or a tensor has no form in GGUF, or a number is out of range.
    """
    if float_type not in FLOAT_TYPES:
        raise ArtifactError(f"float_type {float_type!r}: must be one of {', '.join(FLOAT_TYPES)}")
    path = Path(path)
    if path.suffix != ".gguf":
        path.mkdir(parents=True, exist_ok=True)
        path = path / FILE_NAME
    arch, config = _architecture(checkpoint.config)
    keys = write_keys(arch, config) | write_vocabulary(checkpoint.files, config)
    tensors = _tensors(arch, config, checkpoint.weights)
    plan = _plan(arch, config, tensors, float_type)
    writer = GGUFWriter(path, arch.name)
    try:
        for key, value in (_general(checkpoint, plan) | keys).items():
            _add(writer, key, value)
        for name, (_, shape, kind) in plan.items():
            block, size = GGML_QUANT_SIZES[kind]
            nbytes = int(np.prod(shape)) // block * size
            writer.add_tensor_info(name, shape, np.dtype(np.float32), nbytes, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for hf_name, _, kind in plan.values():
            writer.write_tensor_data(_encoded(arch, config, hf_name, tensors[hf_name], kind))
    finally:
        writer.close()


def _architecture(given: dict[str, Any]) -> tuple[Architecture, dict[str, Any]]:
    """The architecture of a config.json, and the config with what it may leave to defaults."""
    kind = given.get("model_type")
    if kind not in MODEL_TYPES:
        raise ArtifactError(f"config.json: model_type {kind!r} has no form in GGUF here; {', '.join(MODEL_TYPES)} have")
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    wrong = [name for name in sizes if type(given.get(name)) is not int or given[name] < 1]
    if wrong:
        raise ArtifactError(f"config.json: {', '.join(wrong)}: must be positive integers")
    config = dict(given)
    config["num_key_value_heads"] = given.get("num_key_value_heads") or given["num_attention_heads"]
    config["head_dim"] = given.get("head_dim") or given["hidden_size"] // given["num_attention_heads"]
    arch = MODEL_TYPES[kind]
    config["tie_word_embeddings"] = bool(given.get("tie_word_embeddings", arch.gemma))
    return arch, config


class _WithRopeFactors(Mapping[str, Any]):
    """The tensors to store: those of the model, and the RoPE factors under their GGUF name."""

    def __init__(self, weights: Mapping[str, Any], factors: np.ndarray | None):
        self.weights, self.factors = weights, factors

    def __getitem__(self, name: str) -> Any:
        return self.factors if name == ROPE_FACTORS and self.factors is not None else self.weights[name]

    def __iter__(self):
        yield from [ROPE_FACTORS] if self.factors is not None else []
        yield from self.weights

    def __len__(self) -> int:
        return len(self.weights) + (self.factors is not None)


def _tensors(arch: Architecture, config: dict[str, Any], weights: Mapping[str, Any]) -> Mapping[str, Any]:
    theta, scaling = rope(config)
    if (scaling.get("rope_type") or scaling.get("type")) != "llama3" or arch.name != "llama":
        return _WithRopeFactors(weights, None)
    return _WithRopeFactors(weights, llama3_factors(scaling, theta, config["head_dim"]))


def _plan(
    arch: Architecture, config: dict[str, Any], tensors: Mapping[str, Any], float_type: str
) -> dict[str, tuple[str, tuple[int, ...], GGMLQuantizationType]]:
    """By GGUF name: Hugging Face name, shape and block type. Looks at every tensor and keeps none."""
    table = {hf: name for name, hf in names(arch, config["num_hidden_layers"]).items()}
    plan = {}
    for hf_name in tensors:
        if hf_name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        value = tensors[hf_name]
        plan[table.get(hf_name, hf_name)] = (hf_name, tuple(value.shape), block_type(hf_name, value, float_type))
    if arch.name == "gemma2" and not config["tie_word_embeddings"]:
        raise ArtifactError("config.json: tie_word_embeddings is false; llama.cpp's gemma2 has no head of its own")
    found = {hf_name: shape for hf_name, shape, _ in plan.values() if hf_name != ROPE_FACTORS}
    check_shapes("the checkpoint", shapes(arch, config), found)
    return plan


def _encoded(arch: Architecture, config: dict[str, Any], name: str, value: Any, kind: GGMLQuantizationType):
    value = jax.tree.map(np.asarray, value)
    heads = heads_permuted(arch, config, name)
    if heads:
        rows = row_order(value.shape[0], heads)
        value = jax.tree.map(lambda leaf: leaf[rows], value)  # codes, scales and zeros move together
    if arch.norm_offset and name.endswith("norm.weight"):
        value = value.astype(np.float32) + np.float32(arch.norm_offset)
    return encode(name, value, kind)


def _general(checkpoint: Checkpoint, plan: dict) -> dict[str, Any]:
    kinds = Counter(kind.name for _, shape, kind in plan.values() if len(shape) > 1)
    most = kinds.most_common(1)[0][0]
    file_type = LlamaFileType.ALL_F32 if most == "F32" else LlamaFileType[f"MOSTLY_{most}"]
    name = str(checkpoint.config.get("_name_or_path") or "").rstrip("/").rsplit("/", 1)[-1]
    return {
        "general.type": "model",
        "general.name": name or checkpoint.config["model_type"],
        "general.file_type": int(file_type),
        "general.quantization_version": 2,
    }


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_key_value(key, value, GGUFValueType.STRING)
    else:
        writer.add_array(key, value)
