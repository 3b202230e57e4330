"""AWQ: inputs that matter are made larger before rounding, and what comes before them smaller by as much.

Letters: O outputs, I inputs, C channels of the tensor that scales are folded into, K key-value heads, G query heads a
key-value head, E head dimension.

A linear's weight W diag(s), on inputs diag(s)^-1 x, computes what W computes on x. Rounded, the inputs of large s
have smaller errors. s = sqrt(mean x^2)^alpha, where alpha is the one of a grid whose rounded outputs are nearest to
the exact ones (Lin et al. 2023, https://arxiv.org/abs/2306.00978, eq. 4 and 5; there the mean is of |x|). The inverse
goes into the norm, or the rows of the linear, that makes x: nothing is left to compute at inference.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from compress.models.config import DecoderConfig
from compress.quantize.gptq import require_finite
from compress.quantize.grid import CLIP_STEPS, choose_grid
from compress.quantize.layer import JOIN, Layer
from compress.quantize.rtn import require_quantizable, round_on_grids
from export.quantized import QuantizedTensor, QuantSpec

STEPS = 20
"""Exponents that are tried, from 0 (no scaling) to 1."""

SEARCH_CLIP_STEPS = 4
"""Ways to cut a range while exponents are compared."""

LEAST = 0.01
"""The least importance of an input in the clip search, relative to the mean: one that was never seen may yet come."""

FEEDS = {
    "self_attn.q_proj": ("input_layernorm",),
    "self_attn.o_proj": ("self_attn.v_proj",),
    "mlp.gate_proj": ("pre_feedforward_layernorm", "post_attention_layernorm"),
    "mlp.down_proj": ("mlp.up_proj",),
}
"""What makes a linear's inputs, channel by channel; of several, the first that the layer has."""


def fold(task: Layer) -> Layer:
    """The layer with its inputs scaled and the inverse folded into what makes them: an equal one, easier to round.

    Where a norm takes the inverse, the scales are such that its weight is exact in bfloat16, in which it is stored.
    """
    weights = {name: jnp.asarray(value) for name, value in task.weights.items()}
    grams = dict(task.grams)
    by_name = {name: joined for joined in grams for name in joined.split(JOIN)}
    for linear, sources in FEEDS.items():
        source = next(name for name in sources if f"{name}.weight" in weights)
        joined = by_name[linear]
        names = [f"{name}.weight" for name in joined.split(JOIN)]
        rounded = [name for name in names if name in task.specs]
        if not rounded:
            continue
        make = partial(scales, task.config, weights[f"{source}.weight"])
        candidates = [make(grams[joined], alpha) for alpha in np.linspace(0, 1, STEPS + 1)]
        by_input, by_channel = (jnp.stack(part) for part in zip(*candidates, strict=True))
        errors = [output_errors(weights[name], grams[joined], by_input, task.specs[name]) for name in rounded]
        best = int(jnp.argmin(sum(errors)))
        weights |= {name: weights[name] * by_input[best] for name in names}
        weights |= divided(task.config, weights, source, by_channel[best])
        grams[joined] = grams[joined] / by_input[best] / by_input[best][:, None]
    return dataclasses.replace(task, weights=weights, grams=grams)


def scales(
    config: DecoderConfig, source: Float[Array, "C ..."], gram: Float[Array, "I I"], alpha: float
) -> tuple[Float[Array, " I"], Float[Array, " C"]]:
    """The factors of a linear's inputs, and of the channels of what makes them (a norm's weight, a linear's rows).

    They are centred on 1; an input that is always zero keeps its own. Values that several query heads read have one
    scale for all of them.
    """
    channels, inputs = len(source), len(gram)
    energy = jnp.diag(gram)
    if channels != inputs:
        energy = energy.reshape(config.num_key_value_heads, -1, config.head_dim).mean(1).reshape(-1)
    live = energy > 0
    size = jnp.where(live, jnp.sqrt(jnp.where(live, energy, 1.0)), 1.0) ** alpha
    most, least = jnp.max(size, where=live, initial=0.0), jnp.min(size, where=live, initial=jnp.inf)
    s = jnp.where(live & (most > 0), size / jnp.sqrt(most * least), 1.0)
    if source.ndim == 1:
        gain = config.norm_offset + source
        kept = config.norm_offset + stored(gain / s - config.norm_offset)
        s = jnp.where((kept != 0) & (gain != 0), gain / jnp.where(kept != 0, kept, 1.0), 1.0)
    if channels == inputs:
        return s, s
    spread = jnp.repeat(s.reshape(config.num_key_value_heads, 1, -1), inputs // channels, axis=1)
    return spread.reshape(-1), s


def stored(x: Float[Array, "*N"]) -> Float[Array, "*N"]:
    """The nearest bfloat16 numbers, in float32."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def divided(config: DecoderConfig, weights: dict, source: str, s: Float[Array, " C"]) -> dict[str, Array]:
    """The tensors of `source` once its outputs are divided by s."""
    weight = weights[f"{source}.weight"]
    if weight.ndim == 1:
        offset = config.norm_offset
        return {f"{source}.weight": jnp.where(s == 1, weight, stored((offset + weight) / s - offset))}
    bias = {f"{source}.bias": weights[f"{source}.bias"] / s} if f"{source}.bias" in weights else {}
    return {f"{source}.weight": weight / s[:, None], **bias}


@partial(jax.jit, static_argnames="spec")
def output_errors(
    w: Float[Array, "O I"], gram: Float[Array, "I I"], candidates: Float[Array, "N I"], spec: QuantSpec
) -> Float[Array, " N"]:
    """The mean squared error of a linear's outputs, summed over them, if it is rounded with each of N scales."""

    def error(s):
        scaled = round_weighted(w * s, jnp.diag(gram) / jnp.square(s), spec, SEARCH_CLIP_STEPS)
        e = scaled.dequantize() / s - w
        return jnp.sum((e @ gram) * e)

    return jax.lax.map(error, candidates)


def awq(
    w: Float[Array | np.ndarray, "O I"], hessian: Float[Array | np.ndarray, "I I"], spec: QuantSpec
) -> QuantizedTensor:
    """Round a weight to nearest, with grids that weigh each input's error by its mean square.

    Args:
      w: weights, after `fold`.
      hessian: mean (or sum) of x x^T over the calibration tokens.
      spec: bits, group size, symmetry and scale type.

    Raises:
      ArtifactError: the group size does not divide I, or a weight or the Hessian is not finite.
    """
    require_quantizable(w, spec)
    require_finite(hessian)
    return round_weighted(jnp.asarray(w), jnp.diag(jnp.asarray(hessian)), spec)


@partial(jax.jit, static_argnames=("spec", "clip_steps"))
def round_weighted(
    w: Float[Array, "O I"], energy: Float[Array, " I"], spec: QuantSpec, clip_steps: int = CLIP_STEPS
) -> QuantizedTensor:
    """`awq` without its checks, for use inside jit."""
    energy = energy.astype(jnp.float32)
    mean = jnp.mean(energy)
    importance = jnp.where(mean > 0, jnp.maximum(energy, LEAST * mean), 1.0)
    return round_on_grids(w, spec, partial(choose_grid, spec=spec, importance=importance, clip_steps=clip_steps))
