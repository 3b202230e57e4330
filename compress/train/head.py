"""Losses at the vocabulary head, over chunks of tokens, so that the logits never exist whole.

A loss of a token is a function of its logits. The gradient of the hidden states is formed in the forward pass, chunk
by chunk, and only scaled in the backward pass: of [B, T, V] numbers no more than [B, C, V] live at a time. (The idea
of fusing the projection with the loss: Liger Kernel, arXiv:2410.10989, section 3.2.)

Letters: B batch, T time, C time of a chunk, V vocabulary, D model.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from compress.models.spread import alone, row_devices

Loss = Float[Array, ""]
BLOCKS = 16  # of the vocabulary, at most


@dataclasses.dataclass(frozen=True)
class HeadLoss:
    """What to compute at the head; static under jit.

    Attributes:
      project: (hidden [..., D], weight [V, D]) -> logits [..., V] in float32.
      loss: (logits [V], *context of the token) -> (scalar, dict of scalars to log); vmapped over tokens.
      context: (frozen, inputs of a chunk) -> tuple of arrays [B, C, ...]; computed chunk by chunk, as the teacher's
        logits are. The default hands the inputs on.
      chunk: tokens per chunk on a device, about.
    """

    project: Callable[..., Array]
    loss: Callable[..., tuple[Loss, dict[str, Loss]]]
    context: Callable[[Any, tuple], tuple] = lambda frozen, inputs: inputs
    chunk: int = 512


def cross_entropy(logits: Float[Array, " V"], target: Array) -> tuple[Loss, dict[str, Loss]]:
    """Negative log-likelihood of the target, in nats."""
    return jax.nn.logsumexp(logits) - logits[target], {}


def _split(head: HeadLoss, hidden: Array, tree: Any) -> tuple[Any, int]:
    """Cut the time axis of every leaf into chunks, scanned axis first; the last chunk is filled with zeros."""
    batch, time = hidden.shape[:2]
    size = min(time, max(1, head.chunk * row_devices() // batch))
    count = -(-time // size)

    def cut(leaf):
        filled = jnp.pad(leaf, [(0, 0), (0, count * size - time)] + [(0, 0)] * (leaf.ndim - 2))
        return jnp.moveaxis(filled.reshape(batch, count, size, *leaf.shape[2:]), 1, 0)

    return jax.tree.map(cut, tree), time


def _join(leaf: Array, time: int) -> Array:
    """Undo `_split`."""
    moved = jnp.moveaxis(leaf, 0, 1)
    return moved.reshape(moved.shape[0], -1, *moved.shape[3:])[:, :time]


def _take(order: Array, leaf: Array | np.ndarray) -> Array:
    """Each row's tokens in that order."""
    return jnp.take_along_axis(leaf, order.reshape(order.shape + (1,) * (leaf.ndim - 2)), axis=1)


def _add_gradients(head: HeadLoss, total, hidden, weight, d_logits):
    """Add to `total` what the weight's gradient is; beside it the hidden states'.

    A block of the vocabulary at a time, so that beside `total` there is no second array of its size. A weight that
    the devices of a mesh share is not cut further.
    """
    blocks = next(n for n in range(BLOCKS, 0, -1) if len(weight) % n == 0) if alone() else 1
    size = len(weight) // blocks

    def add(block, sums):
        total, d_hidden = sums
        cut = partial(jax.lax.dynamic_slice_in_dim, start_index=block * size, slice_size=size)
        _, back = jax.vjp(head.project, hidden, cut(weight))
        of_hidden, of_weight = back(cut(d_logits, axis=-1))
        grown = cut(total) + of_weight.astype(total.dtype)
        return jax.lax.dynamic_update_slice_in_dim(total, grown, block * size, 0), d_hidden + of_hidden

    total, d_hidden = jax.lax.fori_loop(0, blocks, add, (total, jnp.zeros(hidden.shape, jnp.float32)))
    return total, d_hidden.astype(hidden.dtype)


