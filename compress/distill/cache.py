"""What a teacher says of a data set, on disk: its distribution at every target, found by the target's example.

An example is one segment of a packed row. Attention stays within it and positions start anew in it, so what the teacher
says of it is the same however rows are shuffled, packed and batched. A cache is a folder:

    identity.json           what it was made from
    00000.safetensors, …    of N examples with R targets: keys uint8 [N, 16], counts int32 [N] of targets,
                            log_probs float16 [R, W], ids uint16 or uint32 [R, K]
    manifest.json           sizes and hashes of them all

The log-probabilities are those of all tokens, and then there are no ids; or those of the K likeliest at a temperature,
and in the last column that of all others together.

Letters: B rows, T tokens of a row, R targets, V vocabulary, K likeliest tokens, W columns: V, or K + 1.
"""

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Float16, UInt

from compress.data.batch import Batch
from compress.data.rows import Rows
from compress.distill.settings import CacheTeacher, Distill
from compress.distill.temperature import Tempered
from compress.errors import DataError, RecipeError
from compress.record import IDENTITY, hash_of
from compress.settings import Common
from compress.tokenizer import Tokenizer
from compress.train.fit import Resumable
from export.errors import ArtifactError
from export.manifest import MANIFEST, verify_files
from export.safetensors import read_file
from export.untrusted import read_object

KEY_BYTES = 16
LOWEST = float(np.finfo(np.float16).min)  # stands for the logarithm of zero
ANEW = "make the cache anew with compress cache-teacher"


class Cached(NamedTuple):
    """A batch and what the teacher says of it: at [b, t], where the mask is set, its distribution of token t."""

    batch: Batch | Tempered
    log_probs: Float16[Array | np.ndarray, "B T W"]
    ids: UInt[Array | np.ndarray, "B T K"] | None


def key_of(tokens: np.ndarray, mask: np.ndarray) -> bytes:
    """What an example is found by: a hash of its tokens and of which of them are targets."""
    content = tokens.astype("<i4").tobytes() + np.packbits(mask > 0).tobytes()
    return hashlib.blake2b(content, digest_size=KEY_BYTES).digest()


def segments_of(batch: Batch) -> Iterator[tuple[bytes, int, np.ndarray]]:
    """Of each segment with targets: its key, its row, and where in the row its targets stand."""
    tokens, segments, masks = (np.asarray(array) for array in (batch.tokens, batch.segments, batch.mask))
    for row, owners in enumerate(segments):
        for segment in range(1, int(owners.max(initial=0)) + 1):
            here = np.flatnonzero(owners == segment)
            mask = masks[row, here] > 0
            if mask.any():
                yield key_of(tokens[row, here], mask), row, here[mask]


def identity(
    settings: Distill | CacheTeacher, common: Common, tokenizer: Tokenizer, rows: Rows, valid: Rows
) -> dict[str, Any]:
    """What decides which examples there are, and what the teacher says of them."""
    assert settings.teacher is not None
    return {
        "teacher": hash_of(Path(settings.teacher)),
        "tokenizer": tokenizer.fingerprint,
        "data": rows.sha256,
        "valid": valid.sha256,
        "columns": dict(common.data.columns),
        "sequence_length": settings.sequence_length,
    }


