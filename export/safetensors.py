"""Float checkpoints as Hugging Face folders: config.json and one file of safetensors, or shards with an index."""

import contextlib
import dataclasses
import json
import mmap
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from export.checkpoint import (
    DTYPES,
    PICKLES,
    Checkpoint,
    LazyWeights,
    quantization_config,
    read_files,
    to_numpy,
    write_config,
)
from export.errors import ArtifactError
from export.untrusted import check_regular, locate, parse_object, read_object

HEADER_LIMIT = 100_000_000  # the format's own
RANK_LIMIT = 8
SIZE_LIMIT = 1 << 62  # of an array, were its empty dimensions not empty
SHARD_LIMIT = 5_000_000_000
COPIED = 1 << 20  # bytes at a time
METADATA = {"format": "pt"}  # transformers wants to be told so
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

TYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where a tensor lies: bytes `begin` to `end` of its file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def read(path: str | os.PathLike) -> Checkpoint:
    """Read a float folder; an access to a tensor maps its part of the file, without copying.

    Raises:
      ArtifactError: config.json, the index or a file is broken, or the checkpoint is quantized.
    """
    folder = Path(path)
    config = read_object(folder, "config.json")
    quantized = quantization_config(config)
    if quantized:
        raise ArtifactError(f"{folder}/config.json: quantized ({quantized}); this reader takes float weights")
    return Checkpoint(config, read_tensors(folder), read_files(folder))


def write(
    checkpoint: Checkpoint, path: str | os.PathLike, *, dtype: str = "bfloat16", shard_limit: int = SHARD_LIMIT
) -> None:
    """Write a float folder; quantized weights are dequantized.

    Args:
      checkpoint: what to write.
      path: a folder, empty or not there yet.
      dtype: "bfloat16", "float16" or "float32", of every float tensor.
      shard_limit: bytes of a file, beyond which shards and an index are written; one shard at a time is in memory.

    Raises:
      ArtifactError: an unknown dtype, or a value that float16 cannot hold.
    """
    folder = Path(path)
    if dtype not in DTYPES:
        raise ArtifactError(f"dtype = {dtype!r}: one of {', '.join(DTYPES)}")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = ((name, to_numpy(name, checkpoint.weights[name], dtype)) for name in checkpoint.weights)
    write_tensors(folder, tensors, shard_limit)
    write_config(checkpoint, folder, dtype)


def read_tensors(folder: Path) -> LazyWeights:
    """The tensors of a folder's one file, or of the shards that its index names, as read-only arrays on access.

    Raises:
      ArtifactError: no weights; pickles only; a broken or missing file; tensors that the index names and its file
        lacks, or that two shards hold: all of them in one message.
    """
    if os.path.lexists(folder / SINGLE):
        shards = {SINGLE: read_header(locate(folder, SINGLE))}
    elif os.path.lexists(folder / INDEX):
        shards = _read_shards(folder)
    else:
        raise ArtifactError(_no_weights(folder))
    return _lazy({folder / file: entries for file, entries in shards.items()})


def read_file(folder: Path, name: str) -> LazyWeights:
    """The tensors of one file, as read-only arrays on access."""
    path = locate(folder, name)
    return _lazy({path: read_header(path)})


def _lazy(files: Mapping[Path, Mapping[str, Entry]]) -> LazyWeights:
    loaders: dict[str, Callable[[], np.ndarray]] = {}
    for path, entries in files.items():
        loaders |= {name: partial(_view, path, entry) for name, entry in entries.items()}
    return LazyWeights(loaders)


def _no_weights(folder: Path) -> str:
    pickles = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(PICKLES))
    if pickles:
        return f"{folder}: {pickles[0]} is a pickle, which is never opened; convert it to safetensors"
    return f"{folder}: neither {SINGLE} nor {INDEX}"


def _read_shards(folder: Path) -> dict[str, dict[str, Entry]]:
    where = folder / INDEX
    places = read_object(folder, INDEX).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(file, str) for file in places.values()):
        raise ArtifactError(f"{where}: weight_map must give a file name for each tensor")
    files = {file: locate(folder, file) for file in sorted(set(places.values()))}
    wrong = [file for file in files if not file.endswith(".safetensors")]
    if wrong:
        raise ArtifactError(f"{where}: {', '.join(wrong)}: only .safetensors files are opened")
    absent = [file for file, path in files.items() if not path.is_file()]
    if absent:
        raise ArtifactError(f"{where}: {', '.join(absent)} missing; fetch the checkpoint again")
    shards = {file: read_header(path) for file, path in files.items()}
    holders: dict[str, list[str]] = {}
    for file, entries in shards.items():
        for name in entries:
            holders.setdefault(name, []).append(file)
    problems = [f"{name} missing from {file}" for name, file in places.items() if name not in shards[file]]
    problems += [f"{name} doubled in {' and '.join(held)}" for name, held in holders.items() if len(held) > 1]
    if problems:
        raise ArtifactError(f"{where}: {'; '.join(problems)}")
    return shards


