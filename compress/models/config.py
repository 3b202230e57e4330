"""What every decoder's architecture has in common, read from a Hugging Face config.json."""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar

import numpy as np
from flax import nnx

from export.errors import ArtifactError

# Far above any model that exists; a config from a stranger must not make us allocate without bound.
LARGEST = 1 << 24
DEEPEST = 1 << 12

ROPE_KINDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def integer(hf: dict, name: str, default: int | None = None, *, least: int = 1) -> int:
    """A bounded integer of config.json; `default` stands in for an absent or null one."""
    value = default if hf.get(name) is None else hf[name]
    most = DEEPEST if name == "num_hidden_layers" else LARGEST
    if type(value) is not int or not least <= value < most:
        raise ArtifactError(f"config.json: {name} = {value!r:.40}: must be an integer in {least} .. {most - 1}")
    return value


def positive(hf: dict, name: str, default: float | None = None) -> float:
    """A positive, finite number of config.json; `default` stands in for an absent or null one."""
    value = default if hf.get(name) is None else hf[name]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
        raise ArtifactError(f"config.json: {name} = {value!r:.40}: must be a positive number")
    return float(value)


def table(hf: dict, name: str) -> dict:
    """A table of config.json, empty when absent or null."""
    value = hf.get(name) or {}
    if not isinstance(value, dict):
        raise ArtifactError(f"config.json: {name} = {value!r:.40}: must be a table")
    return value


def boolean(hf: dict, name: str) -> bool:
    """A truth value of config.json."""
    if not isinstance(hf[name], bool):
        raise ArtifactError(f"config.json: {name} = {hf[name]!r:.40}: must be true or false")
    return hf[name]


def text(hf: dict, name: str) -> str:
    """A string of config.json."""
    if not isinstance(hf[name], str):
        raise ArtifactError(f"config.json: {name} = {hf[name]!r:.40}: must be a string")
    return hf[name]


