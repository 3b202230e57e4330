"""Logits to scores per token, for several models at once, in bounded memory.

Letters: N tokens of a chunk (or of all), V vocabulary. Models may differ in V by padding columns at the end.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from eval.errors import EvidenceError

ROWS = 32
"""Tokens whose log-probabilities exist at once: 32 rows of a 262k vocabulary are 34 MB."""


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of the held-out data with every model's prediction of them.

    Attributes:
      logits: by model name; row n predicts `targets[n]`. Keep N small: the caller holds N x V floats a model.
      targets: token ids.
      mask: true where the token is scored. What lies elsewhere is never looked at, NaN included.
      document: id of the document (the unit of the statistics) that the target belongs to.
      bytes: UTF-8 bytes that the target stands for, for bits per byte; None if not known.
    """

    logits: Mapping[str, Float[Array | np.ndarray, "N _"]]
    targets: Int[Array | np.ndarray, " N"]
    mask: Shaped[Array | np.ndarray, " N"]
    document: Int[Array | np.ndarray, " N"]
    bytes: Int[Array | np.ndarray, " N"] | None = None


@dataclasses.dataclass(frozen=True)
class TokenScores:
    """One model's scores on the tokens that were masked in, on the host.

    Attributes:
      nll: negative log-likelihood of the target in nats, over the model's whole vocabulary.
      document: document id of each token.
      kl: by baseline name, KL(baseline || model) in nats over the columns that both have.
      agree: by baseline name, whether both rank the same token first.
      bytes: bytes of each token, or None.
    """

    nll: Float[np.ndarray, " N"]
    document: Int[np.ndarray, " N"]
    kl: Mapping[str, Float[np.ndarray, " N"]] = dataclasses.field(default_factory=dict)
    agree: Mapping[str, Bool[np.ndarray, " N"]] = dataclasses.field(default_factory=dict)
    bytes: Int[np.ndarray, " N"] | None = None

    @property
    def tokens(self) -> int:
        return len(self.nll)

    @property
    def documents(self) -> int:
        return len(np.unique(self.document))


def token_nll(logits: Float[Array, " V"], target: Int[Array, ""]) -> Float[Array, ""]:
    """The negative log-likelihood of `target` in nats; NaN if `target` is no column."""
    logits = logits.astype(jnp.float32)
    picked = jnp.take(logits, target, mode="fill", fill_value=jnp.nan)
    return jax.nn.logsumexp(logits) - jnp.where(target < 0, jnp.nan, picked)


def token_kl(p_logits: Float[Array, " V"], q_logits: Float[Array, " V"]) -> Float[Array, ""]:
    """KL(p || q) in nats of two logit vectors, at least 0.

    Sums the Bregman form p log(p/q) - p + q, whose terms are all nonnegative: an error e in d = log q - log p costs
    e * d instead of e, so that near-identical models get a KL near 0 and not one near float32's epsilon.
    """
    log_p = jax.nn.log_softmax(p_logits.astype(jnp.float32))
    log_q = jax.nn.log_softmax(q_logits.astype(jnp.float32))
    p, q, d = jnp.exp(log_p), jnp.exp(log_q), log_q - log_p
    near = jnp.abs(d) < 1
    small = jnp.where(near, d, 0)
    term = jnp.where(near, p * (jnp.expm1(small) - small), q - p - p * jnp.where(p > 0, d, 0))
    # log p = -inf leaves d infinite or NaN where the term's limit is q.
    return jnp.maximum(jnp.sum(jnp.where(log_p == -jnp.inf, q, term)), 0)


