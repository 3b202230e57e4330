"""Grids: the scale and zero point of a group of weights, and the nearest code on it.

Letters: L leading axes (outputs, stacked layers), I inputs, G groups of g = `group_size` inputs (I = G * g).

A grid is w = (q - z) * s with codes q in 0 .. levels - 1 (`export.quantized`). Because z is a code itself, every
grid holds the number zero exactly, and the range that a grid is fitted to always reaches to zero. Scales are
positive, and are rounded to the type that they are stored in before anything is measured or encoded with them.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from export.quantized import QuantizedTensor, QuantSpec

CLIP_STEPS = 4
"""Ways to cut a range that `choose_grid` starts from by default; twice as many gain about 1% of the error."""

NARROWEST = 0.4
"""The share of the range that the hardest clipping keeps."""

HALVINGS = (1 / 2, 1 / 4)
"""How far from the best way to cut it looks further, in distances between two of them."""


def choose_grid(
    w: Float[Array, "*L I"],
    spec: QuantSpec,
    *,
    importance: Float[Array, " I"] | None = None,
    clip_steps: int = CLIP_STEPS,
) -> tuple[Float[Array, "*L G"], UInt8[Array, "*L G"] | None]:
    """Choose each group's scale and zero point so that the squared error of the nearest codes is least.

    The search covers the whole range (no weight clipped), `clip_steps` narrower ones, and those coarser ones in which
    the range is a whole number of steps: so weights that lie on some grid already get a grid that holds them. It goes
    on around the best of them, and the codes found in the end choose their scale once more, by least squares. A group
    of zeros gets scale 1; a group of one value is exact.

    Args:
      w: finite weights.
      spec: bits, group size, symmetry and scale type.
      importance: weight of each input's squared error, such as the diagonal of its Hessian; not negative.
      clip_steps: narrower ranges to start from; 0 takes the whole range as it is, without any search.

    Returns:
      Scales in `spec.scale_dtype`, and zero points, or None when symmetric.
    """
    x = w.astype(jnp.float32).reshape(*w.shape[:-1], -1, spec.group_size)
    weight = jnp.ones(()) if importance is None else importance.astype(jnp.float32).reshape(-1, spec.group_size)
    low = jnp.minimum(x.min(-1), 0.0)
    high = jnp.maximum(x.max(-1), 0.0)

    def signed_codes(scale, zero):
        # A product costs less than a quotient, and adding a zero point nothing if the bounds move in its place.
        codes = jnp.round(x * (1 / scale)[..., None])
        return jnp.clip(codes, -zero[..., None], (spec.levels - 1 - zero)[..., None])

    def improve(best, scale, zero, cut):
        error = jnp.sum(weight * jnp.square(x - signed_codes(scale, zero) * scale[..., None]), axis=-1)
        found = (error, scale, zero, *(jnp.broadcast_to(part, error.shape) for part in cut))
        return tuple(jnp.where(error < best[0], new, old) for new, old in zip(found, best, strict=True))

    def attempt(best, candidate):
        *cut, onward = candidate
        cut = [part + onward * found for part, found in zip(cut, best[3:], strict=True)]
        scale, zero = _grid(low, high, cut, spec)
        return improve(best, scale, zero, cut), None

    one, none = jnp.ones_like(low), jnp.zeros_like(low)
    best, _ = jax.lax.scan(attempt, (jnp.full_like(low, jnp.inf), one, none, one, none), _candidates(spec, clip_steps))
    if clip_steps:
        _, scale, zero, *cut = best
        signed = signed_codes(scale, zero)
        product, square = (jnp.sum(weight * signed * part, axis=-1) for part in (x, signed))
        fitted = jnp.where(product > 0, product / jnp.where(square > 0, square, 1.0), scale)
        best = improve(best, round_scale(fitted, spec.scale_dtype), zero, cut)
    _, scale, zero, *_ = best
    return scale.astype(spec.scale_dtype), None if spec.symmetric else zero.astype(jnp.uint8)


def encode(w: Float[Array, "..."], scale: Float[Array, "..."], zero: Float[Array, "..."], bits: int):
    """The nearest codes, as float32 (integers up to 255 are exact); halves go to the even neighbour."""
    return jnp.clip(jnp.round(w / scale) + zero, 0, (1 << bits) - 1)


def decode(codes: Float[Array, "..."], scale: Float[Array, "..."], zero: Float[Array, "..."]):
    """The weights that codes stand for."""
    return (codes - zero) * scale


def float_grid(scale: Float[Array, "..."], zero: UInt8[Array, "..."] | None, spec: QuantSpec):
    """Scale and zero point as float32 to compute with; the middle code where there is no zero point."""
    middle = jnp.full(scale.shape, spec.levels // 2, jnp.float32)
    return scale.astype(jnp.float32), middle if zero is None else zero.astype(jnp.float32)


def round_scale(scale: Float[Array, "..."], dtype: str) -> Float[Array, "..."]:
    """Round a positive scale to the nearest that `dtype` holds, never to zero or infinity; the result is float32.

    A pair of casts would not do: inside jit, XLA may drop it as excess precision. Of the subnormal numbers only
    float16's are used, because small weights at 8 bits need them; float32 arithmetic flushes the others to zero.
    """
    info = jnp.finfo(dtype)
    inside = jnp.clip(scale, float(info.tiny), float(info.max))
    normal = jax.lax.reduce_precision(inside, exponent_bits=info.nexp, mantissa_bits=info.nmant)
    if info.nexp != 5:
        return normal
    unit = float(info.smallest_subnormal)
    return jnp.where(scale < float(info.tiny), jnp.maximum(jnp.round(scale / unit), 1.0) * unit, normal)


def grid_of(tensor: QuantizedTensor) -> tuple[Float[Array, "*L G"], Float[Array, "*L G"]]:
    """A quantized tensor's scales and zero points as float32 to compute with."""
    scale, zero = jax.tree.map(jnp.asarray, (tensor.scale, tensor.zero))
    return float_grid(scale, zero, tensor.spec)