def read_header(path: Path) -> dict[str, Entry]:
    """Parse a file's header, every bound checked before anything is allocated by it.

    Raises:
      ArtifactError: truncated, malformed, an unknown dtype, bytes that don't match the shape, or tensors that overlap,
        leave holes, or lie outside the file.
    """
    check_regular(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > size - 8:
                raise ArtifactError(f"{path}: truncated, or no safetensors: {size} bytes, a header of {length}")
            if length > HEADER_LIMIT:
                raise ArtifactError(f"{path}: a header of {length} bytes; at most {HEADER_LIMIT} are read")
            text = file.read(length)
    except FileNotFoundError as error:
        raise ArtifactError(f"{path}: no such file") from error
    header = parse_object(text, f"{path}: header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ArtifactError(f"{path}: __metadata__ must map names to strings")
    start = 8 + length
    entries = {name: _parse_entry(value, start, f"{path}: {shown(name)}") for name, value in header.items()}
    _check_layout(path, entries, start, size)
    return entries


def shown(name: str) -> str:
    """A stranger's name for a tensor, on one line."""
    return name if name.isprintable() else ascii(name)


def _parse_entry(value: object, start: int, where: str) -> Entry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise ArtifactError(f"{where}: must have exactly dtype, shape and data_offsets")
    kind, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(kind, str) or kind not in TYPES:
        raise ArtifactError(f"{where}: dtype {str(kind)[:40]!r} is not one of {', '.join(TYPES)}")
    if not _are_sizes(shape) or len(shape) > RANK_LIMIT:
        raise ArtifactError(f"{where}: shape must be at most {RANK_LIMIT} integers, none negative")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ArtifactError(f"{where}: data_offsets must be [begin, end]")
    dtype, (begin, end) = np.dtype(TYPES[kind]), offsets
    if prod(max(size, 1) for size in shape) * dtype.itemsize >= SIZE_LIMIT:
        raise ArtifactError(f"{where}: shape {shape} is larger than any array can be")
    if prod(shape) * dtype.itemsize != end - begin:
        raise ArtifactError(f"{where}: {end - begin} bytes, but {kind} {shape} takes {prod(shape) * dtype.itemsize}")
    return Entry(dtype, tuple(shape), start + begin, start + end)


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 1 << 63 for size in value)


def _check_layout(path: Path, entries: Mapping[str, Entry], start: int, size: int) -> None:
    place, before = start, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.end > size:
            raise ArtifactError(f"{path}: truncated: {shown(name)} ends at byte {entry.end} of {size}; fetch it again")
        if entry.begin != place:
            how = "overlap" if entry.begin < place else "leave a hole"
            raise ArtifactError(f"{path}: {shown(before)} and {shown(name)} {how} at byte {entry.begin}")
        place, before = entry.end, name
    if place != size:
        raise ArtifactError(f"{path}: {size - place} bytes follow {shown(before)}, which belong to no tensor")


def _view(path: Path, entry: Entry) -> np.ndarray:
    count = prod(entry.shape)
    if not count:
        return np.zeros(entry.shape, entry.dtype)
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size < entry.end:
            raise ArtifactError(f"{path}: became shorter while it was read")
        # A map must begin on a page; the array keeps it open.
        page = entry.begin - entry.begin % mmap.ALLOCATIONGRANULARITY
        view = mmap.mmap(file.fileno(), entry.end - page, access=mmap.ACCESS_READ, offset=page)
    array = np.frombuffer(view, entry.dtype, count, entry.begin - page).reshape(entry.shape)
    return array if array.flags.aligned else array.copy()


def write_tensors(folder: Path, tensors: Iterable[tuple[str, np.ndarray]], shard_limit: int = SHARD_LIMIT) -> None:
    """Write tensors as they come, into one file or into shards with an index."""
    places: dict[str, int] = {}
    shard: dict[str, np.ndarray] = {}
    filled = total = count = 0
    for name, array in tensors:
        if shard and filled + array.nbytes > shard_limit:
            write_file(shard, folder / f"{count}.part")
            shard, filled, count = {}, 0, count + 1
        shard[name] = np.asarray(array, order="C")
        places[name] = count
        filled += array.nbytes
        total += array.nbytes
    write_file(shard, folder / f"{count}.part")
    if count == 0:
        (folder / "0.part").rename(folder / SINGLE)
        return
    files = [f"model-{k + 1:05}-of-{count + 1:05}.safetensors" for k in range(count + 1)]
    for k, file in enumerate(files):
        (folder / f"{k}.part").rename(folder / file)
    write_index(folder, {name: files[k] for name, k in places.items()}, total)


def write_index(folder: Path, places: Mapping[str, str], total: int) -> None:
    """Write the index: the file of each tensor by name, and the bytes of all of them."""
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def join_files(paths: Sequence[Path], path: Path) -> None:
    """Make one file of several, tensor by tensor, so that memory holds none of them; of those none is twice there."""
    found = [(source, name, entry) for source in paths for name, entry in read_header(source).items()]
    found.sort(key=lambda item: (-item[2].dtype.itemsize, item[1]))  # so that each begins at a multiple of its size
    header: dict[str, Any] = {"__metadata__": METADATA}
    place = 0
    for _, name, entry in found:
        end = place + entry.end - entry.begin
        kind = next(kind for kind, dtype in TYPES.items() if entry.dtype == dtype)
        header[name] = {"dtype": kind, "shape": entry.shape, "data_offsets": (place, end)}
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out, contextlib.ExitStack() as stack:
        out.write(len(text).to_bytes(8, "little") + text)
        files = {source: stack.enter_context(source.open("rb")) for source in paths}
        for source, _, entry in found:
            files[source].seek(entry.begin)
            for at in range(entry.begin, entry.end, COPIED):
                out.write(files[source].read(min(COPIED, entry.end - at)))


def write_file(tensors: Mapping[str, np.ndarray], path: Path) -> None:
    """Write one file.

    Raises:
      OSError: what the system said; a full disk (ENOSPC) among others.
    """
    try:
        save_file(dict(tensors), path, metadata=METADATA)
    except SafetensorError as error:
        said = re.search(r"os error (\d+)", str(error))  # the library wraps it, and a caller must tell a full disk
        if not said:
            raise
        number = int(said[1])
        raise OSError(number, os.strerror(number), str(path)) from error
    path.chmod(path.parent.stat().st_mode & 0o666)  # the library lets nobody but the owner read it