READERS: dict[object, Callable] = {int: integer, float: positive, float | None: positive, bool: boolean, str: text}
"""How a config's field is read from config.json, by its type; what isn't here a family reads by itself."""


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary embedding frequencies: `theta ** (-2i / head_dim)`, optionally rescaled for long contexts."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: float = 8192.0

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Angles per position, float32 [head_dim / 2].

        `linear` divides every frequency by `factor`. `llama3` divides those whose wavelength exceeds
        `original / low_freq_factor`, keeps those below `original / high_freq_factor`, and interpolates between
        (Llama 3.1, "The Llama 3 Herd of Models", arXiv:2407.21783, and Hugging Face's `_compute_llama3_parameters`).
        """
        frequency = self.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        if self.kind == "linear":
            frequency = frequency / self.factor
        elif self.kind == "llama3":
            original = self.original_max_position_embeddings
            turns = original * frequency / (2 * math.pi)
            smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            smooth = np.clip(smooth, 0.0, 1.0)
            frequency = (1 - smooth) * frequency / self.factor + smooth * frequency
        return frequency.astype(np.float32)

    @classmethod
    def from_hf(cls, hf: dict, theta: float, longest: float | None = None) -> "Rope":
        """Read `rope_scaling` or `rope_parameters` as Hugging Face writes them.

        `theta` and `longest`, the model's max_position_embeddings, stand in where they are silent.
        """
        kind = hf.get("rope_type") or hf.get("type") or "default"
        if not isinstance(kind, str) or kind not in ROPE_KINDS:
            raise ArtifactError(f"config.json: rope_type {kind!r:.40} is not supported; {', '.join(ROPE_KINDS)} are")
        if positive(hf, "partial_rotary_factor", 1.0) != 1.0:
            raise ArtifactError("config.json: partial_rotary_factor is not supported: heads must be rotated whole")
        defaults = {"original_max_position_embeddings": longest}
        given = {name: positive(hf, name, defaults.get(name)) for name in ROPE_KINDS[kind]}
        if kind == "llama3" and given["low_freq_factor"] >= given["high_freq_factor"]:
            raise ArtifactError("config.json: rope low_freq_factor must be less than high_freq_factor")
        return cls(theta=positive(hf, "rope_theta", theta), kind=kind, **given)


@dataclasses.dataclass(frozen=True)
class DecoderConfig(abc.ABC):
    """The architecture of a decoder; a family adds its own fields, defaults and block. Hashable: static under jit."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    rope: Rope = Rope()
    layer_windows: tuple[int | None, ...] = ()

    ACTIVATIONS: ClassVar[tuple[str, ...]] = ("silu",)
    ABSENT: ClassVar[dict[str, int]] = {}
    """What the family means by a field that config.json doesn't have at all (one that is null stays null)."""

    def __post_init__(self):
        if self.num_attention_heads % self.num_key_value_heads:
            raise ArtifactError(
                f"config.json: {self.num_attention_heads} attention heads are not a multiple of "
                f"{self.num_key_value_heads} key-value heads"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ArtifactError(f"config.json: head_dim = {self.head_dim}: must be even and positive")
        if self.hidden_act not in self.ACTIVATIONS:
            raise ArtifactError(f"config.json: activation {self.hidden_act!r:.40}: this family has {self.ACTIVATIONS}")
        if self.layer_windows and len(self.layer_windows) != self.num_hidden_layers:
            raise ArtifactError(f"config.json: {len(self.layer_windows)} windows for {self.num_hidden_layers} layers")

    @classmethod
    def fields_from_hf(cls, hf: dict) -> dict:
        """The constructor's arguments from config.json; a family overrides it to add what only it has."""
        required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        missing = [name for name in required if hf.get(name) is None]
        if missing:
            raise ArtifactError(f"config.json: no {', '.join(missing)}")
        given: dict = {}
        for field in dataclasses.fields(cls):
            if hf.get(field.name) is not None and field.type in READERS:
                given[field.name] = READERS[field.type](hf, field.name)
        heads = given["num_attention_heads"]
        given.setdefault("num_key_value_heads", heads)
        given.setdefault("head_dim", given["hidden_size"] // heads)
        # transformers 5 writes rope_parameters; before it there were rope_theta, rope_scaling and top-level fields.
        outside = {"partial_rotary_factor": hf.get("partial_rotary_factor")}
        parameters = outside | table(hf, "rope_parameters") | table(hf, "rope_scaling")
        longest = float(integer(hf, "max_position_embeddings", cls.max_position_embeddings))
        given["rope"] = Rope.from_hf(parameters, positive(hf, "rope_theta", cls.rope.theta), longest)
        return given

    @classmethod
    def from_hf(cls, hf: dict) -> "DecoderConfig":
        """Read the architecture from a config.json.

        Raises:
          ArtifactError: a field is missing, of a wrong type or out of range, or asks for what isn't built.
        """
        return cls(**cls.fields_from_hf(cls.ABSENT | hf))

    @abc.abstractmethod
    def block(self) -> nnx.Module:
        """A fresh block, its weights still to be bound: called with (x, sight), it returns (x, cache)."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer in tokens, the current one included; None is full attention."""
        return self.layer_windows or (None,) * self.num_hidden_layers

    @property
    def frequencies(self) -> np.ndarray:
        """RoPE frequencies of each layer, float32 [L, head_dim / 2]."""
        return np.stack([self.rope.frequencies(self.head_dim)] * self.num_hidden_layers)

    @property
    def embedding_scale(self) -> float:
        """What the embedding is multiplied with."""
        return 1.0

    @property
    def norm_offset(self) -> float:
        """What is added to every norm's weight (Gemma stores w - 1)."""
        return 0.0

    @property
    def logit_softcap(self) -> float | None:
        """Logits are `c * tanh(logits / c)` where c is given."""
        return None


def layer_windows(hf: dict, sliding: list[bool]) -> tuple[int | None, ...]:
    """Windows from `layer_types` where config.json has it, else from the family's own pattern `sliding`."""
    layers = len(sliding)
    types = hf.get("layer_types")
    if types is not None:
        known = ("sliding_attention", "full_attention")
        if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
            raise ArtifactError(f"config.json: layer_types must name {layers} layers, each one of {known}")
        sliding = [kind == "sliding_attention" for kind in types]
    if hf.get("sliding_window") is None:
        return (None,) * layers
    window = integer(hf, "sliding_window")
    return tuple(window if slides else None for slides in sliding)