def stored_scale(tensor: QuantizedTensor, factor: Float[Array, "*L O G"]) -> Float[Array, "*L O G"]:
    """The tensor's scales times a factor, as its type rounds them, in float32; the gradient passes the rounding by."""
    scale = grid_of(tensor)[0] * factor
    return round_scale(jax.lax.stop_gradient(scale), tensor.spec.scale_dtype) + (scale - jax.lax.stop_gradient(scale))


def _candidates(spec: QuantSpec, clip_steps: int) -> np.ndarray:
    """Rows (steps across the range, share of the clipping that is done at the low end, 0); the whole range is first.

    Where the last number is 1, the first two are added to the best so far.
    A symmetric range is one-sided, from zero to the largest magnitude. There -levels / 2 is a code and levels / 2 is
    none, so `levels / 2` steps clip positive extremes only.
    """
    top = spec.levels // 2 - 1 if spec.symmetric else spec.levels - 1
    rows: list[tuple[float, float, float]] = [(top, 0.5, 0)]
    if clip_steps:
        # A coarser grid still is part of one of these, with the scale halved.
        rows += [(steps, 0.5, 0) for steps in range(top // 2 + 1, top + 2) if steps != top]
        narrower, distance = np.linspace(top, top / NARROWEST, clip_steps + 1, retstep=True)
        shares = (0.5,) if spec.symmetric else (0.0, 0.5, 1.0)
        rows += [(steps, share, 0) for steps in narrower[1:] for share in shares]
        rows += [(sign * distance * part, 0, 1) for part in HALVINGS for sign in (1, -1)]
    return np.asarray(rows, np.float32)


def _grid(low, high, candidate, spec: QuantSpec):
    """The rounded scale and zero point that put `candidate[0]` steps across each range."""
    steps, share = candidate
    width = jnp.maximum(-low, high) if spec.symmetric else high - low
    scale = round_scale(jnp.where(width > 0, width / steps, 1.0), spec.scale_dtype)
    if spec.symmetric:
        return scale, jnp.full_like(scale, spec.levels // 2)
    clipped = jnp.maximum(steps - (spec.levels - 1), 0.0)
    return scale, jnp.clip(jnp.round(-low / scale - share * clipped), 0, spec.levels - 1)
