"""The distillation loss: a divergence at temperature tau, mixed with cross-entropy, over chunks of tokens, and what
else the student copies from the teacher's layers.

Letters: B batch, T time, N = T - 1 predictions, V and U vocabularies, K tokens of a cache, W = K + 1 buckets.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from compress.data.batch import Batch
from compress.distill.buckets import log_buckets
from compress.distill.cache import Cached
from compress.distill.form import loss_of_parts
from compress.distill.on_policy import on_policy_loss
from compress.distill.settings import Distill
from compress.distill.strategies import PROJECTION, Matching, make_matching
from compress.distill.temperature import Tempered
from compress.errors import RecipeError
from compress.generate.sampling import Sampling
from compress.models.attention import MASKED
from compress.models.config import DecoderConfig
from compress.models.decoder import Stacked, head, hidden_states, project, tapped_states
from compress.models.linear import dense
from compress.train.divergences import DIVERGENCES
from compress.train.head import HeadLoss, cross_entropy, head_sum, head_tokens
from compress.train.step import LossFn


def token_loss(
    student: Float[Array, " V"],
    teacher: Float[Array, " U"],
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
    return _mixed(distance, student, target, alpha)


def top_k_loss(
    student: Float[Array, " V"],
    log_probs: Float[Array, " W"],
    ids: Int[Array, " K"],
    target: Int[Array, ""],
    temperature: Float[Array, ""],
    *,
    vocabulary: int,
    divergence: Callable[[Array, Array], Array],
    alpha: float,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """`token_loss` of a teacher of which only buckets are known: of the tokens `ids`, and of all others together.

    The divergence is between the buckets of both, so it is never above the whole one (they are all f-divergences, and
    merging tokens is a channel: Csiszár 1967).

    Args:
      log_probs: the teacher's, at `temperature` already.
      vocabulary: the teacher's. Of its tokens that the student lacks, those among `ids` are left out.
    """
    common = student[:vocabulary]
    ours = log_buckets(common / temperature, ids)
    theirs = jnp.where(jnp.append(ids < common.shape[0], True), log_probs, MASKED)
    return _mixed(temperature**2 * divergence(ours, theirs), student, target, alpha)


def _mixed(distance: Array, student: Array, target: Array, alpha: float) -> tuple[Array, dict[str, Array]]:
    nll, _ = cross_entropy(student, target)
    return alpha * distance + (1 - alpha) * nll, {"divergence": distance, "cross_entropy": nll}


def loss_of(
    settings: Distill, student: DecoderConfig, teacher: DecoderConfig, dtype: Any, stop: Sequence[int] = ()
) -> LossFn:
    """The loss that the settings ask for: of `Cached` batches where they name a cache.

    Args:
      stop: token ids that end an answer of the student's.
    Raises:
      RecipeError: layers cannot be matched as asked, or the student may say what the teacher cannot read.
    """
    options: dict[str, Any] = {
        "divergence": settings.divergence,
        "mix": settings.mix,
        "temperature": settings.tau,
        "alpha": settings.alpha,
        "chunk": settings.chunk,
        "dtype": dtype if settings.rank is None else None,
        "remat": settings.remat,
    }
    if settings.teacher_cache is not None:
        return loss_of_parts(cached_loss(student, teacher.vocab_size, **options), settings)
    options["matching"] = make_matching(settings, student, teacher)
    loss = distillation_loss(student, teacher, **options)
    if settings.on_policy:
        if student.vocab_size > teacher.vocab_size:
            raise RecipeError(
                f"on_policy: the student may say {student.vocab_size} tokens and the teacher reads "
                f"{teacher.vocab_size}; take a student with no more, or leave it out"
            )
        loss = on_policy_loss(
            loss,
            distillation_loss(student, teacher, **options | {"alpha": 1.0}),
            student,
            sampling=Sampling(settings.on_policy_temperature),
            new=settings.on_policy_tokens,
            stop=stop,
            cast=partial(_cast, dtype=options["dtype"]),
        )
    return loss_of_parts(loss, settings)


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
    added by their weights, and the student's `rest` holds its projections. Without a `dtype` the student's weights are
    taken as they are, and its head is frozen: so a packed base with adapters is.
    Sums run over the tokens that the batch's mask makes targets; each is predicted from the token before it.
    """

    def context(frozen, inputs):
        hidden, target, tau = inputs
        return project(teacher, hidden, frozen), target, _above_zero(tau)

    sum_at_head = frozen_head_sum if dtype is None else head_sum
    taps = (None, None) if matching is None else matching.taps()
    parts = HeadLoss(
        project=partial(project, student),
        loss=partial(token_loss, divergence=DIVERGENCES[divergence].at(mix), alpha=alpha),
        context=context,
        chunk=chunk,
    )

    def loss(trainable: Stacked, frozen: Stacked, batch: Batch | Tempered, keys):
        batch, tau = _tempered(batch, temperature)
        cast = _cast(trainable, dtype)
        view: dict[str, Any] = {"positions": batch.positions, "segments": batch.segments}
        ours, shown = tapped_states(student, cast, batch.tokens, taps[0], **view, remat=remat)
        theirs, copied = jax.lax.stop_gradient(tapped_states(teacher, frozen, batch.tokens, taps[1], **view))
        teacher_head = jax.lax.stop_gradient(dense(head(teacher, frozen), theirs.dtype))
        mask = batch.mask[:, 1:]
        total, metrics = sum_at_head(
            parts,
            ours[:, :-1],
            dense(head(student, cast), ours.dtype),
            teacher_head,
            (theirs[:, :-1], batch.tokens[:, 1:], tau),
            mask,
        )
        if matching is not None:
            for name, values in matching.distances(shown, copied, cast.rest.get(PROJECTION)).items():
                metrics[name] = jnp.where(mask > 0, values[:, :-1] * mask, 0).sum()
                total += matching.terms[name][0] * metrics[name]
        count = mask.sum()
        return total, count, {name: (value, count) for name, value in metrics.items()}

    return loss


