"""`compress cache-teacher`: the teacher reads every example once, and what it says of it is kept (see `cache`).

A group of examples is a shard. Shards are written one by one into a folder beside the output, each whole or not at all,
and which examples are in which shard follows from the settings and the data; so a run that was killed goes on with the
first shard that is missing, and ends with the same bytes as one that was not.

Letters: B rows, T tokens of a row, D model, K likeliest tokens, W columns (see `cache`).
"""

import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from compress.data.batch import Batch
from compress.data.batches import Batches
from compress.data.examples import Example
from compress.data.pack import batch_of, pack
from compress.data.rows import keep_quarantine
from compress.data.split import training_and_held_out
from compress.distill.buckets import kept
from compress.distill.cache import bytes_per_target, check_top_k, id_type, identity, key_of, segments_of
from compress.distill.foreign import ForeignRows
from compress.distill.settings import CacheTeacher
from compress.errors import RecipeError
from compress.models.config import DecoderConfig
from compress.models.decoder import Stacked, head, hidden_states, project, stack
from compress.models.folder import Model, load, without_weights
from compress.models.linear import dense
from compress.record import VERSION, hash_of, open_partial, write_identity
from compress.settings import Common
from compress.train.mesh import mesh_of_devices, place, place_rows
from export.atomic import atomic_file, atomic_folder
from export.errors import ArtifactError
from export.manifest import write_manifest
from export.safetensors import write_file

SHARD_BYTES = 256 << 20  # of log-probabilities and ids; an example with more has a shard of its own
CHUNK = 128  # tokens whose logits exist at once
ROWS = "rows.jsonl"  # what a cache of foreign rows is of

E = TypeVar("E", bound=Example)
Group = dict[bytes, Example]


def run(settings: CacheTeacher, common: Common) -> dict[str, Any]:
    """Write the cache, or go on with one that was interrupted.

    Raises:
      RecipeError, DataError, ArtifactError: settings, data or a teacher that will not do.
    """
    assert common.out is not None and settings.teacher is not None
    if settings.logits is not None:
        return from_logits(settings, common)
    if not settings.data:
        raise RecipeError("--data is missing: text for the teacher to read; or --logits, of one that has read it")
    teacher = load(settings.teacher).merged().dequantized()
    vocabulary = teacher.config.vocab_size
    most = targets_of_a_shard(settings.top_k, vocabulary)
    rows, valid = training_and_held_out(
        settings.data, settings.valid, columns=common.data.columns, bad_rows=common.data.bad_rows
    )
    made_from = identity(settings, common, teacher.tokenizer, rows, valid) | {
        "top_k": settings.top_k,
        "temperature": settings.temperature if settings.top_k else None,
        "vocabulary": vocabulary,
        "computed_in": common.dtype,
        "version": VERSION,
    }
    sources = [Batches(source, teacher.tokenizer, size=1, length=settings.sequence_length) for source in (rows, valid)]
    groups = lambda: grouped(chain.from_iterable(source.examples() for source in sources), most)  # noqa: E731
    size = settings.per_device_batch * jax.device_count()
    cut = partial(batches_of, size=size, length=settings.sequence_length, pad_id=teacher.tokenizer.pad_id or 0)

    folder = open_partial(common, "cache-teacher", made_from)
    shards, examples, targets, left = 0, 0, 0, 0
    for shards, group in enumerate(groups(), 1):
        examples += len(group)
        targets += sum(int(sample.mask.sum()) for sample in group.values())
        left += 0 if shard(folder, shards - 1).exists() else sum(1 for _ in cut(group))
    say, done = teller(teacher, settings, common), 0
    for number, group in enumerate(groups()):
        if shard(folder, number).exists():
            continue
        said: dict[bytes, tuple[np.ndarray, ...]] = {}
        for batch in cut(group):
            said |= collect(batch, *say(batch), settings.teacher)
            done += 1
            common.progress("cache-teacher", done, left)
        with atomic_file(shard(folder, number)) as temporary:
            write_file(arrays_of(said, list(group), id_type(vocabulary)), temporary)
    skipped = keep_quarantine(folder, rows, valid)
    facts = sealed(folder, examples, targets)
    with atomic_folder(common.out, common.force) as out:
        folder.rename(out)
    return {"out": str(common.out), "shards": shards, **facts, "rows": rows.quarantine.counts(), **skipped}


def from_logits(settings: CacheTeacher, common: Common) -> dict[str, Any]:
    """Write the cache of what has been said elsewhere, and beside it the rows, to train on.

    Raises:
      DataError, ArtifactError: rows that will not do (`foreign`).
    """
    assert common.out is not None and settings.teacher is not None and settings.logits is not None
    model = without_weights(settings.teacher)
    vocabulary = model.config.vocab_size
    source = ForeignRows(
        settings.logits,
        model,
        length=settings.sequence_length,
        top_k=settings.top_k,
        temperature=settings.temperature,
    )
    ids, most = id_type(vocabulary), targets_of_a_shard(source.top_k, vocabulary)
    shards, examples, targets = 0, 0, 0
    with atomic_folder(common.out, common.force) as folder:
        with (folder / ROWS).open("w", encoding="utf-8") as data:
            for shards, group in enumerate(grouped(source, most), 1):
                said = {key: sample.said for key, sample in group.items()}
                write_file(arrays_of(said, list(group), ids), shard(folder, shards - 1))
                for sample in group.values():
                    row = {"tokens": sample.tokens.tolist(), "mask": sample.mask.astype(int).tolist()}
                    data.write(json.dumps(row) + "\n")
                    targets += int(sample.mask.sum())
                examples += len(group)
        rows, valid = training_and_held_out([folder / ROWS], ())
        made_from = identity(settings, common, model.tokenizer, rows, valid) | {
            "top_k": source.top_k,
            "temperature": source.temperature,
            "vocabulary": vocabulary,
            "logits": hash_of(settings.logits),
            "version": VERSION,
        }
        write_identity(folder, made_from)
        facts = sealed(folder, examples, targets)
    return {"out": str(common.out), "data": str(common.out / ROWS), "shards": shards, **facts}


