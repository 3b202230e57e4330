"""Heal a quantized model: train what its format leaves free, by KL to the unquantized model alone.

What trains is a factor of each group's scale, of each norm's weight and of each bias; all start at 1, so the model is
first as it was. Codes and zero points stay, and so do formats. A scale is rounded as it will be stored in every step,
and the gradient passes that by (straight-through, arXiv:1308.3432). That scales alone regain much of what rounding
cost: EfficientQAT, arXiv:2407.11062, section 3.3.

Letters: L stacked layers, O outputs, I inputs, G groups of a row, B rows, T tokens, D model, V vocabulary.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from compress.data.batch import Batch
from compress.errors import DataError
from compress.models.config import DecoderConfig
from compress.models.decoder import FINAL_NORM, Stacked, head, hidden_states, project, stack, unstack
from compress.models.folder import cast, to_host
from compress.models.linear import Formed, dense
from compress.quantize.grid import decode, grid_of, stored_scale
from compress.train.course import validator
from compress.train.divergences import forward_kl
from compress.train.fit import fit
from compress.train.head import HeadLoss, head_tokens
from compress.train.step import FitSettings, LossFn
from compress.train.trace import Trace
from export.pytree import register
from export.quantized import QuantizedTensor

HELD_OUT = 8
"""One batch in so many judges the healing and is not trained on."""


@dataclasses.dataclass(frozen=True)
class Taught:
    """A batch, and what the unquantized model's head is given for it."""

    batch: Batch
    hidden: Float[Array | np.ndarray, "B T D"]


register(Taught)


def heal(
    config: DecoderConfig,
    quantized: Mapping[str, Any],
    parent: Mapping[str, Any],
    batches: Sequence[Batch],
    *,
    steps: int,
    learning_rate: float,
    seed: int = 0,
    on_step: Callable[[int, dict[str, float]], None] = lambda step, row: None,
) -> tuple[Mapping[str, Any], Trace]:
    """The quantized weights with healed scales, norms and biases; as they were, if held-out batches say so.

    Args:
      quantized: embedding and head are taken as they are.
      parent: the unquantized weights. They may be rotated or scaled otherwise than `quantized`, as only what they say
        is looked at.
      batches: two at least, all of one shape; one in `HELD_OUT` is held out.
      learning_rate: the peak, of factors.

    Raises:
      DataError: fewer than two batches, or a loss that is NaN or infinite.
    """
    if len(batches) < 2:
        raise DataError("healing needs two batches at least: one to train on, one to judge by")
    taught, teacher_head = teach(config, parent, batches)
    base = stack(config, cast(quantized, jnp.float32))
    factors = ones(base)
    frozen = base, teacher_head
    apart = set(range(HELD_OUT - 1, len(taught), HELD_OUT)) or {len(taught) - 1}
    held = [taught[at] for at in sorted(apart)]
    training = [item for at, item in enumerate(taught) if at not in apart]
    rows = len(batches[0].tokens)
    settings = FitSettings(
        steps=steps, learning_rate=learning_rate, weight_decay=0.0, global_batch=rows, rebound=0.0, seed=seed
    )
    loss = healing_loss(config)
    trained, trace = fit(
        loss,
        factors,
        frozen,
        passes(training, seed),
        settings,
        validate=validator(loss, frozen, held, None),
        on_step=on_step,
    )
    if trace.best_loss >= trace.validations[0]["loss"]:
        return quantized, trace
    return to_host(unstack(config, times(base, trained, config.norm_offset, stored))), trace


def teach(
    config: DecoderConfig, parent: Mapping[str, Any], batches: Sequence[Batch]
) -> tuple[list[Taught], Float[Array, "V D"]]:
    """Each batch with the parent's hidden states, and the head that makes logits of them."""
    stacked = stack(config, cast(parent, jnp.float32))

    @jax.jit
    def states(stacked: Stacked, batch: Batch):
        return hidden_states(config, stacked, batch.tokens, positions=batch.positions, segments=batch.segments)

    taught = [Taught(batch, np.asarray(states(stacked, batch))) for batch in batches]
    return taught, dense(head(config, stacked), jnp.float32)


