"""A model as it lies on disk, checked: config, weights, adapters, and the files that travel along."""

import dataclasses
import functools
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from compress.models import read_config
from compress.models.config import DecoderConfig
from compress.models.decoder import HEAD, shapes
from compress.models.lora import check_adapters, merge, merge_adapters
from compress.tokenizer import Tokenizer
from export.bitsandbytes import write as write_bitsandbytes
from export.checkpoint import DTYPES, Checkpoint, LazyWeights, check_finite, is_float, not_finite, read
from export.compressed_tensors import write as write_compressed
from export.errors import ArtifactError
from export.manifest import write_manifest
from export.peft import CONFIG as ADAPTER_CONFIG
from export.peft import Adapters
from export.peft import read as read_adapters
from export.peft import write as write_adapters
from export.quantized import NF4Tensor, PackedTensor, Weights
from export.safetensors import write as write_safetensors


@dataclasses.dataclass(frozen=True)
class Model:
    """A checkpoint whose architecture is known and whose tensors have been checked against it.

    Attributes:
      hf: config.json, which is what is written again; `config` is the part of it that we compute with.
      weights: NumPy arrays and quantized tensors by name; a tied head is absent.
      adapters: low-rank updates that act beside the weights, if there are any.
      files: tokenizer, chat template and generation config, by file name.
    """

    hf: dict[str, Any]
    config: DecoderConfig
    weights: Weights
    files: dict[str, bytes]
    adapters: Adapters | None = None

    @property
    def checkpoint(self) -> Checkpoint:
        """What `export` writes: the weights without the adapters."""
        return Checkpoint(self.hf, self.weights, self.files)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, read when it is first asked for.

        Raises:
          ArtifactError: it cannot be read, or has more ids than the embedding has rows. Ids that were added to its own
            vocabulary may lie beyond: multimodal models have some that text never holds.
        """
        found = Tokenizer.from_files(self.files)
        if found.base_size > self.config.vocab_size:
            rows = self.config.vocab_size
            raise ArtifactError(
                f"the tokenizer has {found.base_size} tokens and the embedding {rows} rows; they differ"
            )
        found.rows = min(found.rows, self.config.vocab_size)
        named = [i for i in (found.bos_id, found.eos_id, found.pad_id) if i is not None]
        if max(named, default=0) >= self.config.vocab_size:
            raise ArtifactError(
                f"the tokenizer's BOS, EOS or padding has the id {max(named)} and the embedding "
                f"{self.config.vocab_size} rows; they differ"
            )
        return found

    @property
    def is_quantized(self) -> bool:
        return any(isinstance(value, PackedTensor) for value in self.weights.values())

    @property
    def is_nf4(self) -> bool:
        return any(isinstance(value, NF4Tensor) for value in self.weights.values())

    def merged(self) -> "Model":
        """This model with its adapters merged into its (dequantized) weights: the float model that they make."""
        if self.adapters is None:
            return self
        weights = merge_adapters(self.weights, self.adapters.weights, self.adapters.scale)
        return dataclasses.replace(self, weights=weights, adapters=None)

    def dequantized(self) -> "Model":
        """This model with every quantized tensor as float32; adapters stay apart."""
        weights: Weights = {
            name: np.asarray(value.dequantize(np.float32) if isinstance(value, PackedTensor) else value)
            for name, value in self.weights.items()
        }
        return dataclasses.replace(self, weights=weights)


def check_shapes(config: DecoderConfig, weights: Mapping[str, Any]) -> None:
    """Every tensor of the architecture is there, in its shape, and no other.

    Raises:
      ArtifactError: one line that names all that are missing, wrong or left over.
    """
    wanted = shapes(config)
    problems = [f"{name} is missing" for name in wanted if name not in weights]
    for name, value in weights.items():
        if name not in wanted:
            problems.append(f"{name} is not part of this architecture")
        elif tuple(value.shape) != wanted[name]:
            problems.append(f"{name} has shape {tuple(value.shape)}, not {wanted[name]}")
    if problems:
        shown = "; ".join(problems[:8])
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ArtifactError(f"tensors do not fit config.json: {shown}{more}")


def without_weights(path: str | os.PathLike) -> Model:
    """The model at `path` less its weights, of which none is read.

    Raises:
      ArtifactError: nothing that can be read lies there, or it is of an unknown kind.
    """
    try:
        checkpoint = read(path)
        return Model(checkpoint.config, read_config(checkpoint.config), {}, checkpoint.files)
    except ArtifactError as error:
        raise ArtifactError(str(error) if str(path) in str(error) else f"{path}: {error}") from error


def architecture(path: str | os.PathLike) -> DecoderConfig:
    """What kind of model lies at `path`; no weight is read.

    Raises:
      ArtifactError: as `without_weights`.
    """
    return without_weights(path).config


def load(path: str | os.PathLike, dtype: str = "float32") -> Model:
    """Read a model folder or GGUF file of any format, float tensors as `dtype`; adapters beside it come along.

    Raises:
      ArtifactError: the files are broken, unknown, incomplete or hold NaN or Inf.
    """
    try:
        checkpoint = read(path)
        config = read_config(checkpoint.config)
        check_finite(checkpoint)
        weights: Weights = {}
        for name, value in checkpoint.weights.items():
            if not _is_derived(name, config):
                weights[name] = value if isinstance(value, PackedTensor) else _cast(name, value, dtype)
        check_shapes(config, weights)
    except ArtifactError as error:
        raise ArtifactError(str(error) if str(path) in str(error) else f"{path}: {error}") from error
    model = Model(checkpoint.config, config, weights, checkpoint.files)
    if (Path(path) / ADAPTER_CONFIG).is_file():
        model = dataclasses.replace(model, adapters=_adapters_of(path, weights))
    return model


class Stream(NamedTuple):
    """A model whose tensors are read when they are asked for.

    Attributes:
      model: all but its weights.
      weights: floats, in the dtype that they are stored in, or float32 if they were packed or have adapters; an access
        reads one tensor, and raises ArtifactError if it holds NaN or Inf.
      packed: how many of them lie there packed, without adapters to be merged.
    """

    model: Model
    weights: LazyWeights
    packed: int


def open_stream(path: str | os.PathLike) -> Stream:
    """Open a model folder or GGUF file of any format, with the adapters beside it merged in.

    Raises:
      ArtifactError: as `load`, but for NaN and Inf.
    """
    try:
        checkpoint = read(path)
        stored = checkpoint.weights
        model = Model(checkpoint.config, read_config(checkpoint.config), {}, checkpoint.files)
        names = [name for name in stored if not _is_derived(name, model.config)]
        lazy: Mapping[str, Any] = LazyWeights({name: partial(stored.__getitem__, name) for name in names})
        check_shapes(model.config, lazy)
        adapters = _adapters_of(path, lazy) if (Path(path) / ADAPTER_CONFIG).is_file() else None
    except ArtifactError as error:
        raise ArtifactError(str(error) if str(path) in str(error) else f"{path}: {error}") from error

    def read_one(name: str) -> np.ndarray:
        value = stored[name]
        bad = not_finite(name, value)
        if bad:
            raise ArtifactError(f"{path}: NaN or Inf in {bad}; the checkpoint is damaged, fetch or make it anew")
        if adapters is not None:
            value = merge(name, value, adapters.weights, adapters.scale)
        if isinstance(value, PackedTensor):
            return np.asarray(value.dequantize(np.float32))
        return value if is_float(value.dtype) else _cast(name, value, "float32")

    packed = sum(isinstance(stored[name], PackedTensor) for name in names)
    return Stream(model, LazyWeights({name: partial(read_one, name) for name in names}), 0 if adapters else packed)


def _is_derived(name: str, config: DecoderConfig) -> bool:
    """Whether a tensor follows from the config, or is a copy of the embedding: older checkpoints carry such."""
    return name.endswith("rotary_emb.inv_freq") or (name == HEAD and config.tie_word_embeddings)


def _adapters_of(path: str | os.PathLike, weights: Mapping[str, Any]) -> Adapters:
    adapters = read_adapters(path)
    try:
        check_finite(Checkpoint({}, adapters.weights))
        check_adapters(weights, adapters.weights)
    except ArtifactError as error:
        raise ArtifactError(f"{path}: {error}") from error
    return adapters


def _cast(name: str, value: Any, dtype: str) -> np.ndarray:
    array = np.asarray(value)
    if not is_float(array.dtype):
        raise ArtifactError(f"{name}: {array.dtype} numbers where floats belong")
    return array.astype(DTYPES[dtype])


def to_host(weights: Mapping[str, Any]) -> dict[str, Any]:
    """The same tensors in NumPy; one that lies on several hosts is gathered, so all of them must call it."""

    def fetch(leaf: Any) -> np.ndarray:
        here = not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
        return np.asarray(leaf if here else multihost_utils.process_allgather(leaf, tiled=True))

    return {name: jax.tree.map(fetch, value) for name, value in weights.items()}


def cast(weights: Mapping[str, Any], dtype: Any) -> Weights:
    """The float tensors as JAX arrays of `dtype`, quantized ones as they are."""
    return {n: v if isinstance(v, PackedTensor) else jnp.asarray(v, dtype) for n, v in weights.items()}


def save(model: Model, folder: Path, facts: Mapping[str, Any] | None = None) -> None:
    """Write a stage's model, adapters beside it.

    It is bfloat16 safetensors; of integers compressed-tensors; of NF4 as bitsandbytes has it.
    """
    if model.is_nf4:
        write_bitsandbytes(model.checkpoint, folder)
    elif model.is_quantized:
        write_compressed(model.checkpoint, folder, pack_embedding=True)
    else:
        write_safetensors(model.checkpoint, folder)
    if model.adapters is not None:
        write_adapters(model.adapters, folder)
    write_manifest(folder, facts)


def parameter_count(model: Model) -> int:
    """Number of weights, the embedding counted once."""
    return sum(int(np.prod(shape)) for shape in shapes(model.config).values())
