"""Sequence packing: many examples a row, none seeing another.

Letters: B rows, T tokens a row.
"""

import bisect
from collections.abc import Sequence

import numpy as np

from compress.data.batch import CHOSEN, REJECTED, Batch, PairBatch
from compress.data.examples import Example


def pieces(sample: Example, length: int) -> list[Example]:
    """`sample` cut into examples of at most `length` tokens.

    Each is a segment of its own, so its first token is no longer a target. A BOS stays where it was: in front of
    the first piece only.
    """
    cut = []
    for at in range(0, len(sample), length):
        mask = sample.mask[at : at + length].copy()
        mask[0] = False
        cut.append(Example(sample.tokens[at : at + length], mask))
    return cut


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing: the indices of `lengths` in bins whose sums are at most `capacity`.

    Deterministic: of equal lengths the earlier comes first, of equally full bins the older.
    """
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free, bin), sorted
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        if not 0 < length <= capacity:
            raise ValueError(f"length {length} does not go into a row of {capacity}")
        at = bisect.bisect_left(room, (length, -1))
        if at == len(room):
            bins.append([index])
            free, where = capacity - length, len(bins) - 1
        else:
            free, where = room.pop(at)
            bins[where].append(index)
            free -= length
        if free:
            bisect.insort(room, (free, where))
    return bins


def batch_of(rows: Sequence[Sequence[Example]], size: int, length: int, pad_id: int = 0) -> Batch:
    """A batch [size, length]: row b holds the examples `rows[b]` one after the other, then padding.

    Missing rows are all padding, so every batch of a run has one shape.
    """
    tokens = np.full((size, length), pad_id, np.int32)
    segments, positions = np.zeros((2, size, length), np.int32)
    mask = np.zeros((size, length), np.float32)
    for b, samples in enumerate(rows):
        at = 0
        for segment, sample in enumerate(samples, 1):
            here = slice(at, at + len(sample))
            tokens[b, here] = sample.tokens
            segments[b, here] = segment
            positions[b, here] = np.arange(len(sample))
            mask[b, here] = sample.mask
            mask[b, at] = 0
            at += len(sample)
    return Batch(tokens, segments, positions, mask)


def trunk(chosen: Example, rejected: Example) -> int:
    """How many tokens of a pair are computed once: those that both begin with, before any target, less the last.

    The last begins each branch, so that every answer is predicted from the token before it.
    """
    end = min(int(chosen.mask.argmax()), int(rejected.mask.argmax()))
    other = np.flatnonzero(chosen.tokens[:end] != rejected.tokens[:end])
    return max((int(other[0]) if len(other) else end) - 1, 0)


def shared_length(chosen: Example, rejected: Example) -> int:
    """Tokens of a pair's row; at most those of both examples."""
    return len(chosen) + len(rejected) - trunk(chosen, rejected)


def pair_batch_of(pairs: Sequence[tuple[Example, Example]], size: int, length: int, pad_id: int = 0) -> PairBatch:
    """A batch of pairs [size, length], one a row, padded at the right; missing rows are all padding."""
    tokens = np.full((size, length), pad_id, np.int32)
    segments, positions, branches = np.zeros((3, size, length), np.int32)
    mask = np.zeros((size, length), np.float32)
    for b, (chosen, rejected) in enumerate(pairs):
        at = trunk(chosen, rejected)
        tokens[b, :at], positions[b, :at] = chosen.tokens[:at], np.arange(at)
        first = at
        for branch, sample in ((CHOSEN, chosen), (REJECTED, rejected)):
            here = slice(at, at + len(sample) - first)
            tokens[b, here] = sample.tokens[first:]
            positions[b, here] = np.arange(first, len(sample))
            branches[b, here] = branch
            mask[b, here] = sample.mask[first:]
            mask[b, at] = 0
            at = here.stop
        segments[b, :at] = 1
    zero, one = np.zeros(size, np.float32), np.ones(size, np.float32)
    return PairBatch(Batch(tokens, segments, positions, mask, branches), zero, zero.copy(), one, one.copy())
