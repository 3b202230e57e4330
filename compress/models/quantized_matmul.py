"""Products with a weight that stays packed: by kernels on NVIDIA GPUs and TPUs, and in XLA.

The platform, the shapes and the dtype decide when a program is traced. The kernels dequantize a tile in registers,
multiply in bfloat16 and accumulate in float32. With many rows a weight is dequantized whole instead: that costs little
beside the product, which then runs at the platform's full rate.

A byte of 4-bit codes holds inputs 2k and 2k + 1. No kernel interleaves them: the product is that of the even inputs
with the low nibbles plus that of the odd ones with the high nibbles.

Letters: B rows, O outputs, I inputs, G groups, N codes of a byte, P = I / N packed bytes of a row.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int, Int8, UInt8

from compress.models.flash import device_kind
from export.quantized import QuantizedTensor, QuantSpec

FEW_ROWS = {"cpu": 128, "gpu": 256, "tpu": 256}
"""The most rows for which a weight is dequantized in parts, by platform."""
CHUNK = 1 << 18  # weights dequantized at a time on a CPU: in float32 a core's own cache holds them
LEAST_ROWS = 16  # of a tile of bfloat16, on a tensor core and in a TPU's register
TILE_ROWS, TILES, PROGRAMS = 64, (128, 64, 32, 16), 128  # a GPU's tiles of rows and outputs; how many keep it busy
TPU_OUTPUTS, TPU_BYTES = 256, 512  # a TPU's tile of packed bytes


@jax.custom_vjp
def quantized_matmul(x: Float[Array, "*B I"], weight: QuantizedTensor) -> Float[Array, "*B O"]:
    """`x W^T` in the dtype of x, for a packed weight [O, I], which is a constant.

    Its gradient is `dx = dy W`, through the weight dequantized once more.
    """
    return multiply(x, weight)


def multiply(x: Float[Array, "*B I"], weight: QuantizedTensor) -> Float[Array, "*B O"]:
    """`quantized_matmul` without its gradient."""
    rows = x.reshape(-1, x.shape[-1])
    name = path_for(*device_kind(), x.dtype, len(rows), weight.shape, weight.spec)
    # The compiler can split neither a kernel nor a loop over outputs among devices.
    path = PATHS[name] if name and jax.sharding.get_abstract_mesh().empty else dequantized
    return path(rows, weight).reshape(*x.shape[:-1], -1)


def _forward(x, weight):
    return multiply(x, weight), (x, weight)


def _backward(saved, dy):
    _, weight = saved
    return jnp.matmul(dy, weight.dequantize(dy.dtype)), None


quantized_matmul.defvjp(_forward, _backward)


def path_for(platform: str, generation: int, dtype, rows: int, shape: tuple[int, ...], spec: QuantSpec) -> str | None:
    """Which of `PATHS` takes a product of this kind; None where the weight is best dequantized whole.

    Args:
      platform, generation: as `compress.models.flash.kernel_for` takes them.
      rows: of x.
      shape: of the weight, (O, I).
    """
    if rows > FEW_ROWS.get(platform, 0) or spec.bits not in (4, 8):
        return None
    if platform == "cpu":
        return "blocks" if spec.bits == 4 else None
    if dtype != jnp.bfloat16:
        return None
    if platform == "tpu":
        return "tpu" if spec.scale_dtype in ("bfloat16", "float32") else None
    # Triton's tiles are powers of two, and its products have at least 16 terms.
    size = spec.group_size * spec.bits // 8
    takes = generation >= 8 and size >= 16 and size & (size - 1) == 0 and shape[0] % TILES[-1] == 0
    return "gpu" if takes else None


def round_tokens(x: Float[Array, "*B I"]) -> tuple[Int8[Array, "*B I"], Float[Array, "*B 1"]]:
    """Each row on a symmetric scale of its own, its largest magnitude over 127: codes and float32 scales."""
    x = x.astype(jnp.float32)
    # Of a row of zeros the scale is not zero; that of a row with a NaN is NaN, so that it stays visible.
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127, jnp.finfo(jnp.float32).tiny)
    return jnp.clip(jnp.round(x / scale), -127, 127).astype(jnp.int8), scale


def dequantized(x: Float[Array, "B I"], weight: QuantizedTensor) -> Float[Array, "B O"]:
    """The product with the whole weight in floats."""
    return x @ weight.dequantize(x.dtype).T


def by_nibble(x: Float[Array, "B I"], bits: int) -> Float[Array, "N B P"]:
    """The inputs apart that are codes of one byte."""
    parts = 8 // bits
    return x.reshape(len(x), -1, parts).transpose(2, 0, 1)


def nibbles(packed: UInt8[Array | np.ndarray, "*O P"], bits: int) -> list[Int[Array, "*O P"]]:
    """The codes of each place in a byte, as int32."""
    words = jnp.asarray(packed).astype(jnp.int32)
    return [words] if bits == 8 else [words & 15, words >> 4]


def blocks(x: Float[Array, "B I"], weight: QuantizedTensor) -> Float[Array, "B O"]:
    """The product in blocks of outputs, whose weights are dequantized into the cache and not into memory."""
    spec = weight.spec
    parts = by_nibble(x, spec.bits)

    def of_one(row: QuantizedTensor) -> Float[Array, " B"]:
        zero = spec.levels // 2 if row.zero is None else row.zero[:, None].astype(jnp.float32)
        scale = row.scale[:, None].astype(jnp.float32)
        codes = nibbles(row.packed.reshape(len(row.scale), -1), spec.bits)
        floats = [((q.astype(jnp.float32) - zero) * scale).reshape(-1).astype(x.dtype) for q in codes]
        return sum((part @ w for part, w in zip(parts, floats, strict=True)), jnp.zeros(len(x), x.dtype))

    size = max(1, CHUNK // weight.shape[1])
    if size >= weight.shape[0]:
        return jax.vmap(of_one)(weight).T
    return jax.lax.map(of_one, weight, batch_size=size).T


def operands(x: Float[Array, "B I"], weight: QuantizedTensor, multiple: int) -> tuple[list[Array], int]:
    """What kernels are given, without zero points where there are none, and x's rows, padded to a multiple."""
    rows = -(-len(x) // multiple) * multiple
    parts = by_nibble(jnp.pad(x, ((0, rows - len(x)), (0, 0))), weight.spec.bits)
    return [parts, weight.packed, weight.scale, *(() if weight.zero is None else (weight.zero,))], rows


def gpu(x: Float[Array, "B I"], weight: QuantizedTensor, *, interpret: bool = False) -> Float[Array, "B O"]:
    """The product by a Triton kernel: a program a tile of rows and outputs, which goes through the groups."""
    tile_rows = min(TILE_ROWS, max(LEAST_ROWS, pl.next_power_of_2(len(x))))
    arrays, rows = operands(x, weight, tile_rows)
    outputs = weight.shape[0]
    fits = [tile for tile in TILES if outputs % tile == 0]
    tile = next((tile for tile in fits if rows // tile_rows * (outputs // tile) >= PROGRAMS), fits[-1])
    of_rows = pl.BlockSpec((len(arrays[0]), tile_rows, arrays[0].shape[-1]), lambda row, output: (0, row, 0))
    whole = [pl.BlockSpec((tile, array.shape[-1]), lambda row, output: (output, 0)) for array in arrays[1:]]
    return pl.pallas_call(
        partial(_gpu_kernel, spec=weight.spec),
        grid=(rows // tile_rows, outputs // tile),
        in_specs=[of_rows, *whole],
        out_specs=pl.BlockSpec((tile_rows, tile), lambda row, output: (row, output)),
        out_shape=jax.ShapeDtypeStruct((rows, outputs), x.dtype),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
    )(*arrays)[: len(x)]


def _gpu_kernel(x_ref, packed_ref, scale_ref, *rest, spec: QuantSpec):
    *zero_refs, out_ref = rest
    size = spec.group_size * spec.bits // 8

    def add_group(group, total):
        inside, at = pl.ds(group * size, size), pl.ds(group, 1)
        scale = scale_ref[:, at].astype(jnp.float32)
        zero = zero_refs[0][:, at].astype(jnp.float32) if zero_refs else spec.levels / 2
        for part, q in enumerate(nibbles(packed_ref[:, inside], spec.bits)):
            w = ((q.astype(jnp.float32) - zero) * scale).astype(x_ref.dtype)
            total += triton.dot(x_ref[part, :, inside], w, trans_b=True)
        return total

    total = jnp.zeros(out_ref.shape, jnp.float32)
    out_ref[...] = jax.lax.fori_loop(0, scale_ref.shape[1], add_group, total).astype(out_ref.dtype)


def tpu(x: Float[Array, "B I"], weight: QuantizedTensor, *, interpret: bool = False) -> Float[Array, "B O"]:
    """The product by a Mosaic kernel: a program a tile of packed bytes, which adds to the sums of its outputs."""
    arrays, rows = operands(x, weight, LEAST_ROWS)
    outputs, size = weight.shape[0], weight.packed.shape[1]
    tiles = pl.cdiv(size, TPU_BYTES)
    arrays[0] = jnp.pad(arrays[0], ((0, 0), (0, 0), (0, tiles * TPU_BYTES - size)))
    tile = min(TPU_OUTPUTS, outputs)
    groups = pl.BlockSpec((tile, weight.scale.shape[1]), lambda output, k: (output, 0))
    sums = pl.pallas_call(
        partial(_tpu_kernel, spec=weight.spec),
        grid=(pl.cdiv(outputs, tile), tiles),
        in_specs=[
            pl.BlockSpec((len(arrays[0]), rows, TPU_BYTES), lambda output, k: (0, 0, k)),
            pl.BlockSpec((tile, TPU_BYTES), lambda output, k: (output, k)),
            *[groups] * (len(arrays) - 2),
        ],
        out_specs=pl.BlockSpec((rows, tile), lambda output, k: (0, output)),
        out_shape=jax.ShapeDtypeStruct((rows, outputs), jnp.float32),
        interpret=interpret,
    )(*arrays)
    return sums[: len(x)].astype(x.dtype)


def _tpu_kernel(x_ref, packed_ref, scale_ref, *rest, spec: QuantSpec):
    *zero_refs, out_ref = rest
    k = pl.program_id(1)
    groups, width = scale_ref.shape[1], packed_ref.shape[1]

    @pl.when(k == 0)
    def _():
        out_ref[...] = jnp.zeros(out_ref.shape, out_ref.dtype)

    # Which bytes are a group's, in zeros and ones: a product with them repeats numbers along lanes, which a TPU cannot
    # do by itself. Bytes beyond the row are no group's, so that their scale is zero whatever they hold.
    size = spec.group_size * spec.bits // 8
    byte = k * width + jax.lax.broadcasted_iota(jnp.int32, (groups, width), 1)
    first = size * jax.lax.broadcasted_iota(jnp.int32, (groups, width), 0)
    owns = ((first <= byte) & (byte < first + size)).astype(jnp.float32)

    def spread(ref):
        numbers = ref[...].astype(jnp.int32) if ref.dtype == jnp.uint8 else ref[...]
        return jnp.dot(numbers.astype(jnp.float32), owns, precision=jax.lax.Precision.HIGHEST)

    scale = spread(scale_ref)
    zero = spread(zero_refs[0]) if zero_refs else spec.levels / 2
    for part, q in enumerate(nibbles(packed_ref[...], spec.bits)):
        w = ((q.astype(jnp.float32) - zero) * scale).astype(x_ref.dtype)
        out_ref[...] += jax.lax.dot_general(
            x_ref[part], w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )


PATHS: dict[str, Callable[..., Array]] = {"blocks": blocks, "gpu": gpu, "tpu": tpu}
