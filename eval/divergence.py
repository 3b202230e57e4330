"""KL divergence to a baseline, its tail, and agreement of the most likely token, from token scores."""

import numpy as np

from eval.errors import EvidenceError
from eval.perplexity import require_same_tokens
from eval.scores import TokenScores
from eval.stats import Estimate, mean_by_document

TAIL = (0.5, 0.75, 0.9, 0.95, 0.99, 0.995, 0.999, 1.0)
"""The quantiles that a report keeps of the KL per token."""


def kl_mean(scores: TokenScores, baseline: str, *, confidence: float = 0.95, seed: int = 0) -> Estimate:
    """Mean KL(baseline || model) a token, in nats."""
    return mean_by_document(_of(scores.kl, baseline), scores.document, confidence=confidence, seed=seed)


def kl_quantile(scores: TokenScores, baseline: str, level: float) -> Estimate:
    """A quantile over tokens of KL(baseline || model) in nats; level 1 is the maximum. A point value, no interval."""
    kl = _of(scores.kl, baseline)
    if not np.all(np.isfinite(kl)):
        return Estimate(float("nan"))
    return Estimate(float(np.quantile(kl.astype(np.float64), level)))


def top1_agreement(scores: TokenScores, baseline: str, *, confidence: float = 0.95, seed: int = 0) -> Estimate:
    """Share of tokens for which model and baseline rank the same token first."""
    return mean_by_document(_of(scores.agree, baseline), scores.document, confidence=confidence, seed=seed)


def kl_gain(
    before: TokenScores, after: TokenScores, baseline: str, *, confidence: float = 0.95, seed: int = 0
) -> Estimate:
    """KL(baseline || before) - KL(baseline || after), mean a token, paired: positive if `after` is the closer one."""
    require_same_tokens(before, after)
    difference = _of(before.kl, baseline).astype(np.float64) - _of(after.kl, baseline)
    return mean_by_document(difference, after.document, confidence=confidence, seed=seed)


def _of(by_baseline, baseline):
    if baseline not in by_baseline:
        have = ", ".join(sorted(by_baseline)) or "none"
        raise EvidenceError(f"no comparison with {baseline}; compared with: {have}")
    return by_baseline[baseline]
