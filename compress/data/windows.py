"""Held-out text as windows to score, under a named convention.

Letters: B rows, T tokens of a window.
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int32

from compress.data.batch import Batch
from compress.data.examples import Example, example
from compress.data.pack import batch_of, pack
from compress.data.rows import Rows
from compress.errors import DataError, RecipeError
from compress.tokenizer import Tokenizer

DOCUMENT = 1024


@dataclasses.dataclass(frozen=True)
class Convention:
    """How a perplexity was measured; two are comparable if these agree.

    Attributes:
      window: tokens of a window, its BOS included.
      stride: tokens from one window's beginning to the next one's; smaller than the window: each token is scored
        once, with more context.
      bos: whether each window begins with a BOS.
      joined: windows run over the documents joined end to end; else no window holds two documents.
      tokens, scored, documents: counts. A document is a row, cut into blocks of 1,024 tokens where it is longer.
      sha256: of the token ids.
    """

    window: int
    stride: int
    bos: bool
    joined: bool
    tokens: int
    scored: int
    documents: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Windows:
    """(batch, documents) pairs, in the same order each time; documents [B, T] is -1 on padding."""

    convention: Convention
    windows: list[tuple[Example, np.ndarray]]
    size: int
    pad_id: int

    def __iter__(self) -> Iterator[tuple[Batch, Int32[np.ndarray, "B T"]]]:
        length = self.convention.window
        rows = pack([len(sample) for sample, _ in self.windows], length)
        for at in range(0, len(rows), self.size):
            chosen = [[self.windows[i] for i in row] for row in rows[at : at + self.size]]
            owners = np.full((self.size, length), -1, np.int32)
            for b, row in enumerate(chosen):
                joined = np.concatenate([owner for _, owner in row])
                owners[b, : len(joined)] = joined
            samples = [[sample for sample, _ in row] for row in chosen]
            yield batch_of(samples, self.size, length, self.pad_id), owners


def documents(rows: Rows, tokenizer: Tokenizer, *, tokens: int | None = None) -> list[Example]:
    """The documents of `rows`, without BOS, in order: a row, or each 1,024 tokens of a longer one.

    Of text every token is a target; of the other kinds what training would learn.

    Args:
      tokens: stop after so many.
    """
    found: list[Example] = []
    left = tokens
    for row in rows:
        try:
            sample = _sample(row, tokenizer)
        except DataError as error:
            rows.reject(row.where, str(error))
            continue
        for at in range(0, len(sample), DOCUMENT):
            end = at + DOCUMENT if left is None else min(at + DOCUMENT, at + left)
            block = Example(sample.tokens[at:end], sample.mask[at:end])
            found += [block] if len(block) else []
            left = None if left is None else left - len(block)
        if left == 0:
            break
    if not found:
        raise DataError(f"{', '.join(map(str, rows.paths))}: no tokens to evaluate on")
    return found


def windows(
    documents: Sequence[Example],
    window: int,
    *,
    stride: int | None = None,
    bos_id: int | None = None,
    joined: bool = False,
    size: int = 8,
    pad_id: int = 0,
) -> Windows:
    """Windows over `documents`, each token scored at most once.

    A token is scored if it is a target, is not the first of its window, and no earlier window scored it. With
    `joined`, stride = window and no BOS, that is `window` - 1 scored tokens a window; the last one may be shorter.

    Args:
      stride: the window (less its BOS) if not given.
      bos_id: begin each window with it; no BOS if None.
      size: rows of a batch.
    """
    room = window - (bos_id is not None)
    stride = room if stride is None else stride
    if room < 2 - (bos_id is not None) or not 1 <= stride <= room:
        raise RecipeError(
            f"window = {window}, stride = {stride}: need 1 <= stride <= {max(room, 1)} tokens of a window"
        )
    owners = [np.full(len(sample), i, np.int32) for i, sample in enumerate(documents)]
    units = list(zip(documents, owners, strict=True))
    if joined:
        tokens, mask = (np.concatenate([getattr(d, name) for d in documents]) for name in ("tokens", "mask"))
        units = [(Example(tokens, mask), np.concatenate(owners))]
    cut = [piece for sample, owner in units for piece in _cut(sample, owner, room, stride, bos_id)]
    digest = hashlib.sha256()
    for sample in documents:
        digest.update(sample.tokens.astype("<i4").tobytes())
    convention = Convention(
        window=window,
        stride=stride,
        bos=bos_id is not None,
        joined=joined,
        tokens=sum(map(len, documents)),
        scored=sum(int(sample.mask.sum()) for sample, _ in cut),
        documents=len(documents),
        sha256=digest.hexdigest(),
    )
    return Windows(convention, cut, size, pad_id)


def _sample(row, tokenizer: Tokenizer) -> Example:
    if row.kind == "text":
        ids = np.array(tokenizer.encode(row.values["text"]), np.int32)
        return Example(ids, np.ones(len(ids), bool))
    sample = example(row, tokenizer)
    bos = int(tokenizer.wants_bos and sample.tokens[0] == tokenizer.bos_id)
    return Example(sample.tokens[bos:], sample.mask[bos:])


def _cut(
    sample: Example, owner: np.ndarray, room: int, stride: int, bos_id: int | None
) -> Iterator[tuple[Example, np.ndarray]]:
    seen = 0
    if bos_id is not None and sample.tokens[0] == bos_id:
        sample, owner = Example(sample.tokens[1:], sample.mask[1:]), owner[1:]
    for at in range(0, len(sample), stride):
        end = min(at + room, len(sample))
        tokens, owners = sample.tokens[at:end], owner[at:end]
        mask = sample.mask[at:end] & (np.arange(at, end) >= seen)
        seen = end
        if bos_id is None:
            mask[0] = False
        else:
            tokens = np.concatenate([np.array([bos_id], np.int32), tokens])
            owners, mask = np.concatenate([owners[:1], owners]), np.concatenate([[False], mask])
        yield Example(tokens, mask), owners
        if end == len(sample):
            break