def targets_of_a_shard(top_k: int, vocabulary: int) -> int:
    """How many fit in `SHARD_BYTES`.

    Raises:
      RecipeError: so many tokens are not there to be kept.
    """
    check_top_k(top_k, vocabulary)
    return SHARD_BYTES // bytes_per_target(top_k, vocabulary)


def sealed(folder: Path, examples: int, targets: int) -> dict[str, Any]:
    """Write the manifest of a cache that is complete; what it says of its size."""
    written = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    facts = {"examples": examples, "tokens": targets, "bytes": written, "bits_per_token": 8 * written / targets}
    write_manifest(folder, facts)
    return facts


def shard(folder: Path, number: int) -> Path:
    """The file of a group."""
    return folder / f"{number:05}.safetensors"


def grouped(examples: Iterable[E], most: int) -> Iterator[dict[bytes, E]]:
    """The examples that have targets, each once, in order, by key; in groups of at most `most` targets, or of one."""
    seen: set[bytes] = set()
    group: dict[bytes, E] = {}
    held = 0
    for sample in examples:
        key, targets = key_of(sample.tokens, sample.mask), int(sample.mask.sum())
        if key in seen or not targets:
            continue
        if group and held + targets > most:
            yield group
            group, held = {}, 0
        seen.add(key)
        group[key] = sample
        held += targets
    if group:
        yield group


def batches_of(group: Group, *, size: int, length: int, pad_id: int) -> Iterator[Batch]:
    """A group, packed."""
    samples = list(group.values())
    rows = [[samples[i] for i in row] for row in pack([len(sample) for sample in samples], length)]
    for at in range(0, len(rows), size):
        yield batch_of(rows[at : at + size], size, length, pad_id)


def teller(
    teacher: Model, settings: CacheTeacher, common: Common
) -> Callable[[Batch], tuple[np.ndarray, np.ndarray | None]]:
    """A function of a batch: log-probabilities float16 [B, T, W], at t those of token t + 1, and ids [B, T, K]."""
    mesh, dtype = mesh_of_devices(common.mesh), jnp.dtype(common.dtype)
    say = saying(teacher.config, settings)
    stacked = place(mesh, jax.tree.map(lambda leaf: leaf.astype(dtype), stack(teacher.config, teacher.weights)))

    def run(batch: Batch) -> tuple[np.ndarray, np.ndarray | None]:
        found = say(stacked, place_rows(mesh, batch))
        return jax.tree.map(lambda leaf: np.moveaxis(np.asarray(leaf), 0, 1), found)

    return run


def saying(config: DecoderConfig, settings: CacheTeacher) -> Callable[[Stacked, Batch], tuple[Array, Array | None]]:
    """The program of `teller`, of weights and a batch, jitted; time is the first axis of what it returns."""
    k = settings.top_k

    @jax.jit
    def say(stacked: Stacked, batch: Batch):
        hidden = hidden_states(config, stacked, batch.tokens, positions=batch.positions, segments=batch.segments)
        weight = dense(head(config, stacked), hidden.dtype)

        def token(state):
            return kept(project(config, state, weight), k, settings.temperature)

        # Over time, so that rows stay on their devices.
        chunk = max(1, CHUNK // len(batch.tokens))
        return jax.lax.map(jax.vmap(token), jnp.moveaxis(hidden, 1, 0), batch_size=chunk)

    return say


def collect(
    batch: Batch, log_probs: np.ndarray, ids: np.ndarray | None, teacher: str
) -> dict[bytes, tuple[np.ndarray, ...]]:
    """What the teacher says of each example's targets, by its key.

    Raises:
      ArtifactError: NaN or Inf.
    """
    found = {}
    for key, row, targets in segments_of(batch):
        found[key] = tuple(array[row, targets - 1] for array in (log_probs, ids) if array is not None)
        if not np.isfinite(found[key][0]).all():
            begin = np.asarray(batch.tokens)[row, : targets[0] + 1][-8:].tolist()
            raise ArtifactError(f"{teacher}: NaN or Inf in its logits after the tokens {begin}; try --dtype float32")
    return found


def arrays_of(said: dict[bytes, tuple[np.ndarray, ...]], keys: list[bytes], dtype: np.dtype) -> dict[str, np.ndarray]:
    """A shard's tensors, examples in the order of `keys`, ids as `dtype`."""
    log_probs, *ids = (np.concatenate(parts) for parts in zip(*(said[key] for key in keys), strict=True))
    return {
        "keys": np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), -1),
        "counts": np.array([len(said[key][0]) for key in keys], np.int32),
        "log_probs": log_probs,
        **({"ids": ids[0].astype(dtype)} if ids else {}),
    }
