"""Estimates with confidence intervals: ratios of sums by document, paired and single proportions.

Tokens of one document are not independent, so a document is the unit that varies. Letters: N tokens, D documents.
"""

import dataclasses
import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np
from jaxtyping import Float, Int, Shaped

from eval.errors import EvidenceError

RESAMPLES = 2000
MIN_DOCUMENTS = 4
"""Fewer documents than this say nothing about how documents vary: no interval is given."""

_BLOCK = 1 << 22  # resample counts held at once (float64)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A value and its two-sided interval; `low` and `high` are None where there is no (meaningful) interval."""

    value: float
    low: float | None = None
    high: float | None = None
    confidence: float | None = None

    def map(self, increasing: Callable[[float], float]) -> "Estimate":
        """Carry value and limits through an increasing function, which keeps the coverage."""
        low = None if self.low is None else increasing(self.low)
        high = None if self.high is None else increasing(self.high)
        return Estimate(increasing(self.value), low, high, self.confidence)


def exp(x: float) -> float:
    """e^x that overflows to infinity instead of raising."""
    return math.inf if x > 709.0 else math.exp(x)


def sums_by_document(values: Shaped[np.ndarray, " N"], document: Int[np.ndarray, " N"]) -> Float[np.ndarray, " D"]:
    """Sum `values` within each document, in float64, documents in ascending order of their id."""
    _, index = np.unique(document, return_inverse=True)
    return np.bincount(index, weights=values.astype(np.float64))


