"""Packed weights: the one definition of the numbers that every format re-encodes.

Grouped integers (`QuantizedTensor`) are what is shipped; NF4 (`NF4Tensor`) is a base for adapters.

Letters: L stacked layers (or none), O outputs, I inputs, G groups or blocks of a row, P packed bytes of a row.
"""

import dataclasses
import functools
import math
import operator
from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from export.errors import ArtifactError
from export.pytree import register

BITS = (3, 4, 5, 6, 8)
"""Bits that a code may have."""


@dataclasses.dataclass(frozen=True)
class QuantSpec:
    """How a weight is quantized: hashable, so a layer's spec is part of what is compiled."""

    bits: int = 4
    group_size: int = 64
    symmetric: bool = True
    scale_dtype: str = "bfloat16"

    def __post_init__(self):
        if self.bits not in BITS:
            raise ArtifactError(f"bits = {self.bits}: only {', '.join(map(str, BITS))} can be packed")
        if self.group_size < 2 or self.group_size * self.bits % 8:
            raise ArtifactError(
                f"group_size = {self.group_size}: {self.bits}-bit codes of a group must fill whole bytes"
            )

    @property
    def levels(self) -> int:
        """Number of codes: a code is an integer in 0 .. levels - 1."""
        return 1 << self.bits


