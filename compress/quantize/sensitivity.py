"""What each unit of a model costs in KL divergence if it alone is quantized, and in bytes.

Letters: B rows, T tokens, D model, V vocabulary.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from compress.data.batch import Batch
from compress.models.config import DecoderConfig
from compress.models.decoder import EMBEDDING, Stacked, embed, final_norm, layer_data, logits, split_layers
from compress.quantize.account import output_error
from compress.quantize.allocate import Option
from compress.quantize.calibrate import capture_all, output
from compress.quantize.layer import JOIN
from compress.quantize.rtn import rtn
from export.gguf_blocks import BLOCK
from export.quantized import QuantSpec


def bytes_of(shape: tuple[int, ...], spec: QuantSpec, *, blocks: bool) -> int:
    """Bytes of a quantized weight, scales and zero points included; in `blocks` as GGUF has them.

    There a scale stands for 32 inputs, and a minimum of 16 bits in the place of a zero point.
    """
    size = BLOCK if blocks else spec.group_size
    of_group = 16 + (0 if spec.symmetric else 16 if blocks else spec.bits)
    return math.ceil(math.prod(shape) * (spec.bits + of_group / size) / 8)


def sensitivities(
    config: DecoderConfig,
    weights: Mapping[str, Any],
    batches: Sequence[Batch],
    specs: Sequence[QuantSpec],
    *,
    outside: Sequence[str] = (),
    blocks: bool = False,
    progress: Callable[..., None] | None = None,
) -> dict[str, list[Option]]:
    """Each unit's options: those of `specs` whose groups divide its inputs, rounded to nearest with clipping.

    The float model runs once, and what enters each layer is kept. From its layer on, a unit is run in the option that
    changes its outputs most; KL is quadratic in small changes (its gradient is zero where they are), so that of the
    others is less as their squared output error is. Tensors outside the layers are run in every option.

    Args:
      batches: at least one; the KL is the mean of all their real tokens.
      outside: tensors outside the layers, embedding or head, that are units too.
      blocks: see `bytes_of`.

    Returns:
      Options by the unit's tensors, joined by `JOIN`: linears that share an input, or a tensor of `outside`.
    """
    rest, layers = split_layers(config, weights)
    rest = _floats(rest)
    data = [tuple(map(jnp.asarray, pair)) for pair in zip(*layer_data(config), strict=True)]

    def embedded(rest: dict) -> list[Array]:
        return [embed(config, Stacked(rest, []), jnp.asarray(batch.tokens), jnp.float32) for batch in batches]

    def fitting(own: dict) -> list[QuantSpec]:
        return [spec for spec in specs if all(w.shape[-1] % spec.group_size == 0 for w in own.values())]

    def kl(first: int, states: Sequence, layer: dict | None = None, changed: dict | None = None) -> float:
        """Of the model from layer `first` on, with that layer and the tensors outside the layers as given."""
        sums = []
        for x, wanted, batch in zip(states, entering[-1], batches, strict=True):
            for index in range(first, len(layers)):
                own = layer if index == first and layer is not None else layers[index]
                x = output(config, _floats(own), x, data[index], batch)
            sums.append(divergence(config, rest, wanted, changed or rest, x, batch))
        total, count = (sum(parts) for parts in zip(*sums, strict=True))
        return float(total / count)

    def tensors(index: int, names: list[str]) -> dict[str, Array]:
        return _floats({name: layers[index][name] for name in names})

    entering: list[Sequence] = [embedded(rest)]
    units: list[tuple[int, list[str], list[float]]] = []
    for index, layer in enumerate(layers):
        outputs, grams = capture_all(config, _floats(layer), entering[-1], data[index], batches)
        entering.append(outputs)
        for joined, gram in grams.items():
            names = [f"{name}.weight" for name in joined.split(JOIN)]
            own = tensors(index, names)
            errors = [sum(output_error(w, rounded(w, spec), gram).error for w in own.values()) for spec in fitting(own)]
            units.append((index, names, errors))

    found: dict[str, list[Option]] = {}
    for name in outside:
        options = found[name] = []
        for spec in fitting({name: rest[name]}):
            changed = rest | {name: rounded(rest[name], spec)}
            first, states = (0, embedded(changed)) if name == EMBEDDING else (len(layers), entering[-1])
            loss = kl(first, states, changed=changed)
            options.append(Option(spec, bytes_of(rest[name].shape, spec, blocks=blocks), loss))
    for done, (index, names, errors) in enumerate(units, 1):
        own = tensors(index, names)
        allowed, largest = fitting(own), max(errors)
        worst = allowed[errors.index(largest)]
        loss = kl(index, entering[index], layers[index] | {name: rounded(w, worst) for name, w in own.items()})
        found[JOIN.join(f"model.layers.{index}.{name}" for name in own)] = [
            Option(
                spec,
                sum(bytes_of(w.shape, spec, blocks=blocks) for w in own.values()),
                loss * error / largest if largest else 0.0,
            )
            for spec, error in zip(allowed, errors, strict=True)
        ]
        if progress is not None:
            progress("sensitivity", done, len(units))
    return found


def _floats(tensors: dict) -> dict[str, Array]:
    return {name: jnp.asarray(value, jnp.float32) for name, value in tensors.items()}


def rounded(w: Float[Array, "O I"], spec: QuantSpec) -> Float[Array, "O I"]:
    """What `rtn` makes of a weight."""
    return jnp.asarray(rtn(w, spec).dequantize())


@partial(jax.jit, static_argnames="config")
def divergence(
    config: DecoderConfig, rest: dict, x: Float[Array, "B T D"], changed: dict, y: Float[Array, "B T D"], batch: Batch
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The sum over real tokens of KL(p || q) in nats, and their number.

    p is what `rest`, the tensors outside the layers, makes of the last layer's output x; q what `changed` makes of y.
    """

    def log_probs(rest: dict, states: Float[Array, "T D"]) -> Float[Array, "T V"]:
        stem = Stacked(rest, [])
        return jax.nn.log_softmax(logits(config, stem, final_norm(config, stem, states[None])[0]))

    def row(given):
        x, y, real = given
        p, q = log_probs(rest, x), log_probs(changed, y)
        return jnp.sum(jnp.where(real, jnp.sum(jnp.exp(p) * (p - q), axis=-1), 0.0)), jnp.sum(real)

    sums, counts = jax.lax.map(row, (x, y, jnp.asarray(batch.segments) > 0))
    return jnp.sum(sums), jnp.sum(counts).astype(jnp.float32)
