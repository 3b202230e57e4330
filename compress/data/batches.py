"""Endless, shuffled, resumable streams of batches for training."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from compress.data.examples import Example, example, fit, fit_pair, pair
from compress.data.pack import batch_of, pack, pair_batch_of, pieces, shared_length
from compress.data.rows import START, Quarantine, Row, Rows
from compress.errors import DataError
from compress.tokenizer import Tokenizer

BUFFER = 1 << 24  # tokens
ROUND = 8  # tokens; so that rows of the next buffer are likely to need no other program
# Why a row is of no use, before its length.
NO_TARGET, EQUAL = "no target left in", "both answers are the same in"


class Batches:
    """Packed batches [size, length] of `rows`, epoch after epoch.

    Rows are read into a buffer of about `buffer` tokens, shuffled by (seed, epoch), packed and handed out, then the
    next buffer is read; a data set that fits is read once and shuffled whole. Text and token rows longer than
    `length` are cut into pieces; completions and conversations are fitted (`compress.data.examples.fit`), and
    those that are left without a target are skipped and counted in `rows.quarantine`. The last batch of a buffer
    is filled with rows of padding.

    Args:
      epochs: stop after so many; endless if None.
      room: tokens that a prompt may keep where it and its completion are too long; half of `length` if None.
      sample: share of a buffer's examples that an epoch uses, drawn without replacement by (seed, epoch).
    Raises:
      DataError: a bad row, if `rows` doesn't skip them, or no row that is of use.
    """

    def __init__(
        self,
        rows: Rows,
        tokenizer: Tokenizer,
        *,
        size: int,
        length: int,
        seed: int = 0,
        epochs: int | None = None,
        shuffle: bool = True,
        room: int | None = None,
        sample: float = 1.0,
        buffer: int = BUFFER,
    ):
        if size < 1 or length < 2:
            raise ValueError(f"a batch of {size} rows of {length} tokens: need at least 1 row of 2")
        self.rows, self.tokenizer = rows, tokenizer
        self.size, self.length, self.seed, self.epochs = size, length, seed, epochs
        self.shuffle, self.room, self.sample, self.buffer = shuffle, room, sample, buffer
        self.tokens = 0  # that are not padding, of the batches so far
        self.slots = 0
        self._epoch, self._start, self._batch = 0, START, 0
        self._end: tuple[int, int, int] | None = START
        self._before = (0, 0)  # rows read and skipped in this epoch before the buffer
        self._plan: list | None = None
        self._whole: list | None = None  # the items of all rows, where they fit the buffer

    @property
    def efficiency(self) -> float:
        """The share of the batches so far that is not padding."""
        return self.tokens / self.slots if self.slots else 1.0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._plan is None:
            self._fill()
        while self._batch * self.size >= len(self._plan or ()):
            self._advance()
        assert self._plan is not None
        chosen = self._plan[self._batch * self.size : (self._batch + 1) * self.size]
        self._batch += 1
        return self._assemble(chosen)

    def state(self) -> dict[str, Any]:
        """Where the next batch comes from, as JSON; `restore` continues exactly there."""
        return {
            "epoch": self._epoch,
            "start": list(self._start),
            "batch": self._batch,
            "before": list(self._before),
            "settings": self._settings(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `state`.

        Raises:
          DataError: it was made with other settings, data or tokenizer.
        """
        settings = self._settings()
        other = [name for name, value in settings.items() if state["settings"].get(name) != value]
        if other:
            raise DataError(f"cannot continue: {', '.join(other)} changed since the checkpoint; start anew")
        self._epoch, self._batch = state["epoch"], state["batch"]
        self._start = tuple(state["start"])
        self._before = tuple(state["before"])
        self._plan = None

    def examples(self) -> Iterator[Any]:
        """What an epoch's rows are packed from, in the order of the data; reads all of it."""
        for row in self.rows:
            yield from self._convert(row)

    def steps_per_epoch(self) -> int:
        """Batches of an epoch; reads all rows, once if they fit the buffer."""
        twin = type(self)(
            self.rows, self.tokenizer, size=self.size, length=self.length, seed=self.seed, epochs=1,
            shuffle=self.shuffle, room=self.room, sample=self.sample, buffer=self.buffer,
        )  # fmt: skip
        counts, held = 0, self.rows.quarantine
        try:
            while True:
                twin._fill() if twin._plan is None else twin._advance()
                counts += -(-len(twin._plan or ()) // self.size)
        except StopIteration:
            self._whole = twin._whole
            return counts
        finally:
            if self._plan is not None:
                self.rows.quarantine = held

    @property
    def _bos_id(self) -> int | None:
        return self.tokenizer.bos_id if self.tokenizer.wants_bos else None

    def _settings(self) -> dict[str, Any]:
        return {
            "size": self.size,
            "length": self.length,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "room": self.room,
            "sample": self.sample,
            "buffer": self.buffer,
            "data": self.rows.sha256,
            "tokenizer": self.tokenizer.fingerprint,
        }

    def _advance(self) -> None:
        """Go to the next buffer, or to the next epoch."""
        self._batch = 0
        if self._end is None:
            self._epoch, self._start, self._before = self._epoch + 1, START, (0, 0)
        else:
            quarantine = self.rows.quarantine
            self._start, self._before = self._end, (quarantine.read, quarantine.skipped)
        self._plan = None
        self._fill()

    def _fill(self) -> None:
        if self.epochs is not None and self._epoch >= self.epochs:
            raise StopIteration
        items = self._load() if self._whole is None else self._whole
        if self._whole is not None:
            self._end = None
        order = np.arange(len(items))
        generator = np.random.default_rng([self.seed, self._epoch, *self._start])
        if self.shuffle or self.sample < 1:
            generator.shuffle(order)
        order = order[: max(1, round(self.sample * len(order)))]
        if not self.shuffle:
            order.sort()
        plan = self._arrange(items, order)
        if self.shuffle:  # packing puts the long ones first
            plan = [plan[i] for i in generator.permutation(len(plan))]
        self._plan = plan

    def _load(self) -> list:
        """Items of the rows from `_start` on, until the buffer is full or the rows end."""
        rows, items, held = self.rows, [], 0
        read, skipped = self._before
        rows.quarantine = Quarantine(read, skipped) if self._start == START else rows.quarantine
        rows.quarantine.read, rows.quarantine.skipped = read, skipped
        self._end = None
        for row in rows.read(self._start):
            made = self._convert(row)
            items += made
            held += sum(map(_tokens, made))
            if held >= self.buffer:
                self._end = row.after
                break
        if self._end is None:
            rows.require_some()
            if self._start == START:
                if not items and self.epochs is None:
                    held_out = "all rows", "held out; give more data, or a file of held-out rows with --valid"
                    where, reason = [*rows.quarantine.listed, held_out][0]
                    raise DataError(f"no row is left to train on; {where}: {reason}")
                self._whole = items
        return items

    def _convert(self, row: Row) -> list:
        try:
            items = self._items(row)
        except DataError as error:
            self.rows.reject(row.where, str(error))
            return []
        if isinstance(items, str):
            self.rows.quarantine.skip(row.where, f"{items} {self.length} tokens")
            return []
        return items

    def _items(self, row: Row) -> list | str:
        """The examples of a row, or what keeps it from having any."""
        sample = example(row, self.tokenizer)
        if row.kind in ("text", "tokens"):
            return pieces(sample, self.length) if sample.mask.any() else NO_TARGET
        fitted = fit(sample, self.length, room=self.room, bos_id=self._bos_id)
        return NO_TARGET if fitted is None else [fitted]

    def _arrange(self, items: list, order: np.ndarray) -> list:
        """The rows of the batches to come, of those of the buffer's items that `order` names."""
        return [[items[order[i]] for i in row] for row in pack([len(items[i]) for i in order], self.length)]

    def _assemble(self, chosen: list) -> Any:
        self.tokens += sum(len(sample) for row in chosen for sample in row)
        self.slots += self.size * self.length
        return batch_of(chosen, self.size, self.length, self.tokenizer.pad_id or 0)


class PairBatches(Batches):
    """Batches of `size` preference pairs, a pair a row, padded at the right; else as `Batches`.

    `length` bounds the prompt with either answer. A row holds both: rows are as long as the longest of the buffer,
    rounded up to a multiple of `ROUND`, and never longer than two examples.
    """

    def _items(self, row: Row) -> list | str:
        fitted = fit_pair(*pair(row, self.tokenizer), length=self.length, room=self.room, bos_id=self._bos_id)
        if fitted is None:
            return NO_TARGET
        return EQUAL if np.array_equal(fitted[0].tokens, fitted[1].tokens) else [fitted]

    def _arrange(self, items: list, order: np.ndarray) -> list:
        longest = max((shared_length(*item) for item in items), default=0)
        self.row_length = min(-(-longest // ROUND) * ROUND, 2 * self.length)
        return [items[i] for i in order]

    def _assemble(self, chosen: list) -> Any:
        self.tokens += sum(shared_length(*item) for item in chosen)
        self.slots += self.size * self.row_length
        return pair_batch_of(chosen, self.size, self.row_length, self.tokenizer.pad_id or 0)


def _tokens(item: Example | tuple[Example, Example]) -> int:
    return len(item) if isinstance(item, Example) else sum(map(len, item))