@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """A weight [*L, O, I] as unsigned codes q, one scale s and one zero z a group: w = (q - z) * s.

    Attributes:
      packed: uint8 [*L, O, I * bits / 8]. A row's codes are a stream of bits, the low ones first: bit b of input i is
        bit (bits * i + b) % 8 of byte (bits * i + b) // 8.
      scale: `spec.scale_dtype` [*L, O, G].
      zero: uint8 [*L, O, G] in 0 .. levels - 1; None when symmetric, and then z = levels / 2.
      spec: static.
    """

    packed: UInt8[Array | np.ndarray, "*L O P"]
    scale: Float[Array | np.ndarray, "*L O G"]
    zero: UInt8[Array | np.ndarray, "*L O G"] | None
    spec: QuantSpec

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [*L, O, I] of the weight that this stands for."""
        return (*self.packed.shape[:-1], self.packed.shape[-1] * 8 // self.spec.bits)

    @property
    def ndim(self) -> int:
        return self.packed.ndim

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales, and of zero points at `bits` each."""
        zeros = 0 if self.zero is None else -(-self.zero.size * self.spec.bits // 8)
        return self.packed.nbytes + self.scale.nbytes + zeros

    def codes(self) -> UInt8[Array | np.ndarray, "*L O I"]:
        """The codes, one a byte."""
        return unpack(self.packed, self.spec.bits)

    def dequantize(self, dtype=jnp.float32) -> Float[Array | np.ndarray, "*L O I"]:
        """The weight, computed in float32 and rounded once to `dtype`."""
        q = self.codes().astype(jnp.float32).reshape(*self.scale.shape, self.spec.group_size)
        z = self.spec.levels // 2 if self.zero is None else self.zero[..., None].astype(jnp.float32)
        w = (q - z) * self.scale[..., None].astype(jnp.float32)
        return w.reshape(self.shape).astype(dtype)


def _normal_levels() -> np.ndarray:
    """The 16 levels of NF4: quantiles of N(0, 1) over the largest, 8 from 1/2 up and 7 below, and an exact zero."""
    outermost = (1 / 30 + 1 / 32) / 2  # of the mass, so that the quantiles' outer bins weigh as the inner ones do
    quantiles = np.vectorize(NormalDist().inv_cdf)
    below, above = quantiles(np.linspace(outermost, 0.5, 8)), quantiles(np.linspace(0.5, 1 - outermost, 9))
    return (np.concatenate([below, above[1:]]) / above[-1]).astype(np.float32)


def _dynamic_levels() -> np.ndarray:
    """The 256 levels of dynamic 8-bit floats: seven decades, of which each has twice as many as the one below it."""
    edges = [np.linspace(0.1, 1, 2**decade + 1) for decade in range(7)]
    positive = np.concatenate([10.0 ** (k - 6) * (edge[:-1] + edge[1:]) / 2 for k, edge in enumerate(edges)])
    return np.sort(np.concatenate([-positive, [0.0], positive, [1.0]])).astype(np.float32)


NF4_LEVELS, NF4_BLOCK = _normal_levels(), 64
"""What a code of NF4 stands for (arXiv:2305.14314, section 3 and appendix E), and the inputs that share a scale."""
SCALE_LEVELS, SCALE_BLOCK = _dynamic_levels(), 256
"""What a code of an NF4 scale stands for (arXiv:1511.04561), and the scales that share a scale of their own."""
# Both levels of a packed byte at once: one look-up a byte, and no codes in between.
_NF4_PAIRS = np.stack([np.tile(NF4_LEVELS, 16), np.repeat(NF4_LEVELS, 16)], axis=-1)


@dataclasses.dataclass(frozen=True)
class NF4Tensor:
    """A weight [*L, O, I] in 4-bit NormalFloat with double quantization (QLoRA, arXiv:2305.14314, section 3).

    w = NF4_LEVELS[q] * s, and a block's scale is s = SCALE_LEVELS[c] * d + m: of all scales of a matrix, in the order
    of its rows, m is the mean and d the largest distance from it in a block of `SCALE_BLOCK`.

    Attributes:
      packed: uint8 [*L, O, I / 2], input 2k in the low nibble of byte k.
      scale: uint8 [*L, O, G], the codes c; a block is `NF4_BLOCK` inputs.
      nested: float32 [*L, O * G / SCALE_BLOCK, rounded up], d.
      mean: float32 [*L], m.
    """

    packed: UInt8[Array | np.ndarray, "*L O P"]
    scale: UInt8[Array | np.ndarray, "*L O G"]
    nested: Float[Array | np.ndarray, "*L S"]
    mean: Float[Array | np.ndarray, "*L"]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [*L, O, I] of the weight that this stands for."""
        return (*self.packed.shape[:-1], self.packed.shape[-1] * 2)

    @property
    def ndim(self) -> int:
        return self.packed.ndim

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(leaf.nbytes for leaf in (self.packed, self.scale, self.nested, self.mean))

    def codes(self) -> UInt8[Array | np.ndarray, "*L O I"]:
        """The codes, one a byte."""
        return unpack(self.packed, 4)

    def dequantize(self, dtype=jnp.float32) -> Float[Array | np.ndarray, "*L O I"]:
        """The weight, computed in float32 and rounded once to `dtype`."""
        library = np if isinstance(self.packed, np.ndarray) else jnp
        levels = library.asarray(_NF4_PAIRS)[self.packed].reshape(*self.scale.shape, NF4_BLOCK)
        return (levels * nf4_scales(self.scale, self.nested, self.mean)[..., None]).reshape(self.shape).astype(dtype)


def nf4_scales(
    codes: UInt8[Array | np.ndarray, "*L O G"],
    nested: Float[Array | np.ndarray, "*L S"],
    mean: Float[Array | np.ndarray, "*L"],
) -> Float[Array | np.ndarray, "*L O G"]:
    """The scales of NF4 blocks in float32, as `NF4Tensor` defines them."""
    library = np if isinstance(codes, np.ndarray) else jnp
    largest = library.repeat(nested, SCALE_BLOCK, axis=-1)[..., : codes.shape[-2] * codes.shape[-1]]
    return library.asarray(SCALE_LEVELS)[codes] * largest.reshape(codes.shape) + mean[..., None, None]


register(QuantizedTensor, static=("spec",))
register(NF4Tensor)

PackedTensor = QuantizedTensor | NF4Tensor
Weights = dict[str, Array | np.ndarray | PackedTensor]


def pack(codes: UInt8[Array | np.ndarray, "*L I"], bits: int) -> UInt8[Array | np.ndarray, "*L P"]:
    """Put codes side by side into bytes, low bits first, a whole number of bytes a row. NumPy in, NumPy out."""
    if bits != 4 or isinstance(codes, np.ndarray):
        return _recut(codes, bits, 8)
    # XLA on a CPU takes the strided halves one by one.
    pairs = jax.lax.bitcast_convert_type(codes.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2), jnp.uint16)
    return (pairs | (pairs >> 4)).astype(jnp.uint8)


def unpack(packed: UInt8[Array | np.ndarray, "*L P"], bits: int) -> UInt8[Array | np.ndarray, "*L I"]:
    """Undo `pack`."""
    return _recut(packed, 8, bits)


def _recut(fields: UInt8[Array | np.ndarray, "*L N"], old: int, new: int) -> UInt8[Array | np.ndarray, "*L M"]:
    """Cut a stream of `old`-bit fields into fields of `new` bits: M = N * old / new."""
    if old == new:
        return fields
    run, size = math.lcm(old, new), fields.shape[-1]  # after `run` bits, both begin a field again
    within = fields.reshape(*fields.shape[:-1], size * old // run, run // old)

    def field(start: int):
        overlapping = range(start // old, -(-(start + new) // old))
        parts = [_shift(within[..., i], i * old - start) for i in overlapping]
        return functools.reduce(operator.or_, parts) & ((1 << new) - 1)

    library = np if isinstance(fields, np.ndarray) else jnp
    made = library.stack([field(start) for start in range(0, run, new)], axis=-1)
    return made.reshape(*fields.shape[:-1], size * old // new)


def _shift(fields, by: int):
    return fields << by if by > 0 else fields >> -by if by else fields


def misfits(shapes: dict[str, tuple[int, ...]], group_size: int) -> list[str]:
    """The tensors whose last dimension `group_size` does not divide, each as 'name (I = 576)'."""
    return [f"{name} (I = {shape[-1]})" for name, shape in shapes.items() if shape[-1] % group_size]
