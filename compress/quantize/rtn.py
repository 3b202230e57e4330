"""Round to nearest: every weight to the nearest code of its group's grid, without calibration data.

Letters: L leading axes (outputs, stacked layers), I inputs.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from compress.quantize.grid import CLIP_STEPS, choose_grid, encode, float_grid
from export.errors import ArtifactError
from export.quantized import QuantizedTensor, QuantSpec, misfits, pack

CHUNK = 1 << 15
"""Weights encoded at a time: in float32 they stay in a core's cache while the search goes over them."""


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
    return round_to_nearest(jnp.asarray(w), spec, clip_steps)


def require_quantizable(w: Float[Array | np.ndarray, "*L I"], spec: QuantSpec) -> None:
    """Refuse a weight that no grid can hold; the caller knows the tensor's name and adds it."""
    if misfits({"": w.shape}, spec.group_size):
        raise ArtifactError(f"{w.shape[-1]} inputs: not a multiple of group_size = {spec.group_size}")
    broken = int(jnp.sum(~jnp.isfinite(jnp.asarray(w))))
    if broken:
        raise ArtifactError(f"{broken} of {w.size} weights are NaN or infinite; repair the checkpoint first")


@partial(jax.jit, static_argnames=("spec", "clip_steps"))
def round_to_nearest(w: Float[Array, "*L I"], spec: QuantSpec, clip_steps: int = CLIP_STEPS) -> QuantizedTensor:
    """`rtn` without its checks, for use inside jit."""

    def row(w: Float[Array, "1 I"]):
        scale, zero = choose_grid(w, spec, clip_steps=clip_steps)
        s, z = (jnp.repeat(part, spec.group_size, axis=-1) for part in float_grid(scale, zero, spec))
        codes = encode(w.astype(jnp.float32), s, z, spec.bits).astype(jnp.uint8)
        return QuantizedTensor(pack(codes, spec.bits), scale, zero, spec)

    rows = w.reshape(-1, 1, w.shape[-1])
    done = jax.lax.map(row, rows, batch_size=max(1, min(len(rows), CHUNK // w.shape[-1])))
    return jax.tree.map(lambda leaf: leaf.reshape(*w.shape[:-1], leaf.shape[-1]), done)


def fake_quantize(w: Float[Array, "*L I"], spec: QuantSpec) -> Float[Array, "*L I"]:
    """The value that `w` has after `rtn`, with the gradient of `w` itself (straight-through, arXiv:1308.3432)."""
    landed = round_to_nearest(jax.lax.stop_gradient(w), spec).dequantize(w.dtype)
    return landed + (w - jax.lax.stop_gradient(w))
