"""HQQ: half-quadratic quantization, which fits a group's grid to most of its weights and lets few be far off.

Letters: L leading axes (outputs, stacked layers), I inputs, G groups of g = `group_size` inputs (I = G * g).

The loss is the sum of |w - w_hat|^p with p < 1 (Badri and Shaji 2023, "Half-Quadratic Quantization of Large Machine
Learning Models", https://mobiusml.github.io/hqq_blog/). With an auxiliary error e it is split into that of e and
beta / 2 * (w - w_hat - e)^2, which is least in turn for

    e = sign(r) * max(|r| - |r|^(p - 1) / beta, 0), r = w - w_hat     (few errors, but large ones)
    z = mean(q - (w - e) / s)

while beta grows. There zero points are floats and scales stay. Here a zero point is a code, so z is rounded, and the
scale follows by least squares, s = <w - e, q - z> / <q - z, q - z>; without zero points it is all that moves. Errors
are measured in steps of the grid that the search starts from, so that beta means the same for weights of any size.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from compress.quantize.grid import choose_grid, decode, encode, float_grid, round_scale
from compress.quantize.rtn import require_quantizable, round_on_grids
from export.quantized import QuantizedTensor, QuantSpec

STEPS = 20
NORM = 0.7
"""The p of the loss."""
BETA, GROWTH = 10.0, 1.01
"""The split's weight in the first step, and what it is multiplied with in each."""


def hqq(w: Float[Array | np.ndarray, "*L I"], spec: QuantSpec, *, steps: int = STEPS) -> QuantizedTensor:
    """Quantize to the nearest codes, on grids of least sum of |error|^0.7: never a greater one than `rtn` leaves.

    Args:
      w: weights, with any leading axes; a group is `spec.group_size` neighbours on the last one.
      spec: bits, group size, symmetry and scale type.
      steps: half-quadratic steps from the grids of `rtn`; 0 keeps those.

    Raises:
      ArtifactError: the group size does not divide I, or a weight is NaN or infinite.
    """
    require_quantizable(w, spec)
    return round_half_quadratic(jnp.asarray(w), spec, steps)


@partial(jax.jit, static_argnames=("spec", "steps"))
def round_half_quadratic(w: Float[Array, "*L I"], spec: QuantSpec, steps: int = STEPS) -> QuantizedTensor:
    """`hqq` without its checks, for use inside jit."""
    return round_on_grids(w, spec, lambda row: refine_grid(row, *choose_grid(row, spec), spec, steps))


def refine_grid(
    w: Float[Array, "*L I"],
    scale: Float[Array, "*L G"],
    zero: UInt8[Array, "*L G"] | None,
    spec: QuantSpec,
    steps: int = STEPS,
) -> tuple[Float[Array, "*L G"], UInt8[Array, "*L G"] | None]:
    """The grid of least sum of |error|^0.7 that half-quadratic steps from a given one pass through."""
    x = w.astype(jnp.float32).reshape(*scale.shape, spec.group_size)
    first, z = (part[..., None] for part in float_grid(scale, zero, spec))

    def residual(s, z):
        q = encode(x, s, z, spec.bits)
        r = x - decode(q, s, z)
        return q, r, jnp.sum(jnp.abs(r / first) ** NORM, axis=-1, keepdims=True)

    def step(state, beta):
        (s, z), best = state
        q, r, _ = residual(s, z)
        e = first * shrink(r / first, beta)
        if not spec.symmetric:
            z = jnp.clip(jnp.round(jnp.mean(q - (x - e) / s, axis=-1, keepdims=True)), 0, spec.levels - 1)
        across, along = (jnp.sum(a * (q - z), axis=-1, keepdims=True) for a in (x - e, q - z))
        s = jnp.where(across > 0, round_scale(across / jnp.maximum(along, 1.0), spec.scale_dtype), s)
        new = (residual(s, z)[2], s, z)
        best = tuple(jnp.where(new[0] < best[0], a, b) for a, b in zip(new, best, strict=True))
        return ((s, z), best), None

    start = ((first, z), (residual(first, z)[2], first, z))
    (_, (_, s, z)), _ = jax.lax.scan(step, start, BETA * GROWTH ** jnp.arange(steps))
    return s[..., 0].astype(spec.scale_dtype), None if zero is None else z[..., 0].astype(jnp.uint8)


def shrink(r: Float[Array, "..."], beta: Float[Array, ""] | float) -> Float[Array, "..."]:
    """The generalized soft threshold of |.|^0.7: small errors become zero, large ones hardly change."""
    size = jnp.abs(r)
    return jnp.sign(r) * jnp.maximum(size - jnp.where(size > 0, size, 1.0) ** (NORM - 1) / beta, 0.0)
