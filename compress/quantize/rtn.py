"""Round to nearest: every weight to the nearest code of its group's grid, without calibration data.

Letters: L leading axes (outputs, stacked layers), I inputs.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from compress.quantize.grid import CLIP_STEPS, choose_grid, encode, float_grid
from export.checkpoint import count_not_finite
from export.errors import ArtifactError
from export.quantized import QuantizedTensor, QuantSpec, misfits, pack

BLOCK, CHUNK = 1 << 20, 1 << 17
"""Weights that are read and rounded at a time, which bounds the memory; and those of them that the search goes over at
a time, which in float32 stay in a core's cache."""


def rtn(w: Float[Array | np.ndarray, "*L I"], spec: QuantSpec, *, clip_steps: int = CLIP_STEPS) -> QuantizedTensor:
    """Quantize to the nearest codes, with grids of least squared error.

    Args:
      w: weights, with any leading axes; a group is `spec.group_size` neighbours on the last one.
      spec: bits, group size, symmetry and scale type.
      clip_steps: see `choose_grid`; 0 keeps the whole range of each group.

    Raises:
      ArtifactError: the group size does not divide I, or a weight is NaN or infinite.
    """
    require_quantizable(w, spec)
    rows = w.reshape(-1, w.shape[-1])
    step = 1 << max(0, (BLOCK // w.shape[-1]).bit_length() - 1)
    blocks = [round_to_nearest(jnp.asarray(rows[at : at + step]), spec, clip_steps) for at in range(0, len(rows), step)]
    whole = jax.tree.map(lambda *leaves: np.concatenate(leaves), *blocks)
    return jax.tree.map(lambda leaf: leaf.reshape(*w.shape[:-1], leaf.shape[-1]), whole)


def require_quantizable(w: Float[Array | np.ndarray, "*L I"], spec: QuantSpec) -> None:
    """Refuse a weight that no grid can hold; the caller knows the tensor's name and adds it."""
    if misfits({"": w.shape}, spec.group_size):
        raise ArtifactError(f"{w.shape[-1]} inputs: not a multiple of group_size = {spec.group_size}")
    broken = count_not_finite(np.asarray(w))
    if broken:
        raise ArtifactError(f"{broken} of {w.size} weights are NaN or infinite; repair the checkpoint first")


@partial(jax.jit, static_argnames=("spec", "clip_steps"))
def round_to_nearest(w: Float[Array, "*L I"], spec: QuantSpec, clip_steps: int = CLIP_STEPS) -> QuantizedTensor:
    """`rtn` without its checks, for use inside jit."""
    return round_on_grids(w, spec, partial(choose_grid, spec=spec, clip_steps=clip_steps))


def round_on_grids(w: Float[Array, "*L I"], spec: QuantSpec, choose: Callable[..., tuple]) -> QuantizedTensor:
    """The nearest codes on the grids that `choose` (weights [1, I] -> scale, zero) finds, a few rows at a time."""

    def chunk(w: Float[Array, "C I"]) -> QuantizedTensor:
        scale, zero = choose(w)
        s, z = (jnp.repeat(part, spec.group_size, axis=-1) for part in float_grid(scale, zero, spec))
        codes = encode(w.astype(jnp.float32), s, z, spec.bits).astype(jnp.uint8)
        return QuantizedTensor(pack(codes, spec.bits), scale, zero, spec)

    rows = w.reshape(-1, w.shape[-1])
    size = max(1, CHUNK // w.shape[-1])
    whole = len(rows) - len(rows) % size
    done = [jax.lax.map(chunk, rows[:whole].reshape(-1, size, w.shape[-1]))] if whole else []
    done += [chunk(rows[whole:])] if whole < len(rows) else []
    joined = lambda *leaves: jnp.concatenate([leaf.reshape(-1, leaf.shape[-1]) for leaf in leaves])  # noqa: E731
    return jax.tree.map(lambda leaf: leaf.reshape(*w.shape[:-1], leaf.shape[-1]), jax.tree.map(joined, *done))


def fake_quantize(w: Float[Array, "*L I"], spec: QuantSpec) -> Float[Array, "*L I"]:
    """The value that `w` has after `rtn`, with the gradient of `w` itself (straight-through, arXiv:1308.3432)."""
    landed = round_to_nearest(jax.lax.stop_gradient(w), spec).dequantize(w.dtype)
    return landed + (w - jax.lax.stop_gradient(w))
