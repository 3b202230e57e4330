"""Checkpoints for JAX users: `orbax/` restores with plain orbax-checkpoint, without this package.

Beside config.json and the tokenizer's files lie

    orbax/             a tree {tensor name: array}; a quantized tensor is {"packed", "scale"[, "zero"]}
    quantization.json  {tensor name: its QuantSpec}, when something is quantized
"""

import dataclasses
import json
import os
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from export.checkpoint import DTYPES, Checkpoint, LazyWeights, host, read_files, to_numpy, write_config
from export.errors import ArtifactError
from export.quantized import QuantizedTensor, QuantSpec
from export.untrusted import read_object

TREE, SPECS = "orbax", "quantization.json"
# A chunk is compressed, and one that was never written reads as zeros: what a file may grow to is bounded.
GROWTH, SMALL = 1000, 1 << 30


def write(checkpoint: Checkpoint, path: str | os.PathLike, *, dtype: str = "bfloat16") -> None:
    """Write a folder whose arrays Orbax restores.

    Args:
      checkpoint: what to write; it is whole in memory meanwhile.
      path: a folder, empty or not there yet.
      dtype: "bfloat16", "float16" or "float32", of every float tensor that is not quantized.

    Raises:
      ArtifactError: an unknown dtype, or a value that float16 cannot hold.
    """
    if dtype not in DTYPES:
        raise ArtifactError(f"dtype = {dtype!r}: one of {', '.join(DTYPES)}")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tree: dict[str, Any] = {}
    specs = {}
    for name in checkpoint.weights:
        value = checkpoint.weights[name]
        if isinstance(value, QuantizedTensor):
            tensor = host(value)
            tree[name] = {"packed": tensor.packed, "scale": tensor.scale}
            if tensor.zero is not None:
                tree[name]["zero"] = tensor.zero
            specs[name] = dataclasses.asdict(tensor.spec)
        else:
            tree[name] = to_numpy(name, value, dtype)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.resolve() / TREE, tree)
    if specs:
        (folder / SPECS).write_text(json.dumps(specs, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    write_config(checkpoint, folder, dtype)


def read(path: str | os.PathLike) -> Checkpoint:
    """Read a folder that `write` made; an access restores one tensor.

    Raises:
      ArtifactError: Orbax cannot read it, its sizes are out of proportion, or quantized parts do not fit.
    """
    folder = Path(path)
    config = read_object(folder, "config.json")
    tree = (folder / TREE).resolve()
    described = read_object(folder, SPECS) if os.path.lexists(folder / SPECS) else {}
    shapes = _restore(tree, lambda checkpointer: checkpointer.metadata(tree).item_metadata.tree)
    if not isinstance(shapes, dict) or not shapes:
        raise ArtifactError(f"{tree}: holds no tensors")
    _check_growth(tree, shapes)
    loaders: dict[str, Callable[[], Any]] = {}
    problems = []
    for name, node in shapes.items():
        spec = None
        if isinstance(node, dict):
            spec = _read_spec(described.get(name))
            if spec is None or not _fits(node, spec):
                problems.append(f"{name}: packed, scale or zero do not fit what {SPECS} says")
        loaders[name] = partial(_load, tree, name, node, spec)
    problems += [f"{name}: {SPECS} has it, {TREE} has not" for name in described if name not in shapes]
    if problems:
        raise ArtifactError(f"{folder}: {'; '.join(problems)}")
    return Checkpoint(config, LazyWeights(loaders), read_files(folder))


def _restore(tree: Path, action: Callable[[ocp.Checkpointer], Any]) -> Any:
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            return action(checkpointer)
    except Exception as error:  # whatever a library makes of a stranger's broken file
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ArtifactError(f"{tree}: Orbax cannot restore it ({reason})") from error


def _check_growth(tree: Path, shapes: dict[str, Any]) -> None:
    leaves = [leaf for node in shapes.values() for leaf in (node.values() if isinstance(node, dict) else [node])]
    if not all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves):
        raise ArtifactError(f"{tree}: must be a tree of arrays by tensor name")
    wanted = sum(prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in leaves)
    stored = sum(file.stat().st_size for file in tree.rglob("*") if file.is_file())
    if wanted > max(SMALL, GROWTH * stored):
        raise ArtifactError(f"{tree}: {stored} bytes that would become {wanted}; refused")


def _read_spec(description: Any) -> QuantSpec | None:
    try:
        return QuantSpec(**description)
    except (TypeError, ArtifactError):
        return None


def _fits(node: dict[str, Any], spec: QuantSpec) -> bool:
    if set(node) != ({"packed", "scale"} if spec.symmetric else {"packed", "scale", "zero"}):
        return False
    packed, scale = node["packed"], node["scale"]
    types = [str(np.dtype(part.dtype)) for part in node.values() if part is not scale]
    rows, inputs = tuple(packed.shape[:-1]), packed.shape[-1] * 8 // spec.bits if len(packed.shape) else 0
    fits = tuple(scale.shape) == (*rows, inputs // spec.group_size) and inputs % spec.group_size == 0
    alike = spec.symmetric or tuple(node["zero"].shape) == tuple(scale.shape)
    return fits and alike and set(types) == {"uint8"} and str(np.dtype(scale.dtype)) == spec.scale_dtype


def _load(tree: Path, name: str, node: Any, spec: QuantSpec | None) -> np.ndarray | QuantizedTensor:
    wanted = {name: dict.fromkeys(node, 0) if isinstance(node, dict) else 0}
    options = ocp.args.PyTreeRestore(item=wanted, partial_restore=True)
    value = _restore(tree, lambda checkpointer: checkpointer.restore(tree, args=options))[name]
    if spec is None:
        return np.asarray(value)
    zero = None if spec.symmetric else np.asarray(value["zero"])
    return QuantizedTensor(np.asarray(value["packed"]), np.asarray(value["scale"]), zero, spec)