def passes(taught: Sequence[Taught], seed: int) -> Iterator[Taught]:
    """All batches over and over, each time in another order."""
    generator = np.random.default_rng(seed)
    while True:
        yield from (taught[at] for at in generator.permutation(len(taught)))


def healing_loss(config: DecoderConfig) -> LossFn:
    """The KL of the parent's next-token distributions to the healed model's, in nats, over all real tokens.

    Trainable are the factors; frozen are the quantized model and the parent's head.
    """
    parts = HeadLoss(
        project=partial(project, config),
        loss=lambda student, teacher: (forward_kl(student, teacher), {}),
        context=lambda weight, inputs: (project(config, inputs[0], weight),),
    )

    def loss(factors: Stacked, frozen: tuple[Stacked, Array], taught: Taught, keys):
        base, teacher_head = frozen
        batch = taught.batch
        student = times(base, factors, config.norm_offset, lambda tensor, factor: Formed(form, (tensor, factor)))
        view: dict[str, Any] = {"positions": batch.positions, "segments": batch.segments}
        ours = hidden_states(config, student, batch.tokens, **view, remat=True)
        mask = (jnp.asarray(batch.segments) > 0).astype(jnp.float32)
        weight = dense(head(config, base), ours.dtype)
        values, _ = head_tokens(parts, ours, weight, teacher_head, (taught.hidden,), mask)
        return values.sum(), mask.sum(), {}

    return loss


def ones(base: Stacked) -> Stacked:
    """The factors of what trains: the scales of the layers' grouped integers, norms and biases."""

    def of(named: dict[str, Any]) -> dict[str, Array]:
        grids = {name: leaf.scale for name, leaf in named.items() if isinstance(leaf, QuantizedTensor)}
        vectors = {name: leaf for name, leaf in named.items() if name.endswith(("norm.weight", "bias"))}
        return {name: jnp.ones(leaf.shape, jnp.float32) for name, leaf in (grids | vectors).items()}

    return Stacked({FINAL_NORM: of(base.rest)[FINAL_NORM]}, list(map(of, base.layers)))


def times(base: Stacked, factors: Stacked, norm_offset: float, scaled: Callable[..., Any]) -> Stacked:
    """The model with its factors; `scaled(tensor, factor)` is what becomes of a quantized tensor."""

    def one(name: str, leaf: Any, factor: Array) -> Any:
        if isinstance(leaf, QuantizedTensor):
            return scaled(leaf, factor)
        offset = norm_offset if name.endswith("norm.weight") else 0.0
        return ((offset + leaf.astype(jnp.float32)) * factor - offset).astype(leaf.dtype)

    def of(named: dict[str, Any], factors: dict[str, Array]) -> dict[str, Any]:
        return named | {name: one(name, named[name], factor) for name, factor in factors.items()}

    return Stacked(of(base.rest, factors.rest), list(map(of, base.layers, factors.layers)))


def stored(tensor: QuantizedTensor, factor: Float[Array, "*L O G"]) -> QuantizedTensor:
    """The tensor with its scales times a factor."""
    return dataclasses.replace(tensor, scale=stored_scale(tensor, factor).astype(tensor.spec.scale_dtype))


def form(tensor: QuantizedTensor, factor: Float[Array, "O G"]) -> Float[Array, "O I"]:
    """The weight of `stored(tensor, factor)`; differentiable in `factor`."""
    scale = stored_scale(tensor, factor)
    codes = jnp.asarray(tensor.codes(), jnp.float32).reshape(*scale.shape, tensor.spec.group_size)
    _, zero = grid_of(tensor)
    return decode(codes, scale[..., None], zero[..., None]).reshape(tensor.shape)
