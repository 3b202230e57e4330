"""Rows to token ids and masks of targets.

Letters: N tokens.
"""

import dataclasses
import datetime
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32

from compress.data.rows import Row
from compress.errors import DataError
from compress.tokenizer import Tokenizer

# What templates that print today's date are given, so that a data set has the same ids every day.
TEMPLATE_DATE = datetime.datetime(2024, 7, 26)


@dataclasses.dataclass(frozen=True)
class Example:
    """Token ids; `mask` is true on the targets. `start` is where the last completion begins (0 in text)."""

    tokens: Int32[np.ndarray, " N"]
    mask: Bool[np.ndarray, " N"]
    start: int = 0

    def __len__(self) -> int:
        return len(self.tokens)


def example(row: Row, tokenizer: Tokenizer) -> Example:
    """The example of a text, tokens, targets, completion or messages row, however long.

    Targets: in text and tokens, all but the first token; in targets, what their mask says; else the completion, or
    every assistant turn, each with the one EOS at its end. One BOS stands in front where the tokenizer wants one, or
    the template puts one; targets rows are taken as they are.

    Raises:
      DataError: the row cannot be made into one, and why.
    """
    values = row.values
    if row.kind == "text":
        return _text(tokenizer.with_bos(tokenizer.encode(values["text"])))
    if row.kind == "tokens":
        tokenizer.check_rows(values["tokens"])
        return _text(tokenizer.with_bos(values["tokens"]))
    if row.kind == "targets":
        tokenizer.check_rows(values["tokens"])
        return marked(values["tokens"], values["mask"])
    if row.kind == "completion":
        return answer(values["prompt"], values["completion"], tokenizer)
    if row.kind == "messages":
        return conversation(values["messages"], tokenizer)
    raise DataError(f"a {row.kind} row is a pair, not one example")


def marked(tokens: Sequence[int] | np.ndarray, mask: Sequence[int] | np.ndarray) -> Example:
    """Tokens whose targets are where `mask` is 1, less the first, which nothing predicts."""
    targets = np.array(mask, bool)
    targets[:1] = False
    begins = np.flatnonzero(np.diff(targets, prepend=False) & targets)
    return Example(np.array(tokens, np.int32), targets, int(begins[-1]) if len(begins) else 0)


def pair(row: Row, tokenizer: Tokenizer) -> tuple[Example, Example]:
    """The chosen and the rejected example of a preference row; only the answers are targets."""
    values = row.values
    return (
        answer(values["prompt"], values["chosen"], tokenizer),
        answer(values["prompt"], values["rejected"], tokenizer),
    )


def answer(prompt: Any, completion: Any, tokenizer: Tokenizer) -> Example:
    """`prompt`, then `completion` as the targets: two strings, or two lists of messages."""
    if isinstance(prompt, list):
        return conversation([*prompt, *completion], tokenizer, first=len(prompt))
    before = tokenizer.with_bos(tokenizer.encode(prompt))
    after = tokenizer.encode_continuation(completion, prompt)
    if tokenizer.eos_id is not None:
        after.append(tokenizer.eos_id)
    mask = np.arange(len(before) + len(after)) >= max(len(before), 1)
    return Example(np.array(before + after, np.int32), mask, len(before))


def conversation(messages: list[dict[str, Any]], tokenizer: Tokenizer, *, first: int = 0) -> Example:
    """A conversation as the chat template writes it; assistant turns from message `first` on are targets.

    A turn runs from where the generation prompt ends (so the model learns what it will be asked to produce)
    through the special token that the template ends it with. A last turn that it does not end gets an EOS.
    """
    messages = [{**m, "content": tokenizer.guard(m["content"])} for m in messages]
    rendered = tokenizer.chat(messages, now=TEMPLATE_DATE)
    ids, offsets = tokenizer.encode_chat(rendered)
    starts = np.array([a for a, _ in offsets], np.int64)
    ends = np.array([b for _, b in offsets], np.int64)
    mask = np.zeros(len(ids) + 1, bool)
    turns = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
    if not turns:
        raise DataError("no message of role 'assistant', so nothing to learn from")
    begin = 0
    for turn in turns:
        left, right = _turn(messages, turn, rendered, tokenizer)
        begin = int(np.searchsorted(ends, left, side="right"))  # a token that straddles the border is the answer's
        stop = max(int(np.searchsorted(starts, right)), begin)
        stop, ended = _through_end(ids, stop, tokenizer)
        mask[begin:stop] = True
    if turns[-1] == len(messages) - 1 and not ended and tokenizer.eos_id is not None:
        ids = [*ids[:stop], tokenizer.eos_id]
        mask[stop] = True
    mask[0] = False
    return Example(np.array(ids, np.int32), mask[: len(ids)].copy(), begin)


