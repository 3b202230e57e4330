"""Preference losses, each a function of a batch of pairs; a new one is a function and a line below.

Letters: P pairs.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

PairLosses = Float[Array, " P"]


class Pairs(NamedTuple):
    """What a loss sees.

    Attributes:
      chosen, rejected: an answer's log-ratio of policy to reference in nats, or its log-probability where there is
        no reference; summed over the answer's tokens, or averaged, as the method's entry says.
      real: false on what fills up a batch, which no pair's loss may depend on.
      beta, label_smoothing, margin: the settings of these names; a method reads those of its own.
    """

    chosen: Float[Array, " P"]
    rejected: Float[Array, " P"]
    real: Bool[Array, " P"]
    beta: Float[Array, " P"] | float
    label_smoothing: float = 0.0
    margin: float = 0.0

    @property
    def logits(self) -> Float[Array, " P"]:
        """`beta * (chosen - rejected)`: the margin of implicit rewards."""
        return self.beta * (self.chosen - self.rejected)


class Method(NamedTuple):
    """A loss and what it is handed.

    Attributes:
      loss: gives a value a pair.
      reference: whether log-ratios to the reference are handed in, or log-probabilities of the policy alone.
      average: whether these are means over the answer's tokens, or sums.
      whole_batch: whether a pair's loss depends on the other pairs, so that the batch cannot be cut.
    """

    loss: Callable[[Pairs], PairLosses]
    reference: bool = True
    average: bool = False
    whole_batch: bool = False


def dpo(pairs: Pairs) -> PairLosses:
    """`-log sigmoid(beta * (chosen - rejected))` (DPO, arXiv:2305.18290, eq. 7)."""
    return -jax.nn.log_sigmoid(pairs.logits)


def cdpo(pairs: Pairs) -> PairLosses:
    """DPO's loss expected where a share `label_smoothing` of preferences is flipped (conservative DPO).

    Eric Mitchell, "A note on DPO with noisy preferences & relationship to IPO" (2023), eq. 3.
    """
    kept, flipped = _both_labels(pairs)
    return (1 - pairs.label_smoothing) * kept + pairs.label_smoothing * flipped


def robust(pairs: Pairs) -> PairLosses:
    """The loss whose mean over flipped labels is DPO's of the true ones (robust DPO, arXiv:2403.00409, section 3).

    It has no lower bound: `label_smoothing` of the pairs are held to be wrong, however sure the policy is.
    """
    kept, flipped = _both_labels(pairs)
    return ((1 - pairs.label_smoothing) * kept - pairs.label_smoothing * flipped) / (1 - 2 * pairs.label_smoothing)


def ipo(pairs: Pairs) -> PairLosses:
    """`(chosen - rejected - 1 / (2 beta))^2` (IPO, arXiv:2310.12036, eq. 17, where beta is tau).

    Of means over tokens, as its authors later advised and as TRL has it; the paper sums.
    """
    return (pairs.chosen - pairs.rejected - 1 / (2 * pairs.beta)) ** 2


def hinge(pairs: Pairs) -> PairLosses:
    """`max(0, margin - beta * (chosen - rejected))` (RSO's hinge loss, arXiv:2309.06657).

    Without a reference and with beta = 1 it is SLiC's calibration loss (arXiv:2305.10425).
    """
    return jax.nn.relu(pairs.margin - pairs.logits)


def kto(pairs: Pairs) -> PairLosses:
    """`1 - (sigmoid(beta (chosen - z)) + sigmoid(beta (z - rejected))) / 2` (KTO, arXiv:2402.01306, eq. 8).

    Chosen answers are its desirable examples and rejected ones its undesirable, all of weight 1. The reference
    point z stands for KL(policy || reference) and has no gradient: the mean log-ratio of the batch's answers, not
    below 0. The paper takes answers to other prompts for it, which costs one more pass of policy and reference.
    """
    ratios = jnp.where(pairs.real, pairs.chosen + pairs.rejected, 0.0)
    z = jax.lax.stop_gradient(jax.nn.relu(ratios.sum() / jnp.maximum(2 * pairs.real.sum(), 1)))
    desirable, undesirable = pairs.chosen - z, z - pairs.rejected
    return 1 - (jax.nn.sigmoid(pairs.beta * desirable) + jax.nn.sigmoid(pairs.beta * undesirable)) / 2


def orpo(pairs: Pairs) -> PairLosses:
    """`-chosen - beta * log sigmoid(log odds(chosen) - log odds(rejected))` (ORPO, arXiv:2403.07691, eqs. 6 and 7).

    odds(y) = P(y) / (1 - P(y)), and log P(y) is the mean over tokens; beta is the paper's lambda.
    """
    return -pairs.chosen - pairs.beta * jax.nn.log_sigmoid(_log_odds(pairs.chosen) - _log_odds(pairs.rejected))


def simpo(pairs: Pairs) -> PairLosses:
    """`-log sigmoid(beta * (chosen - rejected) - margin)`, of means over tokens (SimPO, arXiv:2405.14734, eq. 6)."""
    return -jax.nn.log_sigmoid(pairs.logits - pairs.margin)


def _both_labels(pairs: Pairs) -> tuple[PairLosses, PairLosses]:
    """DPO's loss of the pairs as labelled, and with their answers exchanged."""
    return -jax.nn.log_sigmoid(pairs.logits), -jax.nn.log_sigmoid(-pairs.logits)


def _log_odds(log_probability: Float[Array, " P"]) -> Float[Array, " P"]:
    # A probability that rounds to 1 has infinite odds.
    below_one = jnp.minimum(log_probability, -1e-6)
    return below_one - jnp.log(-jnp.expm1(below_one))


PREFERENCE_LOSSES = {
    "dpo": Method(dpo),
    "cdpo": Method(cdpo),
    "robust": Method(robust),
    "ipo": Method(ipo, average=True),
    "hinge": Method(hinge),
    "kto": Method(kto, whole_batch=True),
    "orpo": Method(orpo, reference=False, average=True),
    "simpo": Method(simpo, reference=False, average=True),
}