def ratio(
    numerator: Float[np.ndarray, " D"],
    denominator: Float[np.ndarray, " D"],
    *,
    confidence: float = 0.95,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Estimate:
    """Estimate sum(numerator) / sum(denominator) over documents drawn at random, by the bootstrap-t.

    Documents are resampled whole. Each resample's deviation from the estimate is divided by its own linearized
    (delta-method) standard error, and the quantiles of that studentized deviation stand in for Student's t: Efron
    and Tibshirani, An Introduction to the Bootstrap (1993), section 12.5. With the 10 to 30 documents of a small
    evaluation the sum of KL over documents is skewed to the right. The symmetric t interval and the percentile and
    BCa bootstraps then set their upper limit too low, and the upper limit is the one that a gate trusts. The
    bootstrap-t is second-order accurate, and in simulations of that setting it missed there the least often.

    Args:
      numerator: per document, for example its sum of KL.
      denominator: per document, for example its tokens; positive in total.
      confidence: two-sided; each limit alone errs with half of 1 - confidence.
      seed: makes the interval a function of the data.
      resamples: drawn in blocks, so memory is bounded.

    Returns:
      An Estimate without limits if there are fewer than MIN_DOCUMENTS documents or a sum is not finite.
    """
    if not 0 < confidence < 1:
        raise EvidenceError(f"confidence = {confidence}: must lie between 0 and 1, for example 0.95")
    count, total = len(numerator), float(denominator.sum())
    with np.errstate(all="ignore"):
        value = float(numerator.sum() / total) if total > 0 else math.nan
    if count < MIN_DOCUMENTS or not math.isfinite(value):
        return Estimate(value)
    residual = numerator - value * denominator
    error = math.sqrt(float(residual @ residual) * count / (count - 1)) / total
    deviations = _studentized(residual, denominator / total, error * total, (seed, resamples))
    tail = (1 - confidence) / 2
    lower, upper = np.quantile(deviations, [tail, 1 - tail])
    # The true value is in the interval's formula, not the estimate: clamp, so that an interval holds its estimate.
    low, high = value - max(float(upper), 0.0) * error, value - min(float(lower), 0.0) * error
    return Estimate(value, low, high, confidence)


def _studentized(residual, share, error, draw) -> np.ndarray:
    """The resamples' deviations over their own standard errors; `share` is the denominator, summing to 1."""
    seed, resamples = draw
    count = len(residual)
    rng = np.random.default_rng(seed)
    out: list[np.ndarray] = []
    while resamples > 0:
        rows = min(resamples, max(1, _BLOCK // count))
        resamples -= rows
        weight = rng.multinomial(count, np.full(count, 1 / count), size=rows).astype(np.float64)
        total = np.maximum(weight @ share, 1e-300)  # a resample of empty documents only
        shift = (weight @ residual) / total
        square = weight @ residual**2 - 2 * shift * (weight @ (residual * share)) + shift**2 * (weight @ share**2)
        spread = np.sqrt(np.maximum(square, 0) * count / (count - 1)) / total
        # A resample that drew one document only, or equal ones, has no spread of its own: lend it the sample's.
        spread = np.where(spread > 1e-6 * error, spread, error)
        out.append(np.divide(shift, spread, out=np.zeros(rows), where=spread > 0))
    return np.concatenate(out)


def mean_by_document(
    values: Shaped[np.ndarray, " N"],
    document: Int[np.ndarray, " N"],
    *,
    confidence: float = 0.95,
    seed: int = 0,
) -> Estimate:
    """The mean over tokens, each token weighing the same, with an interval by document.

    Given the difference of two models' values on the same tokens, this is the paired comparison.
    """
    tokens = sums_by_document(np.ones(len(values)), document)
    return ratio(sums_by_document(values, document), tokens, confidence=confidence, seed=seed)


def proportion(successes: int | float, trials: int, *, confidence: float = 0.95) -> Estimate:
    """A share of independent trials, with Wilson's score interval; a tie may count as half a success.

    Wilson (1927), "Probable inference, the law of succession, and statistical inference". It stays inside 0..1 and
    has a width even when every trial succeeded.
    """
    if trials < 1:
        return Estimate(math.nan)
    z2 = NormalDist().inv_cdf((1 + confidence) / 2) ** 2
    share = successes / trials
    middle = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = math.sqrt(z2 * (share * (1 - share) / trials + z2 / (4 * trials**2))) / (1 + z2 / trials)
    low, high = min(max(middle - half, 0.0), share), max(min(middle + half, 1.0), share)
    return Estimate(share, low, high, confidence)


def paired_proportion(
    before: Shaped[np.ndarray, " N"],
    after: Shaped[np.ndarray, " N"],
    *,
    confidence: float = 0.95,
) -> Estimate:
    """The gain of `after` over `before` in the share of items that are true, item by item.

    The interval is Agresti and Min's (2005, https://doi.org/10.1002/sim.1781): half an item is added to each cell of
    the two-by-two table before Wald's formula, which then also holds for few items and for no disagreements.
    """
    if before.shape != after.shape:
        raise EvidenceError(f"paired items: {before.shape} before and {after.shape} after; give the same items")
    if not len(before):
        return Estimate(math.nan)
    won, lost = _discordant(before, after)
    total, gain, both = len(before) + 2, won - lost, won + lost + 1
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    half = z * math.sqrt(both - gain**2 / total) / total
    value = gain / len(before)
    low, high = max(gain / total - half, -1.0), min(gain / total + half, 1.0)
    return Estimate(value, min(low, value), max(high, value), confidence)


def mcnemar(before: Shaped[np.ndarray, " N"], after: Shaped[np.ndarray, " N"]) -> float:
    """The exact two-sided p-value that `before` and `after` are true equally often, from the items that changed.

    McNemar (1947), with the binomial distribution in place of chi-square, so that few changes are no problem.
    """
    won, lost = _discordant(before, after)
    changed, fewer = won + lost, min(won, lost)
    if not changed:
        return 1.0
    tail = sum(math.comb(changed, k) for k in range(fewer + 1))
    return min(1.0, 2 * tail / 2**changed)


def _discordant(before, after) -> tuple[int, int]:
    before, after = before.astype(bool), after.astype(bool)
    return int(np.sum(after & ~before)), int(np.sum(before & ~after))