def fit(sample: Example, length: int, *, room: int | None = None, bos_id: int | None = None) -> Example | None:
    """Cut `sample` to `length` tokens; None if no target is left.

    What comes before the last completion loses its beginning (but for a BOS), down to `room` tokens (by default
    half of `length`, and more where the completion leaves it); only then does the completion lose its end.
    """
    if len(sample) > length:
        room = length // 2 if room is None else room
        keep = min(sample.start, max(room, length - (len(sample) - sample.start)), length)
        chosen = np.arange(sample.start - keep, len(sample))[:length]
        if keep and sample.tokens[0] == bos_id and bos_id is not None:
            chosen[0] = 0
        mask = sample.mask[chosen]
        mask[:1] = False
        sample = Example(sample.tokens[chosen], mask, keep)
    return sample if sample.mask.any() else None


def fit_pair(chosen: Example, rejected: Example, length: int, **options) -> tuple[Example, Example] | None:
    """`fit` both, leaving them the same prompt; None if either has no target left."""
    room = options.pop("room", None)
    longest = max(len(chosen) - chosen.start, len(rejected) - rejected.start)
    room = max(length // 2 if room is None else room, length - longest)
    cut = [fit(with_prompt(s, room, options.get("bos_id")), length, room=room, **options) for s in (chosen, rejected)]
    return None if cut[0] is None or cut[1] is None else (cut[0], cut[1])


def with_prompt(sample: Example, room: int, bos_id: int | None) -> Example:
    """`sample` with at most `room` tokens before its completion."""
    drop = sample.start - room
    if drop <= 0:
        return sample
    chosen = np.arange(drop, len(sample))
    if room and bos_id is not None and sample.tokens[0] == bos_id:
        chosen[0] = 0
    mask = sample.mask[chosen]
    mask[:1] = False
    return Example(sample.tokens[chosen], mask, room)


def _text(ids: list[int]) -> Example:
    return Example(np.array(ids, np.int32), np.arange(len(ids)) > 0)


def _through_end(ids: list[int], stop: int, tokenizer: Tokenizer) -> tuple[int, bool]:
    """Past the special token that ends a turn, and whether one does: at `stop`, or with only blanks before it."""
    for at in range(stop, len(ids)):
        if ids[at] in tokenizer.end_ids:
            return at + 1, True
        if tokenizer.decode([ids[at]]).strip():
            break
    return stop, False


def _turn(messages: list[dict[str, Any]], turn: int, rendered: str, tokenizer: Tokenizer) -> tuple[int, int]:
    """The characters of `rendered` that are message `turn`'s own.

    The words are found by putting others in their place: what changes is theirs. That holds for templates that
    write history differently from the present, refuse a part of a conversation, or trim. The beginning then moves
    back to the end of the generation prompt, where the template renders one.
    """
    content = messages[turn]["content"].strip()
    probe = "Z" if content[:1] != "Z" and content[-1:] != "Z" else "Q" if "Q" not in content[:1] + content[-1:] else "#"
    changed = [*messages[:turn], {"role": "assistant", "content": probe}, *messages[turn + 1 :]]
    other = tokenizer.chat(changed, now=TEMPLATE_DATE)
    left = _shared_prefix(rendered, other)
    tail = _shared_prefix(rendered[left:][::-1], other[left:][::-1])
    right = len(rendered) - tail
    try:
        prompt = tokenizer.chat(messages[:turn], add_generation_prompt=True, now=TEMPLATE_DATE) if turn else ""
    except DataError:
        prompt = ""
    if prompt and len(prompt) <= left and rendered.startswith(prompt):
        left = len(prompt)
    return left, right


def _shared_prefix(a: str, b: str) -> int:
    low, high = 0, min(len(a), len(b))
    while low < high:  # the longest length at which they agree, by halves
        middle = (low + high + 1) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