def cached_loss(
    student: DecoderConfig,
    vocabulary: int,
    *,
    divergence: str = "forward_kl",
    mix: float | None = None,
    temperature: float = 2.0,
    alpha: float = 0.9,
    chunk: int = 512,
    dtype=jnp.float32,
    remat: bool = False,
) -> LossFn:
    """`distillation_loss` of a teacher that is not there: the batches are `Cached`, and nothing is frozen.

    Args:
      vocabulary: rows of the teacher's head.
    """
    options: dict[str, Any] = {"divergence": DIVERGENCES[divergence].at(mix), "alpha": alpha}
    whole, top = partial(token_loss, **options), partial(top_k_loss, vocabulary=vocabulary, **options)

    def context(frozen, inputs):
        *said, target, tau = inputs
        log_probs, *ids = said
        return log_probs.astype(jnp.float32), *(i.astype(jnp.int32) for i in ids), target, _above_zero(tau)

    sum_at_head = frozen_head_sum if dtype is None else head_sum

    def loss(trainable: Stacked, frozen: None, cached: Cached, keys):
        batch, tau = _tempered(cached.batch, temperature)
        cast = _cast(trainable, dtype)
        view: dict[str, Any] = {"positions": batch.positions, "segments": batch.segments}
        ours = hidden_states(student, cast, batch.tokens, **view, remat=remat)
        said = [array[:, 1:] for array in (cached.log_probs, cached.ids) if array is not None]
        mask = batch.mask[:, 1:]
        parts = HeadLoss(partial(project, student), whole if cached.ids is None else top, context, chunk)
        inputs = (*said, batch.tokens[:, 1:], tau)
        weight = dense(head(student, cast), ours.dtype)
        total, metrics = sum_at_head(parts, ours[:, :-1], weight, None, inputs, mask)
        count = mask.sum()
        return total, count, {name: (value, count) for name, value in metrics.items()}

    return loss


def _cast(student: Stacked, dtype: Any) -> Stacked:
    return student if dtype is None else jax.tree.map(lambda leaf: leaf.astype(dtype), student)


def frozen_head_sum(*arguments: Any) -> tuple[Array, dict[str, Array]]:
    """`head_sum` that makes no gradient of the head."""
    return jax.tree.map(jnp.sum, head_tokens(*arguments))


def _tempered(batch: Batch | Tempered, temperature: float) -> tuple[Batch, Float[Array, "B N"]]:
    """A batch, and the temperature of each of its predictions."""
    batch, tau = batch if isinstance(batch, Tempered) else (batch, jnp.full(len(batch.tokens), temperature))
    return batch, jnp.broadcast_to(tau[:, None], batch.mask[:, 1:].shape)


def _above_zero(tau: Array) -> Array:
    """The inputs of a masked token are zeros, and a temperature of zero would make its gradient NaN."""
    return jnp.where(tau > 0, tau, 1)
