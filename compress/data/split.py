"""Held-out rows where no file of them is given: every twentieth row or so, chosen by its place."""

import zlib
from collections.abc import Iterator

from compress.data.rows import START, Row, Rows

ONE_IN = 20


class TrainingRows(Rows):
    """The rows that are not held out."""

    def read(self, start: tuple[int, int, int] = START) -> Iterator[Row]:
        """As `Rows.read`, less the rows held out."""
        return (row for row in super().read(start) if not is_held_out(row))


class HeldOutRows(Rows):
    """The rows held out."""

    def read(self, start: tuple[int, int, int] = START) -> Iterator[Row]:
        """As `Rows.read`, of the rows held out alone."""
        return (row for row in super().read(start) if is_held_out(row))


def is_held_out(row: Row) -> bool:
    """Whether a row is held out; its file's line decides, so that it is the same in every run."""
    line = row.where.rpartition(":")[2]
    return zlib.crc32(line.encode()) % ONE_IN == 0


def training_and_held_out(paths, valid, **options) -> tuple[Rows, Rows]:
    """Rows to train on and rows to validate on: `valid`'s if given, else a share of `paths`."""
    if valid:
        return Rows(paths, **options), Rows(valid, **options)
    return TrainingRows(paths, **options), HeldOutRows(paths, **options)
