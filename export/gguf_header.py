"""The header of a GGUF file, parsed as what it is: bytes from a stranger.

Every count, length and offset is checked against the bytes that are there before anything of that size is made.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import dataclasses
import math
import mmap
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from export.errors import ArtifactError
from export.untrusted import check_regular

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
DIMENSIONS = 4
NAME_LENGTH = 64
LARGEST_DIMENSION = 1 << 40


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: its shape in NumPy's order (out, in), its block type, its bytes from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    start: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Header:
    """What stands before the tensors: keys and values, and where the tensors lie.

    Attributes:
      path: the file, for messages.
      fields: scalars as Python values, arrays of numbers as NumPy, arrays of strings as lists.
      tensors: by GGUF name.
      data: the whole file, mapped.
    """

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data: mmap.mmap

    def integer(self, key: str, default: int | None = None, *, low: int = 0, high: int = 2**31 - 1) -> int:
        """An integer key within bounds; `default` where the key is absent."""
        value = self.fields.get(key, default)
        if value is None:
            raise ArtifactError(f"{self.path}: no key {key}")
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ArtifactError(f"{self.path}: {key} = {_brief(value)}: must be an integer from {low} to {high}")
        return value

    def number(self, key: str, default: int | float | None = None) -> float:
        """A finite number, of a float32 the shortest decimal that rounds to it (1e-05, not 9.999999747378752e-06)."""
        value = self.fields.get(key, default)
        if value is None:
            raise ArtifactError(f"{self.path}: no key {key}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ArtifactError(f"{self.path}: {key} = {_brief(value)}: must be a finite number")
        short = float(str(np.float32(value))) if abs(value) < 1e30 else float(value)
        return short if np.float32(short) == value else float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A string key."""
        value = self.fields.get(key, default)
        if not isinstance(value, str):
            raise ArtifactError(f"{self.path}: " + (f"no key {key}" if value is None else f"{key} is not a string"))
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A boolean key."""
        value = self.fields.get(key, default)
        if not isinstance(value, bool):
            raise ArtifactError(f"{self.path}: {key} = {_brief(value)}: must be a boolean")
        return value

    def texts(self, key: str) -> list[str]:
        """An array of strings; empty where the key is absent."""
        value = self.fields.get(key, [])
        if not isinstance(value, list):
            raise ArtifactError(f"{self.path}: {key} is not an array of strings")
        return value

    def numbers(self, key: str, length: int, default: int | float) -> np.ndarray:
        """An array of `length` finite numbers; `default` everywhere where the key is absent."""
        value = self.fields.get(key)
        if value is None:
            return np.full(length, default)
        if not isinstance(value, np.ndarray) or len(value) != length or not np.isfinite(value).all():
            raise ArtifactError(f"{self.path}: {key} is not an array of {length} finite numbers")
        return value


def parse(path: str | os.PathLike) -> Header:
    """Read the header and map the file.

    Raises:
      ArtifactError: the file is missing, truncated, of another version, in parts, or inconsistent.
    """
    path = Path(path)
    check_regular(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24:
                raise ArtifactError(f"{path}: {size} bytes are too few for a GGUF file; fetch it anew")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror or error})") from error
    return _Cursor(path, data).header()


class _Cursor:
    """A position in the mapped file; every step is bounded by the file's end."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self.data, self.at, self.end = path, data, 0, len(data)

    def fail(self, what: str) -> ArtifactError:
        return ArtifactError(f"{self.path}: {what}; the file is damaged, fetch or make it anew")

    def header(self) -> Header:
        if self.data[:4] != MAGIC:
            raise ArtifactError(f"{self.path}: not a GGUF file (it begins with {self.data[:4]!r})")
        self.at = 4
        version = self.scalar("I")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            kind = "a big-endian file" if swapped else f"GGUF version {version}"
            raise ArtifactError(f"{self.path}: {kind}; versions 2 and 3, little-endian, can be read")
        tensors, keys = self.count("Q", 24, "tensors"), self.count("Q", 13, "keys")
        fields: dict[str, Any] = {}
        for _ in range(keys):
            key = self.string("a key", 65535)
            if key in fields or not key.isprintable():
                what = "stands there twice" if key in fields else "is not a name"
                raise self.fail(f"key {_brief(key)} {what}")
            fields[key] = self.value(key)
        parts = fields.get("split.count", 0)
        if isinstance(parts, int) and parts > 1:
            raise ArtifactError(f"{self.path}: one part of a split model; join the parts with llama-gguf-split --merge")
        infos = [self.tensor() for _ in range(tensors)]
        return Header(self.path, fields, self.place(infos, self.alignment(fields)), self.data)

    def scalar(self, kind: str) -> Any:
        size = struct.calcsize("<" + kind)
        if self.end - self.at < size:
            raise self.fail(f"it ends within its header, at byte {self.end}")
        (value,) = struct.unpack_from("<" + kind, self.data, self.at)
        self.at += size
        return value

    def count(self, kind: str, least: int, what: str) -> int:
        """A number of things of `least` bytes each, which the rest of the file can hold."""
        number = self.scalar(kind)
        if number * least > self.end - self.at:
            raise self.fail(f"{number} {what} do not fit in its {self.end} bytes")
        return number

    def string(self, what: str, longest: int | None = None) -> str:
        length = self.count("Q", 1, f"bytes of {_brief(what)}")
        if longest is not None and length > longest:
            raise self.fail(f"{what} of {length} bytes")
        raw = self.data[self.at : self.at + length]
        self.at += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{_brief(what)} is not UTF-8 ({raw[:40]!r})") from error

    def value(self, key: str) -> Any:
        kind = self.scalar("I")
        if kind == STRING:
            return self.string(key)
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        if kind != ARRAY:
            raise self.fail(f"{_brief(key)} has the unknown type {kind}")
        kind = self.scalar("I")
        if kind == STRING:
            return [self.string(key) for _ in range(self.count("Q", 8, f"strings of {_brief(key)}"))]
        if kind not in SCALARS:
            raise self.fail(f"{_brief(key)} is an array of the unknown type {kind}")
        dtype = np.dtype("<" + SCALARS[kind] if kind != 7 else "?")
        length = self.count("Q", dtype.itemsize, f"elements of {_brief(key)}")
        array = np.frombuffer(self.data, np.uint8 if kind == 7 else dtype, length, self.at).copy()
        self.at += length * dtype.itemsize
        return array != 0 if kind == 7 else array

    def alignment(self, fields: dict[str, Any]) -> int:
        alignment = fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 8 or alignment > 1 << 20 or alignment & (alignment - 1):
            raise self.fail(f"general.alignment = {_brief(alignment)}: must be a power of 2 from 8")
        return alignment

    def tensor(self) -> TensorInfo:
        """A tensor's description, its offset still counted from the start of the data."""
        name = self.string("a tensor's name", NAME_LENGTH)
        if not name.isprintable():
            raise self.fail(f"{name!r} is not a tensor's name")
        rank = self.scalar("I")
        if not 1 <= rank <= DIMENSIONS:
            raise self.fail(f"{_brief(name)} has {rank} dimensions")
        shape = tuple(self.scalar("Q") for _ in range(rank))[::-1]
        if not all(1 <= size <= LARGEST_DIMENSION for size in shape):
            raise self.fail(f"{_brief(name)} has the shape {shape}")
        number, offset = self.scalar("I"), self.scalar("Q")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError as error:
            raise ArtifactError(f"{self.path}: {_brief(name)} is of the unknown type {number}") from error
        block, size = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise self.fail(f"{_brief(name)}: rows of {shape[-1]} are not whole blocks of {block} ({kind.name})")
        return TensorInfo(name, shape, kind, offset, math.prod(shape) // block * size)

    def place(self, infos: list[TensorInfo], alignment: int) -> dict[str, TensorInfo]:
        """Count offsets from the file's start; refuse tensors outside the file or on top of one another."""
        base = -(-self.at // alignment) * alignment
        found: dict[str, TensorInfo] = {}
        end, last = base, "the header"
        for info in sorted(infos, key=lambda info: info.start):
            start = base + info.start
            if info.start % alignment:
                raise self.fail(f"{_brief(info.name)} lies at offset {info.start}, not a multiple of {alignment}")
            if start < end:
                raise self.fail(f"{_brief(info.name)} overlaps {_brief(last)}")
            end, last = start + info.nbytes, info.name
            if end > self.end:
                raise ArtifactError(
                    f"{self.path}: truncated: {_brief(info.name)} ends at byte {end} of {self.end}; fetch it anew"
                )
            if info.name in found:
                raise self.fail(f"tensor {_brief(info.name)} stands there twice")
            found[info.name] = dataclasses.replace(info, start=start)
        return found


def _brief(value: Any) -> str:
    value = value[:4] if isinstance(value, list) else value
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
