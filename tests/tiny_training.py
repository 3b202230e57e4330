"""Tiny models and batches to train on, and their compiled pieces, made once."""

import contextlib
from collections.abc import Iterator
from functools import cache, partial

import jax
import numpy as np

from compress.data.batch import CHOSEN, REJECTED, Batch, PairBatch
from compress.data.examples import Example
from compress.data.pack import batch_of, pair_batch_of
from compress.models import decoder, read_config
from compress.models.lora import init_adapters, is_adapter
from compress.quantize.quantizers import QUANTIZERS
from export.quantized import QuantSpec
from tests.goldens.make_models import draw

VOCAB, LENGTH, RANK = 96, 12, 4

STUDENT_HF = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
# Another width and depth, a head of its own, and padding rows in the vocabulary.
TEACHER_HF = STUDENT_HF | {
    "vocab_size": VOCAB + 8,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "tie_word_embeddings": False,
}
STUDENT, TEACHER = read_config(STUDENT_HF), read_config(TEACHER_HF)
SPEC = QuantSpec(bits=4, group_size=16)


@contextlib.contextmanager
def unoptimized() -> Iterator[None]:
    """Compile quickly rather than well: the programs here run for milliseconds."""
    option = "jax_disable_most_optimizations"
    before = jax.config.read(option)
    jax.config.update(option, True)
    yield
    jax.config.update(option, before)


@cache
def student_weights() -> dict[str, np.ndarray]:
    return draw(decoder.shapes(STUDENT), 1)


@cache
def student() -> decoder.Stacked:
    return decoder.stack(STUDENT, student_weights())


@cache
def teacher() -> decoder.Stacked:
    return decoder.stack(TEACHER, draw(decoder.shapes(TEACHER), 2))


@cache
def packed_weights() -> dict:
    """The student's weights with 4-bit linears."""
    quantize = QUANTIZERS["rtn"].quantize
    packed = {
        name: jax.tree.map(np.asarray, quantize(student_weights()[name], SPEC)) for name in decoder.linears(STUDENT)
    }
    return student_weights() | packed


@cache
def base_and_adapters(seed: int | None = None) -> tuple[decoder.Stacked, decoder.Stacked]:
    """A 4-bit base and its adapters: fresh ones, or with all halves drawn at random."""
    adapters = init_adapters(STUDENT, jax.random.key(0), RANK)
    if seed is not None:
        rng = np.random.default_rng(seed)
        adapters = {name: rng.normal(0, 0.1, value.shape).astype(np.float32) for name, value in adapters.items()}
    adapters, base = decoder.partition(decoder.stack(STUDENT, packed_weights() | adapters), is_adapter)
    return base, adapters


def sample(rng: np.random.Generator, length: int, start: int = 1) -> Example:
    """Random tokens of which those from `start` on are targets."""
    return Example(rng.integers(0, VOCAB, length, dtype=np.int32), np.arange(length) >= start, start)


def batch(seed: int, rows: int = 8, length: int = LENGTH) -> Batch:
    """Rows of one or two segments of unequal length, so that targets are unevenly spread; some padding."""
    rng = np.random.default_rng(seed)
    packed = []
    for row in range(rows):
        first = int(rng.integers(2, length - 2))
        pieces = [sample(rng, first, int(rng.integers(1, first)))]
        packed.append([*pieces, sample(rng, int(rng.integers(2, length - first + 1)))] if row % 2 else pieces)
    return batch_of(packed, rows, length)


def pairs(seed: int, rows: int = 8, length: int = LENGTH, size: int | None = None) -> PairBatch:
    """Random pairs that share a prompt, each example of at most `length`; with `size`, filled up with padding."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(rows):
        prompt = sample(rng, int(rng.integers(2, 5)))
        answers = [sample(rng, int(rng.integers(1, length - 4))) for _ in range(2)]
        made.append(tuple(joined(prompt, answer) for answer in answers))
    return pair_batch_of(made, size or rows, 2 * length)


def alone(rows: Batch, branch: int) -> Batch:
    """The trunk and one branch of each row, as rows that do not branch."""
    found = []
    for tokens, segments, branches, mask in zip(rows.tokens, rows.segments, rows.branches, rows.mask):
        kept = (segments > 0) & ((branches == 0) | (branches == branch))
        found.append([Example(tokens[kept], mask[kept] > 0)] if kept.any() else [])
    return batch_of(found, *rows.tokens.shape)


def joined(prompt: Example, answer: Example) -> Example:
    tokens = np.concatenate([prompt.tokens, answer.tokens])
    return Example(tokens, np.arange(len(tokens)) >= len(prompt), len(prompt))


def numpy_log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@partial(jax.jit, static_argnums=0)
def logits_of(config, stacked, batch: Batch):
    """All logits [B, T, V] at once: what the losses under test avoid."""
    hidden = decoder.hidden_states(config, stacked, batch.tokens, positions=batch.positions, segments=batch.segments)
    return decoder.logits(config, stacked, hidden)


def dense_log_probability(config, stacked, batch: Batch) -> np.ndarray:
    """Log-probability of each row's targets from whole logits, in NumPy."""
    logs = numpy_log_softmax(logits_of(config, stacked, batch))[:, :-1]
    picked = np.take_along_axis(logs, np.asarray(batch.tokens)[:, 1:, None], axis=-1)[..., 0]
    return (picked * np.asarray(batch.mask)[:, 1:]).sum(axis=1)


def dense_answers(config, stacked, pairs: PairBatch) -> list[np.ndarray]:
    """Log-probabilities of the chosen and of the rejected answers, each from a row of its own, in NumPy."""
    return [dense_log_probability(config, stacked, alone(pairs.rows, side)) for side in (CHOSEN, REJECTED)]
