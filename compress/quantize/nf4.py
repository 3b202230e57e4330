"""NF4 with double quantization, the frozen base of QLoRA (arXiv:2305.14314, section 3).

Letters: O outputs, I inputs, G blocks of a row, N elements of any shape, K levels.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from compress.quantize.rtn import require_quantizable
from export.quantized import NF4_BLOCK, NF4_LEVELS, SCALE_BLOCK, SCALE_LEVELS, NF4Tensor, QuantSpec, nf4_scales, pack

SPEC = QuantSpec(bits=4, group_size=NF4_BLOCK)
"""The bits and groups that NF4 has, in the terms of the integer quantizers; it has no other."""


def nf4(w: Float[Array | np.ndarray, "O I"]) -> NF4Tensor:
    """Quantize to the nearest levels of NF4, on scales that are themselves quantized to 8 bits.

    Raises:
      ArtifactError: I is not a multiple of `NF4_BLOCK`, or a weight is NaN or infinite.
    """
    require_quantizable(w, SPEC)
    return round_to_nf4(jnp.asarray(w))


@jax.jit
def round_to_nf4(w: Float[Array, "O I"]) -> NF4Tensor:
    """`nf4` without its checks, for use inside jit.

    A code is the nearest on the scale as it is stored, not on the block's exact one.
    """
    blocks = w.astype(jnp.float32).reshape(len(w), -1, NF4_BLOCK)
    largest = jnp.max(jnp.abs(blocks), axis=-1)
    mean = jnp.mean(largest)
    distance = (largest - mean).reshape(-1)
    padded = jnp.pad(distance, (0, -len(distance) % SCALE_BLOCK)).reshape(-1, SCALE_BLOCK)
    nested = jnp.max(jnp.abs(padded), axis=-1)
    codes = nearest(padded / jnp.where(nested > 0, nested, 1)[:, None], SCALE_LEVELS)
    scale = codes.reshape(-1)[: len(distance)].reshape(largest.shape).astype(jnp.uint8)
    s = nf4_scales(scale, nested, mean)[..., None]
    levels = nearest(blocks / jnp.where(s == 0, 1, s), NF4_LEVELS)
    return NF4Tensor(pack(levels.reshape(w.shape).astype(jnp.uint8), 4), scale, nested, mean)


def nearest(x: Float[Array, "*N"], levels: Float[np.ndarray, " K"]) -> Int[Array, "*N"]:
    """The index of the nearest of ascending levels; of two as near, the lower one."""
    return jnp.searchsorted(jnp.asarray((levels[1:] + levels[:-1]) / 2), x, method="compare_all")
