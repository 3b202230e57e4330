"""GPTQ: round weights one input at a time, and let the inputs still to come make up for each error.

Letters: O outputs, I inputs, G groups of g = `group_size` inputs (I = G * g), N tokens.

For one output with errors d = w - w_hat the loss over the calibration inputs is d H d^T, where H is their mean
x x^T. With H = R R^T, R upper triangular, it is the sum over inputs j of (sum_{i<=j} d_i R_ij)^2. So once the inputs
before j are rounded, term j is least when w_hat_j is the code nearest to

    w_j + sum_{i<j} d_i R_ij / R_jj

which is the update of GPTQ (Frantar et al. 2022, https://arxiv.org/abs/2210.17323, eq. 2 and 3), written without
the inverse of H: its inverse Cholesky factor is R^-1, and solving with that is multiplying with R.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt8

from compress.quantize.grid import CLIP_STEPS, choose_grid, decode, encode, float_grid
from compress.quantize.rtn import require_quantizable
from export.errors import ArtifactError
from export.quantized import QuantizedTensor, QuantSpec, pack

DAMPING_TRIES = 5
"""A Hessian without a Cholesky factor gets ten times the damping, at most this often."""

BLOCK = 64
"""Inputs between two matrix products that bring the errors of all earlier blocks in."""

ORDERS = ("static", "none")


class Solution(NamedTuple):
    """What GPTQ found.

    Attributes:
      tensor: the quantized weight.
      damping: what was added to the Hessian's diagonal, relative to its mean; NaN if no damping helped.
      error: squared error of the outputs over the calibration tokens, relative to the outputs' square.
    """

    tensor: QuantizedTensor
    damping: Float[Array, ""]
    error: Float[Array, ""]


def gptq(
    w: Float[Array | np.ndarray, "O I"],
    hessian: Float[Array | np.ndarray, "I I"],
    spec: QuantSpec,
    *,
    damp: float = 0.01,
    act_order: str = "static",
    clip_steps: int = CLIP_STEPS,
) -> QuantizedTensor:
    """Quantize a weight so that its outputs over the calibration inputs change least.

    Args:
      w: weights; linears that share their input may be concatenated along O.
      hessian: mean (or sum) of x x^T over the calibration tokens.
      spec: bits, group size, symmetry and scale type.
      damp: added to the Hessian's diagonal, relative to its mean.
      act_order: "static" rounds the inputs of largest mean square first, on grids chosen beforehand, and keeps the
        codes in their own order. "none" rounds in order, and chooses a group's grid when it comes to it.
      clip_steps: see `choose_grid`.

    Raises:
      ArtifactError: the group size does not divide I, a weight or the Hessian is not finite, or the Hessian is too
        far from positive definite.
    """
    solution = solve(w, hessian, spec, damp=damp, act_order=act_order, clip_steps=clip_steps)
    return solution.tensor


def solve(
    w: Float[Array | np.ndarray, "O I"],
    hessian: Float[Array | np.ndarray, "I I"],
    spec: QuantSpec,
    *,
    damp: float = 0.01,
    act_order: str = "static",
    clip_steps: int = CLIP_STEPS,
) -> Solution:
    """`gptq`, telling also what damping it took and what error it left."""
    if act_order not in ORDERS:
        raise ArtifactError(f"act_order = {act_order!r}: must be one of {', '.join(ORDERS)}")
    require_quantizable(w, spec)
    require_finite(hessian)
    solution = round_in_order(jnp.asarray(w), jnp.asarray(hessian), damp, spec, act_order, clip_steps)
    if not np.isfinite(solution.damping):
        raise ArtifactError(f"the Hessian has no Cholesky factor, even damped {10**DAMPING_TRIES} times damp = {damp}")
    return solution


def require_finite(hessian: Float[Array | np.ndarray, "I I"]) -> None:
    """Refuse a Hessian that holds NaN or infinity; the caller knows the linear's name and adds it."""
    if not bool(jnp.isfinite(jnp.asarray(hessian)).all()):
        raise ArtifactError("the calibration activations are NaN or infinite; check the checkpoint and its dtype")


