"""Linear layers, norms and embeddings over dense or quantized weights, with or without adapters.

Letters: L stacked layers (or none), B batch, T time, I inputs, O outputs, R adapter rank.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from compress.models.quantized_matmul import quantized_matmul
from export.quantized import PackedTensor, QuantizedTensor, QuantSpec


def slot(*shape: int) -> nnx.Param:
    """A place for a weight of this shape; `bind` puts the weight there."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32))


def bind(module: nnx.Module, weights: dict) -> nnx.Module:
    """Put each weight where its dotted name says, as in `self_attn.q_proj.weight`.

    The module is made afresh inside each trace, so that nothing is shared between traces.
    """
    for name, value in weights.items():
        *path, leaf = name.split(".")
        target = module
        for step in path:
            target = getattr(target, step)
        setattr(target, leaf, nnx.Param(value))
    return module


def dense(weight: Array | PackedTensor, dtype) -> Array:
    """The weight as an array of `dtype`."""
    return jnp.asarray(weight.dequantize(dtype) if isinstance(weight, PackedTensor) else weight.astype(dtype))


def rows(weight: Array | PackedTensor, ids: Int[Array | np.ndarray, "..."], dtype) -> Float[Array, "... I"]:
    """Rows of a weight [O, I]; of a quantized one only those asked for are dequantized."""
    return dense(jax.tree.map(lambda leaf: leaf[ids], weight), dtype)


def row_norms(weight: Float[Array, "O I"]) -> Float[Array, " O"]:
    """The length of each output's weights; of one whose weights are all zero, 1."""
    norms = jnp.linalg.norm(weight, axis=-1)
    return jnp.where(norms > 0, norms, 1.0)


def product(x: Float[Array, "*B I"], weight: Array | PackedTensor) -> Float[Array, "*B O"]:
    """`x W^T` in the dtype of x, for a weight [O, I]; a quantized one is a constant."""
    return quantized_matmul(x, weight) if isinstance(weight, QuantizedTensor) else dense_product(x, weight)


@jax.custom_vjp
def dense_product(x: Float[Array, "*B I"], weight: Array | PackedTensor) -> Float[Array, "*B O"]:
    """`product` with the whole weight in floats.

    What is kept for the backward pass is x and the weight as it is, so a quantized one is dequantized once more there.
    """
    return jax.lax.dot_general(x, dense(weight, x.dtype), (((x.ndim - 1,), (1,)), ((), ())))


def _product_forward(x, weight):
    return dense_product(x, weight), (x, weight)


def _product_backward(saved, dy):
    x, weight = saved
    dx = jnp.matmul(dy, dense(weight, dy.dtype))
    if isinstance(weight, PackedTensor):
        return dx, None
    # As matrices: XLA on a CPU transposes one of them, and is slow at that for three axes.
    d_weight = dy.reshape(-1, dy.shape[-1]).T @ x.reshape(-1, x.shape[-1])
    return dx, d_weight.astype(weight.dtype)


dense_product.defvjp(_product_forward, _product_backward)


@partial(jax.tree_util.register_dataclass, data_fields=["keys"], meta_fields=["rate"])
@dataclasses.dataclass(frozen=True)
class Dropout:
    """Dropout of an adapter's input: one key a row, so that how rows are batched never changes what is dropped."""

    keys: Key[Array, "*L B"]
    rate: float

    def __call__(self, x: Float[Array, "B T I"]) -> Float[Array, "B T I"]:
        # A draw takes 16 bits, so that a word of the generator, which is what dropout costs, makes two.
        size = x[0].size
        words = jax.vmap(lambda key: jax.random.bits(key, (-(-size // 2),), jnp.uint32))(self.keys)
        draws = jax.lax.bitcast_convert_type(words, jnp.uint16).reshape(len(x), -1)[:, :size].reshape(x.shape)
        least = round(self.rate * 2**16)
        return jnp.where(draws >= least, x / (1 - least / 2**16), 0)


@partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["quantize"])
@dataclasses.dataclass(frozen=True)
class Landing:
    """What adapters train towards: `quantize(W + B A, spec of W)` is what they will have become part of.

    It stands beside a base's weight, so that whoever places adapters there need not know of it.
    """

    quantize: Callable[[Float[Array, "O I"], QuantSpec], Float[Array, "O I"]]


@partial(jax.tree_util.register_dataclass, data_fields=["parts"], meta_fields=["form"])
@dataclasses.dataclass(frozen=True)
class Formed:
    """A weight [O, I] that is formed where it is used, `form(*parts)`: its parts train, and it is never kept whole."""

    form: Callable[..., Float[Array, "O I"]]
    parts: tuple


class Linear(nnx.Module):
    """`y = x W^T + b`, plus `B A dropout(x)` where adapters are bound (LoRA, arXiv:2106.09685, eq. 3).

    With a magnitude m too, each output of `x W^T + B A dropout(x)` is multiplied by `m / ||W + B A||`, the norm of its
    row, through which no gradient goes (DoRA, arXiv:2402.09353, eq. 5 and section 4.3).
    With a `Landing` it is `y = x quantize(W + B A)^T + b`, and nothing is dropped, as no input is the adapters' alone.
    The adapters' scale is already in B. The input is kept as an `nnx.Intermediate`, which costs nothing unless
    the caller of the block asks for it (calibration does).
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False):
        self.weight = slot(outputs, inputs)
        self.bias = slot(outputs) if bias else None
        self.lora_A, self.lora_B, self.lora_magnitude_vector = nnx.data(None), nnx.data(None), nnx.data(None)
        self.lora_dropout, self.lora_landing = nnx.data(None), nnx.data(None)

    def __call__(self, x: Float[Array, "B T I"]) -> Float[Array, "B T O"]:
        self.input = nnx.Intermediate(x)
        weight, landing = self.weight.get_value(), self.lora_landing
        if isinstance(weight, Formed):
            weight = weight.form(*weight.parts)
        if self.lora_A is not None and landing is not None:
            merged = dense(weight, jnp.float32) + self.lora_B.get_value() @ self.lora_A.get_value()
            weight = landing.get_value().quantize(merged, weight.spec)
        y = product(x, weight)
        if self.lora_A is not None and landing is None:
            a, b = self.lora_A.get_value(), self.lora_B.get_value()
            dropped = x if self.lora_dropout is None else self.lora_dropout.get_value()(x)
            y = y + product(product(dropped, a), b)
            if self.lora_magnitude_vector is not None:
                norms = jax.lax.stop_gradient(row_norms(dense(weight, jnp.float32) + b @ a))
                y = y * (self.lora_magnitude_vector.get_value() / norms).astype(x.dtype)
        if self.bias is not None:
            y = y + self.bias.get_value().astype(x.dtype)
        return y


class RMSNorm(nnx.Module):
    """`x / sqrt(mean(x^2) + eps) * (offset + w)` over the last axis, in float32 (arXiv:1910.07467, eq. 4).

    What the weight is multiplied with is kept as an `nnx.Intermediate`, as `Linear` keeps its input.
    """

    def __init__(self, size: int, eps: float, offset: float = 0.0):
        self.weight = slot(size)
        self.eps = eps
        self.offset = offset

    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... I"]:
        f = x.astype(jnp.float32)
        normed = f * jax.lax.rsqrt(jnp.mean(f * f, axis=-1, keepdims=True) + self.eps)
        self.normed = nnx.Intermediate(normed)
        return (normed * (self.offset + self.weight.get_value().astype(jnp.float32))).astype(x.dtype)
