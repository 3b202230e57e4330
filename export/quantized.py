"""Grouped integer weights: the one definition of the numbers that every format re-encodes.

Letters: L stacked layers (or none), O outputs, I inputs, G groups of `group_size` inputs (I = G * group_size).
"""

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from export.errors import ArtifactError


@dataclasses.dataclass(frozen=True)
class QuantSpec:
    """How a weight is quantized: hashable, so a layer's spec is part of what is compiled."""

    bits: int = 4
    group_size: int = 64
    symmetric: bool = True
    scale_dtype: str = "bfloat16"

    def __post_init__(self):
        if self.bits not in (4, 8):
            raise ArtifactError(f"bits = {self.bits}: only 4 and 8 can be packed")
        if self.group_size < 2 or self.group_size % 2:
            raise ArtifactError(f"group_size = {self.group_size}: must be a positive even number")

    @property
    def levels(self) -> int:
        """Number of codes: a code is an integer in 0 .. levels - 1."""
        return 1 << self.bits


@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """A weight [*L, O, I] as unsigned codes q, one scale s and one zero z a group: w = (q - z) * s.

    Attributes:
      packed: uint8 [*L, O, I * bits / 8]. At 4 bits input 2k is the low nibble of byte k and input 2k + 1 the
        high one; at 8 bits a code is a byte.
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


def _flatten(tensor: QuantizedTensor) -> tuple[tuple, QuantSpec]:
    return tuple((jax.tree_util.GetAttrKey(name), getattr(tensor, name)) for name in _ARRAYS), tensor.spec


def _unflatten(spec: QuantSpec, leaves: Iterable) -> QuantizedTensor:
    # JAX puts shapes, shardings and bare objects in the leaves' places, so the constructor's checks are passed by.
    tensor = object.__new__(QuantizedTensor)
    for name, value in zip((*_ARRAYS, "spec"), (*leaves, spec)):
        object.__setattr__(tensor, name, value)
    return tensor


_ARRAYS = ("packed", "scale", "zero")
jax.tree_util.register_pytree_with_keys(QuantizedTensor, _flatten, _unflatten)

Weights = dict[str, Array | np.ndarray | QuantizedTensor]


def pack(codes: UInt8[Array | np.ndarray, "*L I"], bits: int) -> UInt8[Array | np.ndarray, "*L P"]:
    """Put codes side by side into bytes, low nibble first; 8-bit codes are bytes already. NumPy in, NumPy out."""
    if bits == 8:
        return codes
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: UInt8[Array | np.ndarray, "*L P"], bits: int) -> UInt8[Array | np.ndarray, "*L I"]:
    """Undo `pack`."""
    if bits == 8:
        return packed
    stack = np.stack if isinstance(packed, np.ndarray) else jnp.stack
    pairs = stack([packed & 15, packed >> 4], axis=-1)
    return pairs.reshape(*packed.shape[:-1], packed.shape[-1] * 2)


def misfits(shapes: dict[str, tuple[int, ...]], group_size: int) -> list[str]:
    """The tensors whose last dimension `group_size` does not divide, each as 'name (I = 576)'."""
    return [f"{name} (I = {shape[-1]})" for name, shape in shapes.items() if shape[-1] % group_size]
