"""Batches of pairs on their way to the loss: the reference's log-probabilities, the mix's weight and beta's scale."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from compress.align.mix import Staged
from compress.data.batch import Batch, PairBatch
from compress.data.batches import Batches


class Reference:
    """The reference's log-probabilities of pairs, computed once a pair and kept."""

    def __init__(self, log_probability: Callable[[Batch], jax.Array]):
        """`log_probability` gives those of the chosen and of the rejected answers, [2, B]."""
        self.log_probability = log_probability
        self.kept: dict[bytes, tuple[float, float]] = {}

    def fill(self, pairs: PairBatch) -> PairBatch:
        """The same batch with the reference's columns."""
        keys = fingerprints(pairs)
        if any(key not in self.kept for key in keys):
            chosen, rejected = np.asarray(self.log_probability(pairs.rows))
            self.kept |= {key: (float(chosen[i]), float(rejected[i])) for i, key in enumerate(keys)}
        columns = np.array([self.kept[key] for key in keys], np.float32)
        return dataclasses.replace(pairs, reference_chosen=columns[:, 0], reference_rejected=columns[:, 1])

    def state(self) -> list[Any]:
        """What is kept, as JSON: rows of (hash, chosen, rejected)."""
        return [(key.hex(), *values) for key, values in self.kept.items()]

    def restore(self, state: list[Any]) -> None:
        """Keep what a `state` holds."""
        self.kept |= {bytes.fromhex(key): (chosen, rejected) for key, chosen, rejected in state}


class PairStream:
    """Batches of pairs with what the loss needs beside them, resumable as `batches` are.

    Attributes:
      beta_scale: what the method's beta is multiplied by, from the next batch on.
    """

    def __init__(self, batches: Batches, reference: Reference | None, mix: Staged | None):
        """Without a `reference` its columns stay zero, and without a `mix` the weight stays 1."""
        self.batches, self.reference, self.mix, self.beta_scale = batches, reference, mix, 1.0

    def __iter__(self) -> Iterator[PairBatch]:
        return self

    def __next__(self) -> PairBatch:
        pairs = next(self.batches)
        if self.reference is not None:
            pairs = self.reference.fill(pairs)
        if self.mix is not None:
            pairs = dataclasses.replace(pairs, weight=np.full_like(pairs.weight, self.mix.take()))
        return dataclasses.replace(pairs, beta_scale=np.full_like(pairs.beta_scale, self.beta_scale))

    def state(self) -> dict[str, Any]:
        """All that the next batch depends on, as JSON."""
        return {
            "batches": self.batches.state(),
            "beta_scale": self.beta_scale,
            "mix": self.mix.state() if self.mix else None,
            # Computed again in another batch, a value might differ in its last bit.
            "reference": self.reference.state() if self.reference else None,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `state`.

        Raises:
          DataError: it was made with other settings, data or tokenizer.
        """
        self.batches.restore(state["batches"])
        self.beta_scale = state["beta_scale"]
        if self.mix is not None:
            self.mix.restore(state["mix"])
        if self.reference is not None:
            self.reference.restore(state["reference"])


def fingerprints(pairs: PairBatch) -> list[bytes]:
    """What tells each pair from another: a hash of all of its row but the padding."""
    rows = pairs.rows
    columns = [np.asarray(x) for x in (rows.tokens, rows.positions, rows.branches, rows.mask)]
    lengths = (np.asarray(rows.segments) > 0).sum(1)
    return [hashlib.sha256(b"".join(x[b, :n].tobytes() for x in columns)).digest() for b, n in enumerate(lengths)]