@partial(jax.jit, static_argnames=("spec", "act_order", "clip_steps"))
def round_in_order(
    w: Float[Array, "O I"], hessian: Float[Array, "I I"], damp, spec: QuantSpec, act_order: str, clip_steps: int
) -> Solution:
    """`solve` without its checks, for use inside jit and vmap."""
    w, hessian = w.astype(jnp.float32), hessian.astype(jnp.float32)
    energy = jnp.diag(hessian)
    order = jnp.argsort(-energy, stable=True) if act_order == "static" else jnp.arange(w.shape[1])
    factor, damping = cholesky(hessian[order][:, order], damp)
    pivots = jnp.diag(factor)
    mixing = jnp.triu(factor / pivots, 1)
    # An error of input j, made after those before it were made up for, costs R_jj^2: that is what a grid is to spare.
    importance = jnp.square(pivots)

    if act_order == "static":
        scale, zero = choose_grid(w, spec, importance=unpermute(importance, order), clip_steps=clip_steps)
        grid = tuple(part.T[order // spec.group_size] for part in float_grid(scale, zero, spec))
        codes, left = compensate(w.T[order], mixing, grid, spec.bits, math.gcd(spec.group_size, BLOCK))
    else:
        codes, left, scale, zero = compensate_by_group(w.T, mixing, importance, spec, clip_steps)
    error = unpermute(left, order).T
    tensor = QuantizedTensor(pack(unpermute(codes, order).T, spec.bits), scale, zero, spec)
    square = jnp.sum((w @ hessian) * w)
    relative = jnp.sum((error @ hessian) * error) / jnp.where(square > 0, square, 1.0)
    return Solution(tensor, damping, relative)


def cholesky(hessian: Float[Array, "I I"], damp) -> tuple[Float[Array, "I I"], Float[Array, ""]]:
    """The upper triangular R with R R^T = H + damping * mean(diag H), and the damping that it took.

    An input that is always zero has a row of zeros; it gets 1 on the diagonal, so it is rounded to nearest and
    touches no other. The damping grows tenfold while there is no factor; in the end it is NaN.
    """
    energy = jnp.diag(hessian)
    dead = energy <= 0
    mean = jnp.sum(jnp.where(dead, 0.0, energy)) / jnp.maximum(jnp.sum(~dead), 1)

    def attempt(damping):
        damped = hessian + jnp.diag(jnp.where(dead, 1.0, damping * mean))
        # Reversing rows and columns turns the lower factor into an upper one.
        return jnp.linalg.cholesky(damped[::-1, ::-1], symmetrize_input=False)[::-1, ::-1]

    def failed(state):
        tries, _, factor = state
        return (tries < DAMPING_TRIES) & ~jnp.isfinite(factor).all()

    def again(state):
        tries, damping, _ = state
        return tries + 1, damping * 10, attempt(damping * 10)

    damp = jnp.asarray(damp, jnp.float32)
    _, damping, factor = jax.lax.while_loop(failed, again, (0, damp, attempt(damp)))
    return factor, jnp.where(jnp.isfinite(factor).all(), damping, jnp.nan)


def unpermute(rows: Array, order: Int[Array, " I"]) -> Array:
    """Undo `rows = original[order]`."""
    return jnp.zeros_like(rows).at[order].set(rows)


def compensate(
    w: Float[Array, "I O"],
    mixing: Float[Array, "I I"],
    grid: tuple[Float[Array, "I O"], Float[Array, "I O"]],
    bits: int,
    block: int,
) -> tuple[UInt8[Array, "I O"], Float[Array, "I O"]]:
    """Round row by row to known grids, each row after making up for those before it: codes, and errors w - w_hat."""

    def step(errors, scanned):
        start, w, mixing, grid = scanned
        aim = w + mixing.T @ errors
        codes, left = compensate_rows(w, aim, jax.lax.dynamic_slice_in_dim(mixing, start, block), grid, bits)
        return jax.lax.dynamic_update_slice_in_dim(errors, left, start, 0), codes

    starts = jnp.arange(0, len(w), block)
    scanned = (starts, _blocks(w, block), _columns(mixing, block), jax.tree.map(lambda a: _blocks(a, block), grid))
    errors, codes = jax.lax.scan(step, jnp.zeros_like(w), scanned)
    return codes.reshape(w.shape), errors


def compensate_by_group(
    w: Float[Array, "I O"],
    mixing: Float[Array, "I I"],
    importance: Float[Array, " I"],
    spec: QuantSpec,
    clip_steps: int,
) -> tuple[UInt8[Array, "I O"], Float[Array, "I O"], Float[Array, "O G"], UInt8[Array, "O G"] | None]:
    """`compensate`, with each group's grid chosen for what the group is to hold once earlier ones are made up for."""
    block = spec.group_size

    def step(errors, scanned):
        start, w, mixing, importance = scanned
        aim = w + mixing.T @ errors
        own = jax.lax.dynamic_slice_in_dim(mixing, start, block)
        # `aim` takes the rows of its own block as exact; here they have moved too, as far as costs least.
        moved = w + jax.scipy.linalg.solve_triangular(own, aim - w, trans=1, unit_diagonal=True)
        scale, zero = choose_grid(moved.T, spec, importance=importance, clip_steps=clip_steps)
        grid = tuple(jnp.broadcast_to(part.T, w.shape) for part in float_grid(scale, zero, spec))
        codes, left = compensate_rows(w, aim, own, grid, spec.bits)
        return jax.lax.dynamic_update_slice_in_dim(errors, left, start, 0), (codes, scale, zero)

    starts = jnp.arange(0, len(w), block)
    scanned = (starts, _blocks(w, block), _columns(mixing, block), importance.reshape(-1, block))
    errors, (codes, scale, zero) = jax.lax.scan(step, jnp.zeros_like(w), scanned)
    by_output = lambda part: part[..., 0].T  # noqa: E731
    return codes.reshape(w.shape), errors, by_output(scale), None if zero is None else by_output(zero)


def compensate_rows(w, aim, mixing, grid, bits: int) -> tuple[UInt8[Array, "B O"], Float[Array, "B O"]]:
    """Round a block's rows in turn; `aim` already makes up for the blocks before it, `mixing` is the block's own."""
    scale, zero = grid

    def step(j, state):
        codes, errors = state
        code = encode(aim[j] + mixing[:, j] @ errors, scale[j], zero[j], bits)
        error = w[j] - decode(code, scale[j], zero[j])
        return codes.at[j].set(code.astype(jnp.uint8)), errors.at[j].set(error)

    return jax.lax.fori_loop(0, len(w), step, (jnp.zeros(w.shape, jnp.uint8), jnp.zeros_like(w)))


def gram(x: Float[Array, "N I"], mask: Bool[Array, " N"]) -> Float[Array, "I I"]:
    """The sum of x x^T over the tokens of the mask, in float32: a Hessian, once divided by their number."""
    x = jnp.where(mask[:, None], x.astype(jnp.float32), 0.0)
    return x.T @ x


def _blocks(a: Array, block: int) -> Array:
    return a.reshape(-1, block, *a.shape[1:])


def _columns(a: Array, block: int) -> Array:
    return _blocks(a.T, block).swapaxes(1, 2)