def _chunks(head: HeadLoss, hidden, weight, frozen, inputs, mask, gradient: str):
    """Scan the chunks: masked losses and metrics [B, T], d(sum of losses)/d(hidden), d(...)/d(weight).

    Each row's targets are put first, and chunks that are left without one are passed over. `gradient` is "none",
    "hidden" or "both".
    """

    def masked_sum(logits, context, m):
        values, metrics = jax.vmap(jax.vmap(head.loss))(logits, *context)
        # `where`, not a product: a masked token's loss may be NaN.
        keep = lambda x: jnp.where(m > 0, x * m, 0.0)  # noqa: E731
        values = keep(values)
        return values.sum(), (values, jax.tree.map(keep, metrics))

    def compute(total, chunk):
        *arrays, m = chunk
        # The gradient is a product whatever the mask (0 * NaN), so what a masked token holds must not come so far.
        h, inputs = jax.tree.map(lambda x: jnp.where(m.reshape(m.shape + (1,) * (x.ndim - 2)) > 0, x, 0), arrays)
        context = head.context(frozen, inputs)
        logits = head.project(h, weight)
        if gradient == "none":
            return total, (masked_sum(logits, context, m)[1], None)
        d_logits, out = jax.grad(masked_sum, has_aux=True)(logits, context, m)
        if gradient == "hidden":
            return total, (out, jax.vjp(partial(head.project, weight=weight), h)[1](d_logits)[0])
        total, d_hidden = _add_gradients(head, total, h, weight, d_logits)
        return total, (out, d_hidden)

    def skip(total, chunk):
        _, out = jax.eval_shape(compute, total, chunk)
        return total, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), out)

    def body(total, chunk):
        return jax.lax.cond((chunk[-1] > 0).any(), compute, skip, total, chunk)

    order = jnp.argsort(mask <= 0, axis=1, stable=True)
    chunks, time = _split(head, hidden, jax.tree.map(partial(_take, order), (hidden, inputs, mask)))
    start = jnp.zeros(weight.shape, jnp.float32) if gradient == "both" else None
    d_weight, out = jax.lax.scan(body, start, chunks)
    back = partial(_take, jnp.argsort(order, axis=1))
    (values, metrics), d_hidden = jax.tree.map(lambda leaf: back(_join(leaf, time)), out)
    return values, metrics, d_hidden, d_weight


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def head_sum(
    head: HeadLoss,
    hidden: Float[Array, "B T D"],
    weight: Float[Array, "V D"],
    frozen: Any,
    inputs: tuple,
    mask: Float[Array, "B T"],
) -> tuple[Loss, dict[str, Loss]]:
    """Masked sums over tokens of the loss and of what it logs; differentiable in `hidden` and `weight`.

    `inputs` are arrays [B, T, ...] that `head.context` turns, with `frozen`, into the loss's further arguments.
    """
    values, metrics, _, _ = _chunks(head, hidden, weight, frozen, inputs, mask, "none")
    return values.sum(), jax.tree.map(jnp.sum, metrics)


def _head_sum_forward(head, hidden, weight, frozen, inputs, mask):
    values, metrics, d_hidden, d_weight = _chunks(head, hidden, weight, frozen, inputs, mask, "both")
    return (values.sum(), jax.tree.map(jnp.sum, metrics)), (d_hidden, d_weight.astype(weight.dtype))


def _head_sum_backward(head, saved, cotangents):
    scale, _ = cotangents
    d_hidden, d_weight = saved
    return scale.astype(d_hidden.dtype) * d_hidden, scale.astype(d_weight.dtype) * d_weight, None, None, None


head_sum.defvjp(_head_sum_forward, _head_sum_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def head_tokens(
    head: HeadLoss,
    hidden: Float[Array, "B T D"],
    weight: Float[Array, "V D"],
    frozen: Any,
    inputs: tuple,
    mask: Float[Array, "B T"],
) -> tuple[Float[Array, "B T"], dict[str, Float[Array, "B T"]]]:
    """Masked losses token by token, differentiable in `hidden` alone: the head is frozen, as under adapters."""
    values, metrics, _, _ = _chunks(head, hidden, weight, frozen, inputs, mask, "none")
    return values, metrics


def _head_tokens_forward(head, hidden, weight, frozen, inputs, mask):
    values, metrics, d_hidden, _ = _chunks(head, hidden, weight, frozen, inputs, mask, "hidden")
    return (values, metrics), d_hidden


def _head_tokens_backward(head, d_hidden, cotangents):
    # A token's loss depends on its own hidden state alone, so the Jacobian is what the forward pass summed.
    scale, _ = cotangents
    return scale[..., None].astype(d_hidden.dtype) * d_hidden, None, None, None, None


head_tokens.defvjp(_head_tokens_forward, _head_tokens_backward)
