"""Low-rank adapters on the blocks' linears (LoRA, arXiv:2106.09685; on a 4-bit base, QLoRA, arXiv:2305.14314).

An adapter is two tensors named after its linear: `lora_A` [R, I] and `lora_B` [O, R]. They add
`alpha / R * B A x` to the linear's output. With DoRA (arXiv:2402.09353) there is a third, `lora_magnitude_vector` [O],
the lengths of the rows of what then is the weight. In training they are stacked over layers like the weights.

Letters: L layers, B batch, R rank, I inputs, O outputs.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from compress.models.config import DecoderConfig
from compress.models.decoder import Stacked, combine, linears
from compress.models.linear import Dropout, Landing, dense, row_norms
from export.errors import ArtifactError
from export.quantized import PackedTensor, QuantizedTensor, QuantSpec, Weights


def is_adapter(name: str) -> bool:
    """Whether a tensor's name is an adapter's."""
    return name.endswith((".lora_A", ".lora_B", ".lora_magnitude_vector"))


def init_adapters(config: DecoderConfig, key: Key[Array, ""], rank: int, *, targets: str = r".*") -> Weights:
    """Fresh adapters for every linear of the blocks whose name matches `targets`: A uniform as in PEFT, B zero.

    A's bound is sqrt(6 / ((1 + 5) I)) = 1 / sqrt(I), so that its rows have about the scale of the input's mean.

    Raises:
      ArtifactError: `targets` matches no linear.
    """
    adapters: Weights = {}
    for index, (name, (outputs, inputs)) in enumerate(linears(config).items()):
        linear = name.removesuffix(".weight")
        if not re.search(targets, linear):
            continue
        bound = inputs**-0.5
        draw = jax.random.uniform(jax.random.fold_in(key, index), (rank, inputs), jnp.float32, -bound, bound)
        adapters[f"{linear}.lora_A"] = draw
        adapters[f"{linear}.lora_B"] = jnp.zeros((outputs, rank), jnp.float32)
    if not adapters:
        raise ArtifactError(f"adapter targets {targets!r} match no linear layer")
    return adapters


def magnitudes(weights: Weights, adapters: Weights) -> Weights:
    """DoRA's magnitudes of every adapted linear as training begins: the lengths of its rows, in float32."""
    linears = [name.removesuffix(".lora_A") for name in adapters if name.endswith(".lora_A")]
    lengths = jax.jit(lambda weight: row_norms(dense(weight, jnp.float32)))
    return {f"{linear}.lora_magnitude_vector": lengths(weights[f"{linear}.weight"]) for linear in linears}


def with_adapters(
    base: Stacked,
    adapters: Stacked,
    scale: float | Float[Array, ""],
    *,
    rate: float = 0.0,
    keys: Key[Array, " B"] | None = None,
) -> Stacked:
    """The base with adapters beside its linears, `scale` = alpha / rank put into B.

    With `rate` and one key a row of the batch, adapters' inputs are dropped out. Layers and linears derive their
    keys from the row's, so a row's dropout depends on nothing but its key.
    """
    first = 0
    layers = []
    for segment in adapters.layers:
        placed = {name: leaf * scale if name.endswith("lora_B") else leaf for name, leaf in segment.items()}
        if rate and keys is not None and segment:
            depth = next(iter(segment.values())).shape[0]
            names = sorted(name for name in segment if name.endswith("lora_A"))
            for index, name in enumerate(names):
                ids = (jnp.arange(depth) + first) * len(names) + index
                per_layer = jax.vmap(lambda i: jax.vmap(lambda key: jax.random.fold_in(key, i))(keys))(ids)
                placed[name.removesuffix("lora_A") + "lora_dropout"] = Dropout(per_layer, rate)
            first += depth
        layers.append(placed)
    return combine(base, Stacked({}, layers))


def with_landing(base: Stacked, quantize: Callable[[Float[Array, "O I"], QuantSpec], Float[Array, "O I"]]) -> Stacked:
    """The base whose quantized linears, once they have adapters, run with `quantize(W + scale * B A, spec of W)`."""
    names = [[name for name, leaf in part.items() if isinstance(leaf, QuantizedTensor)] for part in base.layers]
    marks = [{f"{name.removesuffix('weight')}lora_landing": Landing(quantize) for name in part} for part in names]
    return combine(base, Stacked({}, marks))


def merge_adapters(weights: Weights, adapters: Mapping[str, Any], scale: float) -> Weights:
    """`W + scale * B A` in float32 for every adapted linear, of a quantized one from its dequantized weight.

    Where there is a magnitude m, each row is made as long as m says (DoRA, arXiv:2402.09353, eq. 5).

    Raises:
      ArtifactError: as `check_adapters`.
    """
    check_adapters(weights, adapters)
    linears = {f"{name.rpartition('.')[0]}.weight" for name in adapters}
    return dict(weights) | {name: merge(name, weights[name], adapters, scale) for name in sorted(linears)}


def merge(name: str, weight: Array | np.ndarray | PackedTensor, adapters: Mapping[str, Any], scale: float):
    """One linear's weight in float32 with what `adapters` have for it, by `merge_adapters`; as it is if nothing."""
    linear = name.removesuffix(".weight")
    a, b, m = (adapters.get(f"{linear}.{part}") for part in ("lora_A", "lora_B", "lora_magnitude_vector"))
    if a is None:
        return weight
    delta = jnp.asarray(b, jnp.float32) @ jnp.asarray(a, jnp.float32)
    whole = dense(jax.tree.map(jnp.asarray, weight), jnp.float32) + scale * delta
    return np.asarray(whole if m is None else whole * (jnp.asarray(m) / row_norms(whole))[:, None])


def check_adapters(weights: Mapping[str, Any], adapters: Mapping[str, Any]) -> None:
    """Every adapter has its linear, its partner and the shape that they ask for.

    Raises:
      ArtifactError: naming all that do not.
    """
    problems = []
    for linear in sorted({name.rpartition(".")[0] for name in adapters}):
        name = f"{linear}.weight"
        a, b, m = (adapters.get(f"{linear}.{part}") for part in ("lora_A", "lora_B", "lora_magnitude_vector"))
        if name not in weights or a is None or b is None:
            problems.append(f"{linear} lacks its {'weight' if name not in weights else 'lora_A or lora_B'}")
        elif (b.shape[0], a.shape[1]) != tuple(weights[name].shape) or b.shape[1] != a.shape[0]:
            problems.append(f"{linear}: B {b.shape} and A {a.shape} on a weight of {tuple(weights[name].shape)}")
        elif m is not None and m.shape != b.shape[:1]:
            problems.append(f"{linear}: a magnitude {m.shape} on {b.shape[0]} outputs")
    if problems:
        raise ArtifactError(f"adapters that do not fit the model: {'; '.join(problems)}")
