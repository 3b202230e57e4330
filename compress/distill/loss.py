"""The distillation loss: a divergence at temperature tau, mixed with cross-entropy, over chunks of tokens, and what
else the student copies from the teacher's layers.

Letters: B batch, T time, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from compress.data.batch import Batch
from compress.distill.divergences import DIVERGENCES
from compress.distill.settings import Distill
from compress.distill.strategies import PROJECTION, Matching, make_matching
from compress.distill.temperature import Tempered
from compress.models.config import DecoderConfig
from compress.models.decoder import Stacked, head, project, tapped_states
from compress.models.linear import dense
from compress.train.head import HeadLoss, cross_entropy, head_sum
from compress.train.step import LossFn


def token_loss(
    student: Float[Array, " V"],
    teacher: Float[Array, " W"],
    target: Int[Array, ""],
    temperature: Float[Array, ""],
    *,
    divergence: Callable[[Array, Array], Array],
    alpha: float,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """`alpha * tau^2 * D(teacher / tau, student / tau) + (1 - alpha) * cross-entropy` (arXiv:1503.02531, section 2).

    tau^2 keeps the gradient's scale the same at every temperature. Vocabularies that differ by padding rows are
    compared over their common rows; the cross-entropy is over all of the student's.
    """
    common = min(student.shape[0], teacher.shape[0])
    distance = temperature**2 * divergence(student[:common] / temperature, teacher[:common] / temperature)
    nll, _ = cross_entropy(student, target)
    return alpha * distance + (1 - alpha) * nll, {"divergence": distance, "cross_entropy": nll}


def loss_of(settings: Distill, student: DecoderConfig, teacher: DecoderConfig, dtype: Any) -> LossFn:
    """The loss that the settings ask for.

    Raises:
      RecipeError: layers cannot be matched as asked.
    """
    return distillation_loss(
        student,
        teacher,
        divergence=settings.divergence,
        mix=settings.mix,
        temperature=settings.temperature,
        alpha=settings.alpha,
        matching=make_matching(settings, student, teacher),
        chunk=settings.chunk,
        dtype=dtype,
        remat=settings.remat,
    )


def distillation_loss(
    student: DecoderConfig,
    teacher: DecoderConfig,
    *,
    divergence: str = "forward_kl",
    mix: float | None = None,
    temperature: float = 2.0,
    alpha: float = 0.9,
    matching: Matching | None = None,
    chunk: int = 512,
    dtype=jnp.float32,
    remat: bool = False,
) -> LossFn:
    """A loss for `fit`: trainable is the student's `Stacked`, frozen the teacher's.

    A `Tempered` batch is taken at its own temperature, any other at `temperature`. With `matching`, its distances are
    added by their weights, and the student's `rest` holds its projections.
    Sums run over the tokens that the batch's mask makes targets; each is predicted from the token before it.
    """

    def context(frozen, inputs):
        hidden, target, tau = inputs
        # The inputs of a masked token are zeros, and a temperature of zero would make its gradient NaN.
        return project(teacher, hidden, frozen), target, jnp.where(tau > 0, tau, 1)

    taps = (None, None) if matching is None else matching.taps()
    parts = HeadLoss(
        project=partial(project, student),
        loss=partial(token_loss, divergence=DIVERGENCES[divergence].at(mix), alpha=alpha),
        context=context,
        chunk=chunk,
    )

    def loss(trainable: Stacked, frozen: Stacked, batch: Batch | Tempered, keys):
        batch, tau = batch if isinstance(batch, Tempered) else (batch, jnp.full(len(batch.tokens), temperature))
        cast = jax.tree.map(lambda leaf: leaf.astype(dtype), trainable)
        view: dict[str, Any] = {"positions": batch.positions, "segments": batch.segments}
        ours, shown = tapped_states(student, cast, batch.tokens, taps[0], **view, remat=remat)
        theirs, copied = jax.lax.stop_gradient(tapped_states(teacher, frozen, batch.tokens, taps[1], **view))
        teacher_head = jax.lax.stop_gradient(dense(head(teacher, frozen), theirs.dtype))
        mask = batch.mask[:, 1:]
        total, metrics = head_sum(
            parts,
            ours[:, :-1],
            head(student, cast),
            teacher_head,
            (theirs[:, :-1], batch.tokens[:, 1:], jnp.broadcast_to(tau[:, None], mask.shape)),
            mask,
        )
        if matching is not None:
            for name, values in matching.distances(shown, copied, cast.rest.get(PROJECTION)).items():
                metrics[name] = jnp.where(mask > 0, values[:, :-1] * mask, 0).sum()
                total += matching.terms[name][0] * metrics[name]
        count = mask.sum()
        return total, count, {name: (value, count) for name, value in metrics.items()}

    return loss
