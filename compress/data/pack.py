"""Sequence packing: many examples a row, none seeing another.

Letters: B rows, T tokens a row.
"""

import bisect
from collections.abc import Sequence

import numpy as np

from compress.data.batch import Batch, PairBatch
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


def pair_batch_of(pairs: Sequence[tuple[Example, Example]], size: int, length: int, pad_id: int = 0) -> PairBatch:
    """A batch of pairs, one a row, padded at the right; missing rows are all padding."""
    zero, one = np.zeros(size, np.float32), np.ones(size, np.float32)
    return PairBatch(
        batch_of([[chosen] for chosen, _ in pairs], size, length, pad_id),
        batch_of([[rejected] for _, rejected in pairs], size, length, pad_id),
        zero,
        zero.copy(),
        one,
        one.copy(),
    )