class TeacherCache:
    """A cache that is complete and unchanged, its shards mapped into memory.

    Attributes:
      identity: what it was made from, and how.
      top_k: K; 0 where there are all tokens.
      temperature: of the K tokens' distributions; None where there are all tokens.

    Raises:
      ArtifactError: it is not finished, or a file is missing, changed, truncated or not what it must be.
    """

    def __init__(self, folder: Path):
        if not (folder / MANIFEST).is_file():
            raise ArtifactError(f"{folder}: no finished cache of a teacher; make one with compress cache-teacher")
        problems = verify_files(folder)
        if problems:
            raise ArtifactError(f"{folder}: {'; '.join(problems[:8])}; {ANEW}")
        self.folder, self.identity = folder, read_object(folder, IDENTITY)
        self.top_k, self.width = widths(folder, self.identity)
        self.temperature = temperature_of(folder, self.identity) if self.top_k else None
        self._shards: list[tuple[np.ndarray, np.ndarray | None]] = []
        self._places: dict[bytes, tuple[int, int, int]] = {}  # shard, and its first target and the one past the last
        for path in sorted(folder.glob("*.safetensors")):
            self._open(path)
        if not self._shards:
            raise ArtifactError(f"{folder}: no shards; {ANEW}")

    def _open(self, path: Path) -> None:
        tensors = read_file(self.folder, path.name)
        wanted = {"keys": ("u", 2), "counts": ("i", 1), "log_probs": ("f", 2)} | (
            {"ids": ("u", 2)} if self.top_k else {}
        )
        found = {name: (array.dtype.kind, array.ndim) for name, array in tensors.items()}
        if found != wanted:
            raise ArtifactError(f"{path}: not a shard of a cache with top_k = {self.top_k}; {ANEW}")
        keys, counts, log_probs = tensors["keys"], tensors["counts"], tensors["log_probs"]
        ids = tensors["ids"] if self.top_k else None
        ends = np.cumsum(counts, dtype=np.int64)
        fits = keys.shape == (len(counts), KEY_BYTES) and len(counts) > 0 and counts.min() > 0
        fits = fits and log_probs.shape == (ends[-1], self.width)
        if not fits or (ids is not None and ids.shape != (ends[-1], self.top_k)):
            raise ArtifactError(f"{path}: its tensors do not fit each other; {ANEW}")
        for key, end, count in zip(keys, ends.tolist(), counts.tolist(), strict=True):
            self._places[key.tobytes()] = len(self._shards), end - count, end
        self._shards.append((log_probs, ids))

    def require(self, wanted: dict[str, Any], settings: Distill) -> None:
        """Refuse a cache of something else than what is to be trained on.

        Raises:
          RecipeError: with all that differs.
        """
        differs = {name: self.identity.get(name) for name, value in wanted.items() if self.identity.get(name) != value}
        if differs:
            said = [f"{name} ({_short(found)} there, {_short(wanted[name])} here)" for name, found in differs.items()]
            raise RecipeError(f"{self.folder}: what it was made from differs: {', '.join(said)}; {ANEW}")
        check_temperatures(self.folder, self.top_k, self.temperature, settings)

    def attach(self, item: Batch | Tempered) -> Cached:
        """A batch with what the teacher says of it.

        Raises:
          DataError: an example is not in the cache.
          ArtifactError: what is there is not finite.
        """
        batch = item.batch if isinstance(item, Tempered) else item
        log_probs = np.zeros((*batch.tokens.shape, self.width), np.float16)
        kept = self._shards[0][1]
        ids = None if kept is None else np.zeros((*batch.tokens.shape, self.top_k), kept.dtype)
        for key, row, targets in segments_of(batch):
            if key not in self._places:
                begin = np.asarray(batch.tokens)[row, : targets[0] + 1][-8:].tolist()
                raise DataError(
                    f"{self.folder}: nothing of an example whose first target ends the tokens {begin}; {ANEW}"
                )
            shard, start, end = self._places[key]
            values, names = self._shards[shard]
            log_probs[row, targets] = values[start:end]
            if ids is not None and names is not None:
                ids[row, targets] = names[start:end]
        if not np.isfinite(log_probs).all():
            raise ArtifactError(f"{self.folder}: NaN or Inf among the log-probabilities; {ANEW}")
        return Cached(item, log_probs, ids)


class CachedBatches:
    """Batches with what the teacher says of them; resumable as `batches` are."""

    def __init__(self, batches: Resumable, cache: TeacherCache):
        """Take both."""
        self.batches, self.stream, self.cache = batches, iter(batches), cache

    def __iter__(self) -> Iterator[Cached]:
        return self

    def __next__(self) -> Cached:
        return self.cache.attach(next(self.stream))

    def state(self) -> dict[str, Any]:
        """Where the next batch comes from, as JSON."""
        return self.batches.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `state`."""
        self.batches.restore(state)


def widths(folder: Path, identity: dict[str, Any]) -> tuple[int, int]:
    """K, or 0, and W of a cache.

    Raises:
      ArtifactError: its identity does not say.
    """
    top_k, vocabulary = identity.get("top_k"), identity.get("vocabulary")
    if type(top_k) is not int or type(vocabulary) is not int or not 0 <= top_k <= vocabulary:
        raise ArtifactError(f"{folder / IDENTITY}: top_k and vocabulary must be sizes; {ANEW}")
    return top_k, top_k + 1 if top_k else vocabulary


def temperature_of(folder: Path, identity: dict[str, Any]) -> float:
    """The temperature of a cache of the likeliest tokens.

    Raises:
      ArtifactError: its identity does not say.
    """
    found = identity.get("temperature")
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < math.inf:
        raise ArtifactError(f"{folder / IDENTITY}: temperature must be a number above 0; {ANEW}")
    return float(found)


def check_top_k(top_k: int, vocabulary: int) -> None:
    """Refuse to keep more tokens than there are.

    Raises:
      RecipeError: saying how many there are.
    """
    if top_k > vocabulary:
        raise RecipeError(f"top_k = {top_k}: the teacher has {vocabulary} tokens; --top-k 0 keeps all")


def check_temperatures(folder: Path | None, top_k: int, at: float | None, settings: Distill) -> None:
    """Refuse to train at another temperature than that of a cache of the likeliest tokens.

    Raises:
      RecipeError: saying at which it is.
    """
    if top_k and {settings.temperature, settings.temperature_end} - {None, at}:
        raise RecipeError(
            f"{folder}: the {top_k} likeliest tokens at temperature {at}, and what is left out has no other; train "
            f"with --temperature {at} and no other at the end, or cache all tokens with --top-k 0"
        )


def bytes_per_target(top_k: int, vocabulary: int) -> int:
    """Of log-probabilities and ids."""
    return 2 * (top_k + 1) + id_type(vocabulary).itemsize * top_k if top_k else 2 * vocabulary


def id_type(vocabulary: int) -> np.dtype:
    """The smallest dtype that ids are kept in."""
    return np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)


def _short(value: Any) -> str:
    """A value in a message; a hash by its first digits."""
    return value[:8] if isinstance(value, str) else str(value)
