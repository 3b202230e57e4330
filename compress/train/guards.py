"""What watches over a training run: whether the loss has risen for good, and whether somebody asks the run to stop."""

import contextlib
import math
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

# A median's standard error is 1.2533 sigma / sqrt(n) for normal noise, and sigma is 1.4826 MAD.
MEDIAN_ERROR = 1.2533 * 1.4826
SURE = 8.0  # standard errors; of 400 steps of noise about a level, 6 call 2% of the runs a rebound, and 8 none of 800


class Rebound:
    """Tells when the loss has risen for good, not by the noise of its batches.

    The median of the last `window` losses is held against the lowest such median so far. It has rebounded when it
    lies above that by more than `tolerance` of it, and by more than `SURE` standard errors of their difference.
    """

    def __init__(self, tolerance: float = 0.05, *, window: int = 50):
        self.tolerance, self.window = tolerance, window
        self.losses: list[float] = []
        self.lowest = math.inf

    def observe(self, loss: float) -> bool:
        """Take a step's loss; whether it completes a rebound."""
        self.losses = [*self.losses, loss][-self.window :]
        if len(self.losses) < self.window:
            return False
        median = float(np.median(self.losses))
        noise = MEDIAN_ERROR * float(np.median(np.abs(np.subtract(self.losses, median)))) / math.sqrt(self.window)
        rise, self.lowest = median - self.lowest, min(self.lowest, median)
        return rise > max(self.tolerance * abs(self.lowest), SURE * math.sqrt(2) * noise)

    def state(self) -> dict[str, Any]:
        """What `restore` takes, as JSON."""
        return {"losses": self.losses, "lowest": self.lowest}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a `state`."""
        self.losses, self.lowest = list(state["losses"]), state["lowest"]


class StopRequest:
    """Whether the run was asked to stop."""

    made = False


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Take the first SIGTERM as a request to stop after the step at hand; a second one does what it did before."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # only the main thread may be told of signals
        return

    def ask(*_: object) -> None:
        request.made = True
        signal.signal(signal.SIGTERM, before)

    before = signal.signal(signal.SIGTERM, ask)
    try:
        yield request
    finally:
        signal.signal(signal.SIGTERM, before)
