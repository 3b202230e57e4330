"""Attention that never holds a row's scores: cuDNN's on NVIDIA GPUs, the splash kernel on TPUs (FlashAttention,
arXiv:2205.14135).

The platform and the shapes decide when a program is traced. What no kernel takes goes the common way, through
`compress.models.attention.attend`.

Letters: B batch, T tokens, H heads, K key-value heads, E head dimension.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from compress.models.spread import ROW_AXES

LANES = 128  # the splash kernel's blocks are a multiple of a TPU register's width
BLOCKS = (512, 256, LANES)


def cudnn(q, k, v, mask, segments, *, scale: float, softcap: None) -> Float[Array, "B T H E"]:
    """Attention by cuDNN; the mask becomes a bias that all heads share."""
    return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], scale=scale, implementation="cudnn")


def splash(
    q, k, v, mask, segments, *, scale: float, softcap: float | None, interpret: bool = False
) -> Float[Array, "B T H E"]:
    """Attention by the splash kernel, causal within equal segments."""
    heads, time = q.shape[2], q.shape[1]
    block: Any = next(block for block in BLOCKS if time % block == 0)
    kernel = splash_attention.make_splash_mha_single_device(
        splash_mask.MultiHeadMask([splash_mask.CausalMask((time, time))] * heads),
        block_sizes=splash_attention.BlockSizes(*[block] * 8),
        attn_logits_soft_cap=softcap,
        interpret=interpret,
    )
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q * jnp.asarray(scale, q.dtype), k, v))
    ids = splash_attention.SegmentIds(segments, segments)
    return jax.vmap(kernel)(q, k, v, ids).transpose(0, 2, 1, 3)


KERNELS: dict[str, Callable[..., Array]] = {"cudnn": cudnn, "splash": splash}


def kernel_for(
    platform: str, generation: int, dtype, *, time: int, head_dim: int, softcap: float | None, packed: bool
) -> str | None:
    """Which of `KERNELS` takes attention of this kind; None where none does.

    Args:
      platform: as JAX names it.
      generation: the first number of an NVIDIA GPU's compute capability; 0 for every other device.
      packed: the mask is causality within segments and nothing else, no window and no branches.
    """
    if dtype != jnp.bfloat16:
        return None
    if platform == "tpu":
        return "splash" if packed and time % LANES == 0 else None
    widest = {8: 128}.get(generation, 256)
    takes = generation >= 8 and softcap is None and time % 2 == 0 and head_dim % 8 == 0 and head_dim <= widest
    return "cudnn" if platform == "gpu" and takes else None


def device_kind() -> tuple[str, int]:
    """The platform that programs are made for, and `kernel_for`'s generation."""
    major = str(getattr(jax.devices()[0], "compute_capability", "")).partition(".")[0]
    return jax.default_backend(), int(major) if major.isdigit() else 0


def flash_attention(
    q: Float[Array, "B T H E"],
    k: Float[Array, "B T K E"],
    v: Float[Array, "B T K E"],
    mask: Bool[Array, "B T T"],
    segments: Int[Array | np.ndarray, "B T"] | None,
    *,
    scale: float,
    softcap: float | None,
) -> Float[Array, "B T H E"] | None:
    """Values weighted by the softmax of the scores, by this platform's kernel; None where it has none for them.

    Args:
      segments: given where the mask is causality within them and nothing else.
    """
    time, head_dim = q.shape[1], q.shape[3]
    kind: dict[str, Any] = {"time": time, "head_dim": head_dim, "softcap": softcap, "packed": segments is not None}
    name = kernel_for(*device_kind(), q.dtype, **kind)
    return (
        None
        if name is None
        else on_each_device(partial(KERNELS[name], scale=scale, softcap=softcap))(q, k, v, mask, segments)
    )


def on_each_device(kernel: Callable[..., Array]) -> Callable[..., Array]:
    """A kernel that sees a device's own rows and heads, since the compiler cannot split it; all, without a mesh."""

    def run(q, k, v, mask, segments):
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            return kernel(q, k, v, mask, segments)
        axis = "tensor" if k.shape[2] % mesh.shape["tensor"] == 0 else None
        heads, rows = PartitionSpec(ROW_AXES, None, axis), PartitionSpec(ROW_AXES)
        specs = (heads, heads, heads, rows, rows)
        return jax.shard_map(kernel, in_specs=specs, out_specs=heads, check_vma=False)(q, k, v, mask, segments)

    return run
