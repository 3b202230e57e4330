"""What a running stage says of itself: one line on standard error, rewritten on a terminal and rare in a log."""

import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO

# What takes less is over before anyone has read how long it takes.
WORTH_AN_ESTIMATE = 2.0


class Progress:
    """Prints how far a stage is; results go to standard output, this never does.

    Attributes:
      listener: called with what each report says, before it is decided whether to print it.
      sinks: called with the stage, the step and the figures of what `log` is told.
    """

    listener: Callable[..., None] | None = None
    sinks: Sequence[Callable[[str, int, dict[str, float]], None]] = ()

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False, every: float = 10.0):
        """Write to `stream` (standard error if None), in a log at most each `every` seconds; `quiet` writes nothing."""
        self._stream = stream
        self._quiet = quiet
        self._every = every
        self._last = 0.0
        self._width = 0
        self._stage, self._first, self._began = "", 0, 0.0

    def __call__(self, stage: str, done: int, total: int, **figures: float) -> None:
        """Report `done` of `total` steps; the first of them and the last are always printed."""
        if self.listener is not None:
            self.listener(stage, done, total, **figures)
        terminal = self._terminal()
        now = time.monotonic()
        left = self._seconds_left(stage, done, total, now)
        if self._quiet or (1 < done < total and now - self._last < (0.1 if terminal else self._every)):
            return
        self._last = now
        said = "  ".join(f"{name} {value:.4g}" for name, value in figures.items())
        line = f"{stage} {done}/{total}  {said}".rstrip() + left
        if terminal:
            self._write("\r" + line.ljust(self._width) + ("\n" if done >= total else ""))
            self._width = 0 if done >= total else len(line)
        else:
            self._write(line + "\n")

    def log(self, stage: str, step: int, figures: dict[str, float]) -> None:
        """Send figures of a step to the sinks, under the stage's name alone; nothing is printed."""
        for sink in self.sinks:
            sink(stage.partition(" ")[0], step, figures)

    def _seconds_left(self, stage: str, done: int, total: int, now: float) -> str:
        """The estimate, in words. The clock starts after the first step, which is slow because it compiles."""
        if stage != self._stage or done <= self._first:
            self._stage, self._first, self._began = stage, done, now
            return ""
        took = now - self._began
        left = took / (done - self._first) * (total - done)
        if done >= total or took + left < WORTH_AN_ESTIMATE:
            return ""
        minutes, seconds = divmod(round(left), 60)
        clock = f"{minutes // 60}:{minutes % 60:02}" if minutes >= 60 else f"{minutes}"
        return f"  {clock}:{seconds:02} left"

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if not self._quiet:
            start = "\r" + " " * self._width + "\r" if self._width else ""
            self._write(f"{start}{text}\n")
            self._width = 0

    def warn(self, text: str) -> None:
        """Print a warning, whether quiet or not."""
        self._write(f"{chr(10) if self._width else ''}warning: {text}\n")
        self._width = 0

    def _terminal(self) -> bool:
        return (self._stream or sys.stderr).isatty()

    def _write(self, text: str) -> None:
        stream = self._stream or sys.stderr
        stream.write(text)
        stream.flush()
