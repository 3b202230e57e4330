"""Reward margins, preference accuracy and win rates of held-out pairs, from log-probabilities.

Letters: P pairs. A log-probability is that of a whole completion given its prompt, in nats. A pair is its own document.
"""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float, Shaped

from eval.errors import EvidenceError
from eval.stats import Estimate, paired_proportion, proportion, ratio


@dataclasses.dataclass(frozen=True)
class PairScores:
    """One model's and its reference's log-probabilities on the same pairs; `beta` scales the margins."""

    chosen: Float[np.ndarray, " P"]
    rejected: Float[np.ndarray, " P"]
    reference_chosen: Float[np.ndarray, " P"]
    reference_rejected: Float[np.ndarray, " P"]
    beta: float = 0.1

    def __post_init__(self):
        names = ("rejected", "reference_chosen", "reference_rejected")
        shapes = {name: np.shape(getattr(self, name)) for name in names}
        bad = [f"{name} {shape}" for name, shape in shapes.items() if shape != np.shape(self.chosen)]
        if bad:
            raise EvidenceError(f"{len(self.chosen)} chosen log-probabilities do not fit {', '.join(bad)}")

    @property
    def pairs(self) -> int:
        return len(self.chosen)

    def margins(self) -> Float[np.ndarray, " P"]:
        """DPO's implicit reward difference: beta (log p/p_ref of chosen - log p/p_ref of rejected).

        https://arxiv.org/abs/2305.18290, below equation 7.
        """
        gain = self.chosen.astype(np.float64) - self.reference_chosen
        return self.beta * (gain - (self.rejected.astype(np.float64) - self.reference_rejected))

    def prefers(self) -> Bool[np.ndarray, " P"]:
        """Whether the model finds the chosen completion the likelier one; a tie is a no."""
        return self.chosen > self.rejected

    def reference_prefers(self) -> Bool[np.ndarray, " P"]:
        """The same of the reference, that is of the model before alignment."""
        return self.reference_chosen > self.reference_rejected

    @property
    def finite(self) -> bool:
        return bool(np.all(np.isfinite(self.margins())))


def reward_margin(scores: PairScores, *, confidence: float = 0.95, seed: int = 0) -> Estimate:
    """Mean implicit reward of chosen over rejected."""
    margins = scores.margins()
    return ratio(margins, np.ones(len(margins)), confidence=confidence, seed=seed)


def reward_accuracy(scores: PairScores, *, confidence: float = 0.95) -> Estimate:
    """Share of pairs with a positive margin: the win rate over the reference; a tie is half."""
    return win_rate(scores.margins(), np.zeros(scores.pairs), confidence=confidence)


def preference_accuracy(scores: PairScores, *, confidence: float = 0.95) -> Estimate:
    """Share of pairs whose chosen completion the model finds likelier than the rejected one."""
    if not scores.finite:
        return Estimate(float("nan"))
    return proportion(int(np.sum(scores.prefers())), scores.pairs, confidence=confidence)


def preference_accuracy_gain(scores: PairScores, *, confidence: float = 0.95) -> Estimate:
    """Preference accuracy minus the reference's, paired by pair: above 0 if alignment helped."""
    if not scores.finite:
        return Estimate(float("nan"))
    return paired_proportion(scores.reference_prefers(), scores.prefers(), confidence=confidence)


def win_rate(ours: Shaped[np.ndarray, " P"], theirs: Shaped[np.ndarray, " P"], *, confidence: float = 0.95) -> Estimate:
    """Share of items on which `ours` scores higher; a tie is half a win. NaN if any score is NaN."""
    if np.shape(ours) != np.shape(theirs):
        raise EvidenceError(f"win rate: {np.shape(ours)} scores against {np.shape(theirs)}; give the same items")
    if np.any(np.isnan(ours)) or np.any(np.isnan(theirs)):
        return Estimate(float("nan"))
    wins = float(np.sum(ours > theirs)) + 0.5 * float(np.sum(ours == theirs))
    return proportion(wins, len(ours), confidence=confidence)
