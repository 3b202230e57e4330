"""Temperatures that change from step to step, carried by the batches so that the step never compiles anew.

Letters: B rows, N steps.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Float32

from compress.data.batch import Batch
from compress.train.fit import Resumable

# The share of the way from the first to the last temperature, from the share of the steps done.
SCHEDULES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "linear": lambda done: done,
    "cosine": lambda done: (1 - np.cos(np.pi * done)) / 2,
}


class Tempered(NamedTuple):
    """A batch and the temperature of each of its rows."""

    batch: Batch
    temperature: Float32[Array | np.ndarray, " B"]


def temperatures(schedule: str, start: float, end: float, steps: int) -> Float32[np.ndarray, " N"]:
    """A temperature a step, from `start` at the first to `end` at the last."""
    way = SCHEDULES[schedule](np.linspace(0, 1, steps))
    return (start + (end - start) * way).astype(np.float32)


class TemperedBatches:
    """Batches with the temperatures of their turns, the last one for all that follow; resumable as `batches` are."""

    def __init__(self, batches: Resumable, values: Float32[np.ndarray, " N"]):
        """Take a temperature a step."""
        self.batches, self.stream, self.values, self.taken = batches, iter(batches), values, 0

    def __iter__(self) -> Iterator[Tempered]:
        return self

    def __next__(self) -> Tempered:
        batch = next(self.stream)
        value = self.values[min(self.taken, len(self.values) - 1)]
        self.taken += 1
        return Tempered(batch, np.full(len(batch.tokens), value))

    def state(self) -> dict[str, Any]:
        """Where the next batch comes from, as JSON."""
        return {"batches": self.batches.state(), "taken": self.taken}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `state`."""
        self.batches.restore(state["batches"])
        self.taken = state["taken"]
