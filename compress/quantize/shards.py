"""A quantized model's folder while it is made: a shard for each part of the model, so that a killed run goes on."""

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from compress.models.decoder import EMBEDDING, LAYER, shapes
from compress.models.folder import Model
from eval.report import QuantizedRow
from export import bitsandbytes, compressed_tensors
from export.atomic import atomic_file
from export.checkpoint import Checkpoint, check_finite, read
from export.quantized import NF4Tensor, PackedTensor, QuantizedTensor, QuantSpec
from export.safetensors import INDEX, SINGLE, join_files, read_header, write_file, write_index
from export.untrusted import read_object

SINGLE_LIMIT = 1 << 30
"""Bytes of weights up to which the shards are made one file in the end."""


class Shards:
    """The parts of a model that are quantized and on disk; each appears whole or not at all.

    Args:
      folder: where they lie, those of an earlier run included.
      model: all but its weights.
      count: of parts.
      dtype: of every float on disk.
    """

    def __init__(self, folder: Path, model: Model, count: int, dtype: str):
        self.folder, self.model, self.dtype = folder, model, dtype
        self.files = [f"model-{k + 1:05}-of-{count:05}.safetensors" for k in range(count)]
        self.facts: dict[int, dict[str, Any]] = {}
        for number, file in enumerate(self.files):
            if (folder / file).exists() and (folder / _facts_of(file)).exists():
                self.facts[number] = read_object(folder, _facts_of(file))

    def put(
        self, number: int, weights: Mapping[str, Any], error: dict[str, Any] | None, rows: Sequence[QuantizedRow]
    ) -> None:
        """Write a part, and what is known of it: its presence means that the part is done."""
        file = self.files[number]
        check_finite(Checkpoint({}, weights))
        stored: dict[str, np.ndarray] = {}
        for name, value in weights.items():
            form = bitsandbytes.stored if isinstance(value, NF4Tensor) else compressed_tensors.stored
            stored |= {part: np.asarray(array, order="C") for part, array in form(name, value, self.dtype).items()}
        packed = {name: value for name, value in weights.items() if isinstance(value, PackedTensor)}
        specs = {n: dataclasses.asdict(v.spec) if isinstance(v, QuantizedTensor) else None for n, v in packed.items()}
        size = sum(value.nbytes for value in packed.values())
        facts = {"packed": specs, "bytes": size, "error": error, "rows": [dataclasses.asdict(row) for row in rows]}
        with atomic_file(self.folder / file, force=True) as temporary:
            write_file(stored, temporary)
        with atomic_file(self.folder / _facts_of(file), force=True) as temporary:
            temporary.write_text(json.dumps(facts), encoding="utf-8")
        self.facts[number] = facts

    def replaced(self, weights: Mapping[str, Any]) -> "Shards":
        """The same parts with other weights, in a folder of their own within this one."""
        folder = self.folder / "healed"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        other = Shards(folder, self.model, len(self.files), self.dtype)
        for number, facts in sorted(self.facts.items()):
            own = {name: value for name, value in weights.items() if part_of(name, len(self.files)) == number}
            other.put(number, own, facts["error"], [QuantizedRow(**row) for row in facts["rows"]])
        return other

    @property
    def packed(self) -> dict[str, dict[str, Any] | None]:
        """The fields of each packed weight's spec; None of one in NF4."""
        return {name: spec for number in sorted(self.facts) for name, spec in self.facts[number]["packed"].items()}

    @property
    def errors(self) -> list[dict[str, Any]]:
        """What calibration measured, part by part."""
        return [facts["error"] for _, facts in sorted(self.facts.items()) if facts["error"] is not None]

    @property
    def rows(self) -> list[QuantizedRow]:
        """What became of each weight, part by part."""
        return [QuantizedRow(**row) for _, facts in sorted(self.facts.items()) for row in facts["rows"]]

    def read(self) -> Mapping[str, Any]:
        """The weights so far, read on access; none before the first packed one."""
        if not self.packed:
            return {}
        self._describe()
        return read(self.folder).weights

    def finish(self, out: Path) -> None:
        """Move the model, complete, to the empty folder `out`: as one file if it is small, else as its shards."""
        self._describe()
        if sum((self.folder / file).stat().st_size for file in self.files) <= SINGLE_LIMIT:
            join_files([self.folder / file for file in self.files], out / SINGLE)
        else:
            for file in (*self.files, INDEX):
                (self.folder / file).rename(out / file)
        for file in ("config.json", *self.model.files):
            (self.folder / file).rename(out / file)

    def _describe(self) -> None:
        """Make the folder, as far as it is, one that can be read: index and config.json."""
        found = {self.files[number]: read_header(self.folder / self.files[number]) for number in sorted(self.facts)}
        places = {name: file for file, entries in found.items() for name in entries}
        total = sum(entry.end - entry.begin for entries in found.values() for entry in entries.values())
        write_index(self.folder, places, total)
        outline = {name: jax.ShapeDtypeStruct(shape, self.dtype) for name, shape in shapes(self.model.config).items()}
        checkpoint = Checkpoint(self.model.hf, outline, self.model.files)
        specs = {name: QuantSpec(**spec) for name, spec in self.packed.items() if spec is not None}
        if specs:
            compressed_tensors.write_description(checkpoint, self.folder, self.dtype, specs)
        else:
            bitsandbytes.write_description(checkpoint, self.folder, self.dtype, list(self.packed))


def part_of(name: str, count: int) -> int:
    """The part that a tensor belongs to: 0 is the embedding, 1 + k layer k, and the last all that comes after them."""
    match = LAYER.fullmatch(name)
    if match is not None:
        return 1 + int(match[1])
    return 0 if name == EMBEDDING else count - 1


def _facts_of(file: str) -> str:
    return f"{file}.json"
