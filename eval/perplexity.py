"""Perplexity, bits per byte and the relative increase over a baseline, from token scores."""

import math

import numpy as np

from eval.errors import EvidenceError
from eval.scores import TokenScores
from eval.stats import Estimate, exp, mean_by_document, ratio, sums_by_document


def perplexity(scores: TokenScores, *, confidence: float = 0.95, seed: int = 0) -> Estimate:
    """Perplexity: exp of the mean negative log-likelihood a token, and the mean's interval carried through exp."""
    return mean_by_document(scores.nll, scores.document, confidence=confidence, seed=seed).map(exp)


def bits_per_byte(scores: TokenScores, *, confidence: float = 0.95, seed: int = 0) -> Estimate:
    """Negative log-likelihood in bits over the bytes of the text: comparable across tokenizers.

    Raises:
      EvidenceError: if the scores carry no byte counts.
    """
    if scores.bytes is None:
        raise EvidenceError("bits per byte needs the bytes of each token: fill Chunk.bytes")
    bits = sums_by_document(scores.nll / math.log(2), scores.document)
    return ratio(bits, sums_by_document(scores.bytes, scores.document), confidence=confidence, seed=seed)


def perplexity_increase(
    baseline: TokenScores, model: TokenScores, *, confidence: float = 0.95, seed: int = 0
) -> Estimate:
    """Relative increase exp(mean(nll of model - nll of baseline)) - 1, paired by token: 0.05 is 5% more."""
    require_same_tokens(baseline, model)
    difference = model.nll.astype(np.float64) - baseline.nll
    mean = mean_by_document(difference, model.document, confidence=confidence, seed=seed)
    return mean.map(lambda x: math.expm1(x) if x < 709 else math.inf)


def require_same_tokens(a: TokenScores, b: TokenScores) -> None:
    """Refuse to pair scores of different tokens.

    Raises:
      EvidenceError: if token counts or documents differ.
    """
    if not np.array_equal(a.document, b.document):
        raise EvidenceError(
            f"scores of {a.tokens} and {b.tokens} tokens are not of the same documents: score both in one pass"
        )
