"""The numbers of GGUF tensors: block types to float32, floats and grouped integers to block types.

Letters: O outputs, I inputs, B blocks of 32 inputs, P packed bytes.
Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

import jax
import ml_dtypes
import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from jaxtyping import Float, UInt8

from export.errors import ArtifactError
from export.quantized import QuantizedTensor, unpack

READABLE = tuple(
    GGMLQuantizationType[name]
    for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
)
# By bits and symmetry of a quantized tensor.
QUANTIZED = {
    (4, True): GGMLQuantizationType.Q4_0,
    (4, False): GGMLQuantizationType.Q4_1,
    (5, True): GGMLQuantizationType.Q5_0,
    (5, False): GGMLQuantizationType.Q5_1,
    (8, True): GGMLQuantizationType.Q8_0,
}
FLOAT_TYPES = ("F32", "F16", "BF16", "Q8_0")
BLOCK = 32
CHUNK = 1 << 20  # elements converted at a time, so that a conversion needs little beyond its result


def dequantize(raw: UInt8[np.ndarray, " P"], kind: GGMLQuantizationType) -> Float[np.ndarray, " N"]:
    """The values of consecutive blocks in float32, by the definitions of gguf-py.

    A float8 or other type outside `READABLE` is the caller's to refuse.
    """
    block, size = GGML_QUANT_SIZES[kind]
    values = np.empty(raw.size // size * block, np.float32)
    step = max(1, CHUNK // block)
    # One long row a call: gguf-py walks through many short ones in Python.
    with np.errstate(invalid="ignore", over="ignore"):
        for first in range(0, raw.size // size, step):
            part = raw[first * size : (first + step) * size]
            values[first * block : (first + step) * block] = quants.dequantize(part[None], kind)[0]
    return values


def block_type(name: str, value: np.ndarray | jax.Array | QuantizedTensor, float_type: str) -> GGMLQuantizationType:
    """The block type that `encode` gives a tensor.

    Vectors are F32, as llama.cpp wants them; a matrix whose rows are not whole blocks is F16 instead of Q8_0.

    Raises:
      ArtifactError: a quantized tensor has no GGUF form.
    """
    if not isinstance(value, QuantizedTensor):
        if value.ndim == 1:
            return GGMLQuantizationType.F32
        whole = float_type != "Q8_0" or value.shape[-1] % BLOCK == 0
        return GGMLQuantizationType[float_type if whole else "F16"]
    spec = value.spec
    if value.ndim != 2 or spec.group_size % BLOCK:
        raise ArtifactError(
            f"{name}: groups of {spec.group_size}: GGUF's blocks of {BLOCK} must lie within a group; "
            "quantize with a group size that is a multiple of 32"
        )
    require_gguf_form(name, spec.bits, spec.symmetric)
    return QUANTIZED[spec.bits, spec.symmetric]


def require_gguf_form(name: str, bits: int, symmetric: bool) -> None:
    """Refuse what no block type holds.

    Raises:
      ArtifactError: it says which bits there are.
    """
    if (bits, symmetric) not in QUANTIZED:
        raise ArtifactError(
            f"{name}: {bits} bits {'without' if symmetric else 'with'} zero points have no GGUF form; "
            "quantize to 4 or 5 bits, or to 8 symmetrically"
        )


def encode(name: str, value: np.ndarray | QuantizedTensor, kind: GGMLQuantizationType) -> UInt8[np.ndarray, "..."]:
    """A tensor as the bytes of its blocks, row by row, in the type that `block_type` gave.

    A quantized tensor keeps its integers, and its scales exactly (see `half_scales`); a Q4_1 or Q5_1 block stores the
    offset -z * s rounded to float16.

    Raises:
      ArtifactError: a value is NaN, infinite or out of the type's range.
    """
    if isinstance(value, QuantizedTensor):
        return _encode_quantized(name, value, kind)
    flat = value.reshape(-1, value.shape[-1])
    block, size = GGML_QUANT_SIZES[kind]
    raw = np.empty((flat.shape[0], flat.shape[1] // block * size), np.uint8)
    step = max(1, CHUNK // flat.shape[1])
    for first in range(0, flat.shape[0], step):
        part = np.ascontiguousarray(flat[first : first + step], np.float32)
        if not np.isfinite(part).all():
            raise ArtifactError(f"{name}: NaN or Inf; the checkpoint is damaged, fetch or make it anew")
        raw[first : first + step] = _encode_floats(name, part, kind)
    return raw.reshape(*value.shape[:-1], raw.shape[-1])


def _encode_floats(name: str, part: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    if kind == GGMLQuantizationType.F32:
        return part.view(np.uint8)
    if kind == GGMLQuantizationType.BF16:
        narrow = part.astype(ml_dtypes.bfloat16)
        if not np.isfinite(narrow.astype(np.float32)).all():
            raise ArtifactError(f"{name}: values out of bfloat16's range; write F32")
        return narrow.view(np.uint8)
    if np.abs(part).max(initial=0) >= (65520 if kind == GGMLQuantizationType.F16 else 127 * 65520):
        raise ArtifactError(f"{name}: values out of float16's range; write BF16 or F32")
    return quants.quantize(part, kind).view(np.uint8)


def _encode_quantized(name: str, tensor: QuantizedTensor, kind: GGMLQuantizationType) -> np.ndarray:
    packed = np.asarray(tensor.packed)
    per_group = tensor.spec.group_size // BLOCK
    rows, blocks = packed.shape[0], tensor.shape[1] // BLOCK
    scale = half_scales(name, np.asarray(tensor.scale))
    d = np.repeat(scale, per_group, axis=1)[..., None]
    if kind == GGMLQuantizationType.Q8_0:
        signed = (packed ^ 128).reshape(rows, blocks, BLOCK)  # q - 128 in two's complement
        return np.concatenate([d.view(np.uint8), signed], axis=-1).reshape(rows, -1)
    codes = unpack(packed, tensor.spec.bits).reshape(rows, blocks, BLOCK)
    parts: list[np.ndarray] = [d.view(np.uint8)]
    if tensor.zero is not None:
        offset = -np.asarray(tensor.zero).astype(np.float32) * np.asarray(tensor.scale).astype(np.float32)
        m = np.repeat(offset.astype(np.float16), per_group, axis=1)[..., None]
        if not np.isfinite(m).all():
            raise ArtifactError(f"{name}: an offset -z * s out of float16's range; export compressed-tensors instead")
        parts.append(m.view(np.uint8))
    if tensor.spec.bits == 5:
        parts.append(np.packbits(codes >> 4, axis=-1, bitorder="little"))
    first, second = np.split(codes, 2, axis=-1)
    parts.append(first & 15 | second << 4)
    return np.concatenate(parts, axis=-1).reshape(rows, -1)


def half_scales(name: str, scale: Float[np.ndarray, "O G"]) -> Float[np.ndarray, "O G"]:
    """Scales in float16, exactly.

    A bfloat16 scale of at least 2**-14 has few enough bits. Below, float16 is subnormal and a scale is rounded by
    at most 2**-25, which moves no weight by more than 128 * 2**-25.

    Raises:
      ArtifactError: a scale is NaN, infinite, over 65504, or has more bits than float16.
    """
    wide = scale.astype(np.float32)
    with np.errstate(over="ignore"):
        half = wide.astype(np.float16)
    if not np.isfinite(half).all():
        raise ArtifactError(f"{name}: a scale out of float16's range; export compressed-tensors instead")
    if np.any((half.astype(np.float32) != wide) & (np.abs(wide) >= 2.0**-14)):
        raise ArtifactError(f"{name}: {scale.dtype} scales have no exact float16; quantize with bfloat16 scales")
    return half
