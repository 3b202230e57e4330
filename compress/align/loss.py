"""Losses over adapters: the base is frozen, and with the adapters off it is the reference.

Letters: B rows or pairs, T time.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from compress.align.preference import PREFERENCE_LOSSES
from compress.data.batch import Batch, PairBatch
from compress.distill.divergences import forward_kl
from compress.models.config import DecoderConfig
from compress.models.decoder import Stacked, head, hidden_states, project
from compress.models.linear import dense
from compress.models.lora import with_adapters
from compress.train.head import HeadLoss, cross_entropy, head_tokens
from compress.train.step import LossFn


def _hidden(config: DecoderConfig, stacked: Stacked, batch: Batch) -> Float[Array, "B T D"]:
    return hidden_states(config, stacked, batch.tokens, positions=batch.positions, segments=batch.segments)


def token_nll(config: DecoderConfig, stacked: Stacked, batch: Batch, *, chunk: int = 512) -> Float[Array, "B T"]:
    """Negative log-likelihood of every target, zero elsewhere; column t is of token t + 1, so there are T - 1.

    Differentiable in all of `stacked` but the head.
    """
    hidden = _hidden(config, stacked, batch)
    parts = HeadLoss(partial(project, config), cross_entropy, chunk=chunk)
    weight = jax.lax.stop_gradient(dense(head(config, stacked), hidden.dtype))
    nll, _ = head_tokens(parts, hidden[:, :-1], weight, None, (batch.tokens[:, 1:],), batch.mask[:, 1:])
    return nll


def sequence_log_probability(config: DecoderConfig, stacked: Stacked, batch: Batch) -> Float[Array, " B"]:
    """Log-probability of each row's targets, summed, in nats."""
    return -token_nll(config, stacked, batch).sum(axis=1)


def sft_loss(config: DecoderConfig, scale: float, *, dropout: float = 0.0) -> LossFn:
    """Cross-entropy over the masked tokens, for `fit`: trainable the adapters, frozen the base."""

    def loss(adapters: Stacked, base: Stacked, batch: Batch, keys):
        policy = with_adapters(base, adapters, scale, rate=dropout, keys=keys)
        total, count = token_nll(config, policy, batch).sum(), batch.mask[:, 1:].sum()
        return total, count, {"cross_entropy": (total, count)}

    return loss


def both(pairs: PairBatch) -> Batch:
    """Chosen and rejected rows one after the other, so that one pass serves both."""
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), pairs.chosen, pairs.rejected)


def preference_loss(
    config: DecoderConfig, scale: float, *, method: str = "dpo", beta: float = 0.1, dropout: float = 0.0
) -> LossFn:
    """A preference loss for `fit`, vmapped over pairs; the batch carries the reference's log-probabilities.

    A pair whose answers have no target (a row that fills up the batch) counts nothing. Metrics: the rewards
    `beta * log-ratio` of both answers, their margin, and accuracy: the share of pairs with a positive margin.
    """
    pair_loss = jax.vmap(partial(PREFERENCE_LOSSES[method], beta=beta))

    def loss(adapters: Stacked, base: Stacked, pairs: PairBatch, keys):
        # Both answers of a pair drop the same units, as one row of the data.
        keys = None if keys is None else jnp.concatenate([keys, keys])
        policy = with_adapters(base, adapters, scale, rate=dropout, keys=keys)
        chosen, rejected = jnp.split(sequence_log_probability(config, policy, both(pairs)), 2)
        chosen, rejected = chosen - pairs.reference_chosen, rejected - pairs.reference_rejected
        real = ((pairs.chosen.mask.sum(1) > 0) & (pairs.rejected.mask.sum(1) > 0)).astype(jnp.float32)
        count = real.sum()
        margin = beta * (chosen - rejected)
        rows = {
            "margin": margin,
            "accuracy": (margin > 0).astype(jnp.float32),
            "reward_chosen": beta * chosen,
            "reward_rejected": beta * rejected,
        }
        metrics = {name: ((value * real).sum(), count) for name, value in rows.items()}
        return (pair_loss(chosen, rejected) * real).sum(), count, metrics

    return loss


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
