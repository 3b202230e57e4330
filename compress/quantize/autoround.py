"""AutoRound: learn which way to round, and each group's scale, from what a layer puts out (arXiv:2309.05516).

A weight stands at w / s + z on its grid. What is learned is a shift of that place, of at most half a step, and a
factor of the group's scale. The gradient passes the rounding by (eq. 3), and every step follows its sign alone, with a
rate that falls to zero.

Two things differ from the paper. Learning starts on grids that were searched and not on whole ranges. And a token's
squared error is divided by the square of what it should be: the norm that comes next divides by it too, and without
that a few tokens of huge activations are all that is learned from. As in the paper, what a layer should put out is
what the unquantized model does, so a layer also makes up for those before it.

Letters: O outputs, I inputs, G groups of a row, N rows of all batches, T tokens, D model.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from compress.data.batch import Batch
from compress.models.attention import visible
from compress.models.config import DecoderConfig
from compress.models.decoder import View, run_block
from compress.quantize.grid import decode, grid_of, stored_scale
from compress.quantize.layer import Layer
from export.quantized import PackedTensor, QuantizedTensor, pack

ROWS = 4
"""Rows of a step."""

INSIDE = 0.49
"""How far from its first code, in steps, a weight stands before any shift: not so far that rounding would move it."""

NARROWEST, WIDEST = 0.5, 1.5
"""Bounds of a scale's factor."""


class Learned(NamedTuple):
    """What is learned of one weight.

    Attributes:
      shift: of the places, in steps.
      factor: of the scales.
    """

    shift: Float[Array, "O I"]
    factor: Float[Array, "O G"]


def autoround(
    task: Layer, packed: dict[str, Array | PackedTensor], *, autoround_steps: int
) -> dict[str, Array | PackedTensor]:
    """The layer's packed weights with codes and scales learned anew; as they were, if that made the outputs worse.

    Args:
      packed: the first codes and scales of the layer's linears; others than grouped integers are left alone.
    """
    first = {name: tensor for name, tensor in packed.items() if isinstance(tensor, QuantizedTensor)}
    if not first or not autoround_steps:
        return packed
    inputs, targets = (jnp.concatenate([jnp.asarray(x) for x in states]) for states in (task.inputs, task.truths))
    batch = jax.tree.map(lambda *leaves: jnp.concatenate([jnp.asarray(leaf) for leaf in leaves]), *task.batches)
    key = jax.random.key(int(task.prefix.split(".")[2]))
    learned, before, after = learn(
        task.config, dict(task.weights), first, inputs, targets, task.data, batch, key, autoround_steps
    )
    return packed | learned if after < before else packed


@partial(jax.jit, static_argnames=("config", "steps"))
def learn(
    config: DecoderConfig,
    weights: dict[str, Array],
    first: dict[str, QuantizedTensor],
    inputs: Float[Array, "N T D"],
    targets: Float[Array, "N T D"],
    data: Any,
    batch: Batch,
    key: Array,
    steps: int,
) -> tuple[dict[str, QuantizedTensor], Float[Array, ""], Float[Array, ""]]:
    """The weights after `steps` steps, and the error over all rows before and after."""
    where = {name: places(tensor, weights[name]) for name, tensor in first.items()}
    start = {name: Learned(jnp.zeros(tensor.shape), jnp.ones(tensor.scale.shape)) for name, tensor in first.items()}

    def error(rows, tensors: dict[str, Array]) -> tuple[Array, Array]:
        x, wanted, part = jax.tree.map(lambda leaf: leaf[rows], (inputs, targets, batch))
        view = View(
            part.positions, part.positions, visible(part.positions, part.segments, part.positions, part.segments)
        )
        y = run_block(config, weights | tensors, x, data, view)[1][0]
        return relative_error(y, wanted, part.segments > 0)

    def loss(learned: dict[str, Learned], rows) -> Array:
        total, count = error(rows, {name: form(first[name], where[name], *learned[name]) for name in first})
        return total / jnp.maximum(count, 1)

    def step(learned, number):
        rows = jax.random.choice(jax.random.fold_in(key, number), len(inputs), (min(ROWS, len(inputs)),), replace=False)
        rate = (1 - number / steps) / steps
        moved = jax.tree.map(lambda x, g: x - rate * jnp.sign(g), learned, jax.grad(loss)(learned, rows))
        return {
            name: Learned(jnp.clip(shift, -0.5, 0.5), jnp.clip(factor, NARROWEST, WIDEST))
            for name, (shift, factor) in moved.items()
        }, None

    def whole(tensors: dict[str, Array]) -> Array:
        totals, counts = jax.lax.map(lambda row: error(row[None], tensors), jnp.arange(len(inputs)))
        return totals.sum() / jnp.maximum(counts.sum(), 1)

    learned, _ = jax.lax.scan(step, start, jnp.arange(steps))
    found = {name: landed(first[name], where[name], *learned[name]) for name in first}
    before, after = (whole({name: jnp.asarray(made[name].dequantize()) for name in first}) for made in (first, found))
    return found, before, after


def relative_error(
    y: Float[Array, "N T D"], wanted: Float[Array, "N T D"], real: Bool[Array, "N T"]
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Over real tokens, the sum of |y - wanted|^2 / |wanted|^2, and their number; a token of zeros has no error."""
    square = jnp.sum(jnp.square(wanted), -1)
    error = jnp.sum(jnp.square(y - wanted), -1) / jnp.where(square > 0, square, 1.0)
    counts = real & (square > 0)
    return jnp.sum(jnp.where(counts, error, 0.0)), jnp.sum(counts)


def places(tensor: QuantizedTensor, w: Float[Array, "O I"]) -> Float[Array, "O I"]:
    """Where weights stand on the grid, drawn to within `INSIDE` of the codes that were chosen for them."""
    scale, zero = (part[..., None] for part in grid_of(tensor))
    grouped = w.astype(jnp.float32).reshape(*tensor.scale.shape, tensor.spec.group_size)
    codes = jnp.asarray(tensor.codes(), jnp.float32)
    return jnp.clip((grouped / scale + zero).reshape(w.shape), codes - INSIDE, codes + INSIDE)


def codes_of(where: Float[Array, "O I"], shift: Float[Array, "O I"], bits: int) -> Float[Array, "O I"]:
    """The codes that shifted places round to; the gradient passes that by, and the clipping too."""
    moved = where + shift
    codes = jnp.clip(jnp.round(jax.lax.stop_gradient(moved)), 0, (1 << bits) - 1)
    return codes + (moved - jax.lax.stop_gradient(moved))


def form(
    tensor: QuantizedTensor, where: Float[Array, "O I"], shift: Float[Array, "O I"], factor: Float[Array, "O G"]
) -> Float[Array, "O I"]:
    """The weight of `landed`, differentiable in `shift` and `factor`."""
    scale = stored_scale(tensor, factor)[..., None]
    _, zero = grid_of(tensor)
    codes = codes_of(where, shift, tensor.spec.bits).reshape(*tensor.scale.shape, tensor.spec.group_size)
    return decode(codes, scale, zero[..., None]).reshape(where.shape)


def landed(
    tensor: QuantizedTensor, where: Float[Array, "O I"], shift: Float[Array, "O I"], factor: Float[Array, "O G"]
) -> QuantizedTensor:
    """The tensor with the codes that shifted places round to, and its scales times a factor."""
    codes = codes_of(where, shift, tensor.spec.bits).astype(jnp.uint8)
    scale = stored_scale(tensor, factor).astype(tensor.spec.scale_dtype)
    return dataclasses.replace(tensor, packed=pack(codes, tensor.spec.bits), scale=scale)