@jax.jit
def score_tokens(
    logits: Float[Array | np.ndarray, "N V"],
    targets: Int[Array | np.ndarray, " N"],
    baselines: dict[str, Float[Array | np.ndarray, "N _"]],
) -> tuple[Float[Array, " N"], dict[str, Float[Array, " N"]], dict[str, Bool[Array, " N"]]]:
    """Score one model on N tokens: nll, and against each baseline the KL(baseline || model) and top-1 agreement.

    A baseline with more or fewer columns is compared over the first min(V) ones, renormalized, since what lies
    beyond is padding. Logits of any float dtype; all is computed in float32, ROWS tokens at a time.
    """

    def score(row):
        own, target, others = row
        kl, agree = {}, {}
        for name, other in others.items():
            width = min(own.shape[-1], other.shape[-1])
            kl[name] = token_kl(other[:width], own[:width])
            agree[name] = jnp.argmax(other[:width]) == jnp.argmax(own[:width])
        return token_nll(own, target), kl, agree

    return jax.lax.map(score, (logits, targets, baselines), batch_size=ROWS)


def score(chunks: Iterable[Chunk], pairs: Sequence[tuple[str, str]] = ()) -> dict[str, TokenScores]:
    """Score every model of the chunks, by name, and compare the (baseline, model) `pairs`.

    Chunks may have any number of tokens, and their boundaries do not change the result; equal sizes compile once.

    Raises:
      EvidenceError: for chunks that disagree in their models or shapes, a pair that names an absent model, a scored
        target outside a vocabulary, or no scored token at all.
    """
    parts: dict[str, list[tuple]] = {}
    shared: list[tuple] = []
    for chunk in chunks:
        _check(chunk, pairs, set(parts) or set(chunk.logits))
        keep = np.asarray(chunk.mask) > 0
        size = None if chunk.bytes is None else np.asarray(chunk.bytes)[keep]
        shared.append((np.asarray(chunk.document)[keep], size))
        for model, logits in chunk.logits.items():
            against = {b: chunk.logits[b] for b, m in pairs if m == model}
            parts.setdefault(model, []).append(_kept(score_tokens(logits, chunk.targets, against), keep))
    if not sum(len(document) for document, _ in shared):
        raise EvidenceError("no token to score: the data is empty or every token is masked out")
    document = np.concatenate([d for d, _ in shared]).astype(np.int32)
    sizes = [s for _, s in shared if s is not None]
    size = np.concatenate(sizes).astype(np.int32) if len(sizes) == len(shared) else None
    out = {}
    for model, rows in parts.items():
        nll, kl, agree = jax.tree.map(lambda *a: np.concatenate(a), *rows)
        out[model] = TokenScores(nll, document, kl, agree, size)
    return out


def _kept(scored, keep: np.ndarray):
    """The scored tokens' values, on the host."""
    return jax.tree.map(lambda a: np.asarray(a)[keep], scored)


def _check(chunk: Chunk, pairs, models: set[str]) -> None:
    """Refuse what would otherwise be scored wrongly without a word."""
    if set(chunk.logits) != models:
        raise EvidenceError(f"a chunk has logits of {sorted(chunk.logits)}, the first one of {sorted(models)}")
    absent = sorted({name for pair in pairs for name in pair} - models)
    if absent:
        raise EvidenceError(f"no logits of {', '.join(absent)} to compare; the chunks have {', '.join(sorted(models))}")
    targets, keep = np.asarray(chunk.targets), np.asarray(chunk.mask) > 0
    fields = {"mask": chunk.mask, "document": chunk.document, "bytes": chunk.bytes}
    bad = [f"{k} {np.shape(v)}" for k, v in fields.items() if v is not None and np.shape(v) != targets.shape]
    bad += [f"logits of {k} {v.shape}" for k, v in chunk.logits.items() if v.ndim != 2 or len(v) != len(targets)]
    if bad:
        raise EvidenceError(f"a chunk of {len(targets)} targets does not fit its {', '.join(bad)}")
    scored = targets[keep]
    for model, logits in chunk.logits.items():
        if scored.size and not 0 <= int(scored.min()) <= int(scored.max()) < logits.shape[1]:
            worst = int(scored.min()) if scored.min() < 0 else int(scored.max())
            raise EvidenceError(f"target id {worst} is outside the vocabulary of {model} ({logits.shape[1]} columns)")
