"""A teacher cut to fewer layers, embedding channels, feed-forward channels and attention heads."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from compress.data.batch import Batch
from compress.distill.importance import Measured, important_layers, measure, most_important
from compress.models import read_config
from compress.models.config import DecoderConfig
from compress.models.decoder import EMBEDDING, FINAL_NORM, LAYER
from compress.models.folder import Model
from export.quantized import Weights

# What each axis of a weight counts; a bias has the first of them. Attention's own norms stay as they are.
AXES: dict[str, tuple[str | None, ...]] = {
    "embed_tokens": (None, "hidden"),
    "lm_head": (None, "hidden"),
    "q_proj": ("queries", "hidden"),
    "k_proj": ("keys", "hidden"),
    "v_proj": ("keys", "hidden"),
    "o_proj": ("hidden", "queries"),
    "gate_proj": ("ffn", "hidden"),
    "up_proj": ("ffn", "hidden"),
    "down_proj": ("hidden", "ffn"),
    "q_norm": (None,),
    "k_norm": (None,),
}
NORM = ("hidden",)

# What a cut calls a size -> config.json.
SIZES = {"hidden": "hidden_size", "ffn": "intermediate_size", "kv_heads": "num_key_value_heads"}


@dataclasses.dataclass(frozen=True)
class Cut:
    """What a student keeps of its teacher.

    Attributes:
      layers: which ones, or how many, chosen by importance.
      sizes: the fields of config.json that width decides; none where it is the teacher's.
    """

    layers: tuple[int, ...] | int
    sizes: dict[str, Any]

    @classmethod
    def of(cls, teacher: DecoderConfig, layers: tuple[int, ...] | int, given: Mapping[str, int]) -> "Cut":
        """A cut to the sizes in `given`, by their names in `SIZES`; a key-value head keeps its queries."""
        sizes = {field: given.get(name, getattr(teacher, field)) for name, field in SIZES.items()}
        grouped = teacher.num_attention_heads // teacher.num_key_value_heads
        sizes |= {"num_attention_heads": grouped * sizes["num_key_value_heads"], "head_dim": teacher.head_dim}
        return cls(layers, sizes if any(getattr(teacher, field) != size for field, size in sizes.items()) else {})

    def architecture(self, teacher: DecoderConfig) -> DecoderConfig:
        """The student's; where importance chooses the layers, it isn't known yet which of them have a window."""
        kept = range(self.layers) if isinstance(self.layers, int) else self.layers
        windows = tuple(teacher.layer_windows[layer] for layer in kept) if teacher.layer_windows else ()
        return dataclasses.replace(teacher, num_hidden_layers=len(kept), layer_windows=windows, **self.sizes)


def prune(teacher: Model, cut: Cut, calibration: Callable[[], Sequence[Batch]]) -> Model:
    """The teacher cut to size; what goes is what matters least, measured once, before anything is cut.

    Args:
      calibration: text to measure on; not asked for where nothing is to be measured.

    Raises:
      DataError: there is no text, and something is to be measured.
    """
    if not isinstance(cut.layers, int) and not cut.sizes:
        return cut_layers(teacher, cut.layers)
    found = measure(teacher.config, teacher.weights, calibration())
    layers = important_layers(found.importance["layers"], cut.layers) if isinstance(cut.layers, int) else cut.layers
    if cut.sizes:
        teacher = cut_width(teacher, cut.sizes, found)
    return cut_layers(teacher, layers)


def cut_width(teacher: Model, sizes: dict[str, Any], measured: Measured) -> Model:
    """The teacher with its most important channels and heads, by `sizes` of config.json; a key-value head goes with
    all of its queries.

    A norm over fewer channels divides by another root mean square. Its weight makes up for that by the mean of
    `measured.energy`, exactly so where the channels that go are zero. So do the embedding and the final norm for
    Gemma's embedding, which is scaled with the square root of the width.
    """
    old, hf = teacher.config, teacher.hf | sizes
    new = read_config(hf)
    hidden = most_important(measured.importance["hidden"].mean(axis=0), new.hidden_size)
    ffn = most_important(measured.importance["ffn"], new.intermediate_size)
    kv_heads = most_important(measured.importance["kv_heads"], new.num_key_value_heads)
    grouped = old.num_attention_heads // old.num_key_value_heads
    scale = old.embedding_scale / new.embedding_scale
    weights: Weights = {}
    for name, value in teacher.weights.items():
        match = LAYER.fullmatch(name)
        layer = int(match[1]) if match else 0
        kept = {
            "hidden": hidden,
            "ffn": ffn[layer],
            "keys": rows_of(kv_heads[layer], old.head_dim),
            "queries": rows_of(kv_heads[layer], grouped * old.head_dim),
        }
        cut = np.asarray(value)
        for axis, what in enumerate(AXES.get(name.split(".")[-2], NORM)[: value.ndim]):
            cut = cut if what is None else cut.take(kept[what], axis)
        if name == EMBEDDING:
            cut = cut * scale
        elif name in measured.energy and new.hidden_size < old.hidden_size:
            energy = measured.energy[name]
            factor = np.sqrt(energy[hidden].mean() / energy.mean()) if energy.any() else 1.0
            if name == FINAL_NORM and old.tie_word_embeddings:
                factor /= scale  # the head is the embedding
            cut = (old.norm_offset + cut) * factor - old.norm_offset
        weights[name] = cut.astype(np.float32)
    return dataclasses.replace(teacher, hf=hf, config=new, weights=weights)


def rows_of(blocks: Int[np.ndarray, " N"], size: int) -> np.ndarray:
    """Indices of all rows of these blocks of `size`."""
    return (blocks[:, None] * size + np.arange(size)).reshape(-1)


def cut_layers(teacher: Model, kept: Sequence[int]) -> Model:
    """The teacher with only the layers `kept`, renumbered; everything else is its own."""
    new = {old: index for index, old in enumerate(kept)}
    weights = {}
    for name, value in teacher.weights.items():
        match = LAYER.fullmatch(name)
        if match is None:
            weights[name] = value
        elif int(match[1]) in new:
            weights[f"model.layers.{new[int(match[1])]}.{match[2]}"] = value
    hf = teacher.hf | {"num_hidden_layers": len(kept)}
    if isinstance(hf.get("layer_types"), list):
        hf["layer_types"] = [hf["layer_types"][layer] for layer in kept]
    elif any(window is not None for window in teacher.config.windows):
        kinds = ["full_attention" if w is None else "sliding_attention" for w in teacher.config.windows]
        hf["layer_types"] = [kinds[layer] for layer in kept]
    return dataclasses.replace(teacher, hf=hf, config=read_config(hf), weights=weights)
