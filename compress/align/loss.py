"""Losses over adapters: the base is frozen, and with the adapters off it is the reference.

Letters: B rows, T time.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from compress.align.preference import PREFERENCE_LOSSES, Pairs
from compress.align.settings import Align
from compress.data.batch import CHOSEN, REJECTED, Batch, PairBatch
from compress.models.config import DecoderConfig
from compress.models.decoder import Stacked, head, hidden_states, project
from compress.models.linear import dense
from compress.models.lora import with_adapters
from compress.train.divergences import forward_kl
from compress.train.head import HeadLoss, cross_entropy, head_tokens
from compress.train.step import LossFn


def _hidden(config: DecoderConfig, stacked: Stacked, batch: Batch, remat: bool = False) -> Float[Array, "B T D"]:
    view: dict[str, Any] = {"positions": batch.positions, "segments": batch.segments, "branches": batch.branches}
    return hidden_states(config, stacked, batch.tokens, **view, remat=remat)


def token_nll(
    config: DecoderConfig, stacked: Stacked, batch: Batch, *, chunk: int = 512, remat: bool = False
) -> Float[Array, "B T"]:
    """Negative log-likelihood of every target, zero elsewhere; column t is of token t + 1, so there are T - 1.

    Differentiable in all of `stacked` but the head.
    """
    hidden = _hidden(config, stacked, batch, remat)
    parts = HeadLoss(partial(project, config), cross_entropy, chunk=chunk)
    weight = jax.lax.stop_gradient(dense(head(config, stacked), hidden.dtype))
    nll, _ = head_tokens(parts, hidden[:, :-1], weight, None, (batch.tokens[:, 1:],), batch.mask[:, 1:])
    return nll


def answers(values: Float[Array | np.ndarray, "B T"], branches: Int[Array | np.ndarray, "B T"]) -> Float[Array, "2 B"]:
    """Sums over the tokens of each pair's chosen answer, and of its rejected one."""
    return jnp.stack([jnp.where(branches == side, values, 0.0).sum(axis=1) for side in (CHOSEN, REJECTED)])


def answer_log_probabilities(
    config: DecoderConfig, stacked: Stacked, rows: Batch, *, remat: bool = False
) -> Float[Array, "2 B"]:
    """Log-probabilities of the chosen and of the rejected answers' targets, summed, in nats."""
    assert rows.branches is not None
    return -answers(token_nll(config, stacked, rows, remat=remat), rows.branches[:, 1:])


def loss_of(settings: Align, config: DecoderConfig, scale: float, *, dropout: float) -> LossFn:
    """The loss of the settings' method."""
    run: dict[str, Any] = {"dropout": dropout, "remat": settings.remat}
    if settings.method == "sft":
        return sft_loss(config, scale, **run)
    return preference_loss(config, scale, method=settings.method, sft_weight=settings.sft_weight, **settings.own, **run)


def sft_loss(config: DecoderConfig, scale: float, *, dropout: float = 0.0, remat: bool = False) -> LossFn:
    """Cross-entropy over the masked tokens, for `fit`: trainable the adapters, frozen the base."""

    def loss(adapters: Stacked, base: Stacked, batch: Batch, keys):
        policy = with_adapters(base, adapters, scale, rate=dropout, keys=keys)
        total, count = token_nll(config, policy, batch, remat=remat).sum(), batch.mask[:, 1:].sum()
        return total, count, {"cross_entropy": (total, count)}

    return loss


def preference_loss(
    config: DecoderConfig,
    scale: float,
    *,
    method: str = "dpo",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    margin: float = 0.0,
    reference_free: bool = False,
    sft_weight: float = 0.0,
    dropout: float = 0.0,
    remat: bool = False,
) -> LossFn:
    """A preference loss for `fit`, a value a pair; the batch carries the reference's log-probabilities.

    A pair counts `weight * (loss + sft_weight * NLL) + (1 - weight) * NLL`, with `weight` the batch's and NLL that of
    a token of the chosen answer. One whose answers have no target (a row that fills up the batch) counts nothing.
    Metrics: the rewards of both answers, which are beta times what the method compares, their margin; accuracy, the
    share of pairs with a positive margin; and the chosen answers' cross-entropy a token.

    Args:
      reference_free: take the reference's log-probabilities as zero.
    """
    kind = PREFERENCE_LOSSES[method]
    has_reference = needs_reference(method, reference_free)

    def loss(adapters: Stacked, base: Stacked, pairs: PairBatch, keys):
        policy = with_adapters(base, adapters, scale, rate=dropout, keys=keys)
        log_probability = answer_log_probabilities(config, policy, pairs.rows, remat=remat)
        assert pairs.rows.branches is not None
        targets = answers(pairs.rows.mask, pairs.rows.branches)
        tokens = jnp.maximum(targets, 1)
        reference = jnp.stack([pairs.reference_chosen, pairs.reference_rejected]) if has_reference else 0.0
        ratios = log_probability - reference
        chosen, rejected = ratios / tokens if kind.average else ratios
        real = targets.min(axis=0) > 0
        scaled_beta = beta * jnp.asarray(pairs.beta_scale)
        losses = kind.loss(Pairs(chosen, rejected, real, scaled_beta, label_smoothing, margin))
        nll = -(log_probability / tokens)[0]
        mixed = pairs.weight * (losses + sft_weight * nll) + (1 - pairs.weight) * nll

        def total(rows):
            return jnp.where(real, rows, 0.0).sum()

        count = real.sum().astype(jnp.float32)
        rewards = {
            "margin": beta * (chosen - rejected),
            "accuracy": (chosen > rejected).astype(jnp.float32),
            "reward_chosen": beta * chosen,
            "reward_rejected": beta * rejected,
        }
        metrics = {name: (total(rows), count) for name, rows in rewards.items()}
        metrics["cross_entropy"] = (-total(log_probability[0]), total(targets[0]))
        return total(mixed), count, metrics

    return loss


def needs_reference(method: str, reference_free: bool) -> bool:
    """Whether a preference method compares the policy with the reference."""
    return PREFERENCE_LOSSES[method].reference and not reference_free


def policy_divergence(config: DecoderConfig, policy: Stacked, reference: Stacked, batch: Batch, *, chunk: int = 512):
    """(sum, count) over the batch's targets of the exact KL(policy || reference) of next-token distributions, nats."""
    ours, theirs = _hidden(config, policy, batch), _hidden(config, reference, batch)
    weight = dense(head(config, reference), ours.dtype)

    def context(frozen, inputs):
        return (project(config, inputs[0], frozen),)

    def kl(policy_logits, reference_logits):
        return forward_kl(reference_logits, policy_logits), {}

    parts = HeadLoss(partial(project, config), kl, context, chunk)
    mask = batch.mask[:, 1:]
    values, _ = head_tokens(parts, ours[:, :-1], weight, weight, (theirs[:, :-1],), mask)
    return values.sum(), mask.sum()
