"""What of a student trains: its weights, or low-rank adapters on its packed base; rounded in each step or not."""

import dataclasses
from typing import Any

import jax

from compress.distill.settings import Distill
from compress.models.decoder import Stacked, partition, stack, unstack
from compress.models.folder import Model, cast, to_host
from compress.models.lora import init_adapters, is_adapter, with_adapters, with_landing
from compress.quantize.base import packed_base
from compress.quantize.rtn import fake_quantize
from compress.settings import Common
from compress.train.step import LossFn
from export.peft import SCALINGS, Adapters
from export.quantized import QuantSpec


def spec_of(settings: Distill) -> QuantSpec:
    """The grids that the student's linears are rounded to, where they are."""
    return QuantSpec(bits=settings.bits or 4, group_size=settings.group_size, symmetric=settings.symmetric)


def parts_of(student: Model, settings: Distill, common: Common) -> tuple[Model, Stacked, Stacked | None]:
    """The student as floats, or as a packed base; what of it trains; and what is frozen, which is None or that base.

    Raises:
      RecipeError: groups that do not divide a linear's inputs, or a student in NF4 that is to land on integers.
    """
    if settings.rank is None:
        student = student.dequantized()
        return student, stack(student.config, student.weights), None
    base = packed_base(student, spec_of(settings), landing=settings.landing)
    adapters = init_adapters(base.config, jax.random.key(common.seed), settings.rank)
    return base, *split(stack(base.config, cast(base.weights, common.dtype) | adapters), settings)


def split(stacked: Stacked, settings: Distill) -> tuple[Stacked, Stacked]:
    """Adapters, and the base that they train on."""
    adapters, base = partition(stacked, is_adapter)
    return adapters, with_landing(base, fake_quantize) if settings.landing == "fake_quantize" else base


def loss_of_parts(loss: LossFn, settings: Distill) -> LossFn:
    """`loss`, whose first argument is a student's weights, as a loss of what trains of them."""
    if settings.rank is not None:
        return adapted(loss, SCALINGS[settings.scaling](settings.lora_alpha, settings.rank))
    return rounded(loss, spec_of(settings)) if settings.landing == "fake_quantize" else loss


def adapted(loss: LossFn, scale: float) -> LossFn:
    """`loss` of a base with adapters: trainable are these, frozen is (base, what `loss` takes for frozen)."""

    def run(adapters: Stacked, frozen: tuple, batch: Any, keys):
        base, others = frozen
        student = with_adapters(base, adapters, scale)
        return loss(dataclasses.replace(student, rest=student.rest | adapters.rest), others, batch, keys)

    return run


def rounded(loss: LossFn, spec: QuantSpec) -> LossFn:
    """`loss` of a student whose linears are rounded to nearest, with the gradient of the weights as they are."""

    def run(trainable: Stacked, frozen: Any, batch: Any, keys):
        return loss(round_linears(trainable, spec), frozen, batch, keys)

    return run


def round_linears(stacked: Stacked, spec: QuantSpec) -> Stacked:
    """The values of the weights after `rtn` has rounded the linears."""
    layers = [
        {name: fake_quantize(leaf, spec) if leaf.ndim == 3 else leaf for name, leaf in segment.items()}
        for segment in stacked.layers
    ]
    return dataclasses.replace(stacked, layers=layers)


def joined(student: Model, trained: Stacked, settings: Distill) -> Model:
    """The model that training ends in, of a `parts_of` and what has trained of it."""
    weights = to_host(unstack(student.config, trained))
    if settings.rank is not None:
        kept = Adapters(weights, settings.rank, settings.lora_alpha, base=settings.student, scaling=settings.scaling)
        return dataclasses.replace(student, adapters=kept)
    model = dataclasses.replace(student, weights=weights)
    return packed_base(model, spec_of(settings)) if settings.landing == "fake_quantize" else model
