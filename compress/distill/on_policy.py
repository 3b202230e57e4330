"""On-policy distillation (GKD, arXiv:2306.13649, algorithm 1): in a share of the steps the student answers prompts
itself, with the weights of the step at hand, and learns what its teacher says of its own words.

The step samples within its program, before the loss. So nothing waits for the weights but the device, and an answer
depends on the weights, the prompt and the row's key alone: on (seed, step, row), however rows are grouped.

Letters: B rows, P tokens of a prompt, N new tokens, T = P + N tokens of a row.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32, Key

from compress.data.batch import Batch
from compress.data.batches import Batches
from compress.data.examples import Example, example, with_prompt
from compress.data.pack import pieces
from compress.data.rows import Quarantine, Row
from compress.distill.settings import Distill
from compress.distill.temperature import Tempered
from compress.generate.decode import continue_rows
from compress.generate.sampling import Sampling
from compress.models.config import DecoderConfig
from compress.models.decoder import Stacked
from compress.train.fit import Resumable
from compress.train.step import LossFn


class Prompts(NamedTuple):
    """A prompt a row, padded at the right; a row of length 0 has none."""

    tokens: Int32[Array | np.ndarray, "B P"]
    lengths: Int32[Array | np.ndarray, " B"]


class PromptBatches(Batches):
    """Batches of `size` prompts of at most `length` tokens, one a row; else as `Batches`.

    Of a completion or conversation it is all that comes before the last answer; where that is too long, it loses its
    beginning, but for a BOS. Text is cut into pieces of `length`, and the first half of each is a prompt.
    """

    def _items(self, row: Row) -> list | str:
        sample = example(row, self.tokenizer)
        if row.kind in ("text", "tokens"):
            prompts = [_head(piece, len(piece) // 2) for piece in pieces(sample, self.length)]
        else:
            fitted = with_prompt(sample, self.length, self._bos_id)
            prompts = [_head(fitted, fitted.start)]
        return [prompt for prompt in prompts if len(prompt)] or "no prompt in"

    def _arrange(self, items: list, order: np.ndarray) -> list:
        return [items[i] for i in order]

    def _assemble(self, chosen: list) -> Prompts:
        self.tokens += sum(map(len, chosen))
        self.slots += self.size * self.length
        tokens = np.full((self.size, self.length), self.tokenizer.pad_id or 0, np.int32)
        lengths = np.zeros(self.size, np.int32)
        for row, prompt in enumerate(chosen):
            tokens[row, : len(prompt)], lengths[row] = prompt.tokens, len(prompt)
        return Prompts(tokens, lengths)


def _head(sample: Example, length: int) -> Example:
    return Example(sample.tokens[:length], sample.mask[:length])


class OnPolicyBatches:
    """Batches of data, or of prompts where a draw by (seed, number of the batch) is below `share`; resumable."""

    def __init__(self, batches: Resumable, prompts: Resumable, share: float, seed: int):
        """Take both streams; each goes on from its own place."""
        self.streams, self.share, self.seed, self.taken = (batches, prompts), share, seed, 0
        self.iterators = [iter(stream) for stream in self.streams]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        on_policy = np.random.default_rng([self.seed, self.taken]).random() < self.share
        self.taken += 1
        return next(self.iterators[on_policy])

    def state(self) -> dict[str, Any]:
        """Where the next batch comes from, as JSON."""
        return {"streams": [stream.state() for stream in self.streams], "taken": self.taken}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `state`."""
        for stream, place in zip(self.streams, state["streams"], strict=True):
            stream.restore(place)
        self.taken = state["taken"]


def on_policy_batches(batches: Batches, settings: Distill) -> OnPolicyBatches:
    """`batches`, and the prompts of the same rows, read once more."""
    rows = batches.rows
    if settings.on_policy < 1:  # else `batches` are never read
        rows = copy.copy(rows)
        rows.quarantine = Quarantine()  # what is skipped is counted once, by `batches`
    room = batches.length - settings.on_policy_tokens
    prompts = PromptBatches(rows, batches.tokenizer, size=batches.size, length=room, seed=batches.seed)
    return OnPolicyBatches(batches, prompts, settings.on_policy, batches.seed)


def answered(prompts: Prompts, new: Int[Array, "B N"]) -> Batch:
    """Each prompt [B, P] and the answer to it in one row, with the answer's tokens as the targets.

    Args:
      new: token ids; negative after the answer's end.
    """
    room = prompts.tokens.shape[1]
    places = jnp.arange(room + new.shape[1])
    since = places - prompts.lengths[:, None]  # the place in the answer
    said = jnp.take_along_axis(jnp.pad(new, ((0, 0), (0, room)), constant_values=-1), jnp.maximum(since, 0), axis=1)
    target = (since >= 0) & (said >= 0) & (prompts.lengths[:, None] > 0)
    segments = ((since < 0) | target).astype(jnp.int32)
    tokens = jnp.where(target, said, jnp.pad(prompts.tokens, ((0, 0), (0, new.shape[1]))))
    return Batch(tokens, segments, places * segments, target.astype(jnp.float32))


def on_policy_loss(
    loss: LossFn,
    own: LossFn,
    config: DecoderConfig,
    *,
    sampling: Sampling,
    new: int,
    stop: Sequence[int],
    cast: Callable[[Stacked], Stacked],
) -> LossFn:
    """`loss` of batches of data, and `own` of what the student answers to `Prompts`, `Tempered` or not.

    There is no gradient through the sampling. Beside its metrics, less the cross-entropy, which the student's own
    words have no use for, an on-policy batch has `ended`: the share of answers that ended within `new` tokens.

    Args:
      config: the student's; trainable is its `Stacked`.
      stop: token ids that end an answer.
      cast: the student in the dtype that it computes in.
    """
    ends = np.array([*stop], np.int32)

    def run(trainable: Stacked, frozen: Any, batch: Any, keys: Key[Array, " B"] | None):
        prompts = batch.batch if isinstance(batch, Tempered) else batch
        if not isinstance(prompts, Prompts):
            return loss(trainable, frozen, batch, keys)
        weights = jax.lax.stop_gradient(cast(trainable))
        said = continue_rows(config, weights, *prompts, keys, ends, new, sampling=sampling, new=new)
        answers = answered(prompts, said)
        tempered = batch._replace(batch=answers) if isinstance(batch, Tempered) else answers
        total, count, metrics = own(trainable, frozen, tempered, keys)
        asked = prompts.lengths > 0
        ended = (jnp.isin(said, ends).any(axis=1) & asked).sum(), asked.sum()
        return total, count, {name: metrics[name] for name in metrics if name != "cross_entropy"} | {"ended": ended}

    return run
