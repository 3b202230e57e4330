"""What every decoder's architecture has in common, read from a Hugging Face config.json."""

import abc
import dataclasses
import math
from typing import ClassVar, Self

import numpy as np
from flax import nnx

from export.errors import ArtifactError

# Far above any model that exists; a config from a stranger must not make us allocate without bound.
LARGEST = 1 << 24


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary embedding frequencies: `theta ** (-2i / head_dim)`, optionally rescaled for long contexts."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

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
    def from_hf(cls, hf: dict, theta: float) -> Self:
        """Read `rope_scaling` or `rope_parameters` as Hugging Face writes them."""
        kind = hf.get("rope_type") or hf.get("type") or "default"
        if kind not in ("default", "linear", "llama3"):
            raise ArtifactError(f"config.json: rope_type {kind!r} is not supported; default, linear and llama3 are")
        names = {field.name for field in dataclasses.fields(cls)} - {"theta", "kind"}
        given = {name: hf[name] for name in names if hf.get(name) is not None}
        for name, value in given.items():
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
                raise ArtifactError(f"config.json: rope {name} = {value!r}: must be a positive number")
        return cls(theta=float(hf.get("rope_theta") or theta), kind=kind, **given)


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

    ACTIVATIONS: ClassVar[tuple[str, ...]] = ("silu",)

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and (type(value) is not int or not 0 < value < LARGEST):
                raise ArtifactError(f"config.json: {field.name} = {value!r}: must be a positive integer")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ArtifactError(
                f"config.json: {self.num_attention_heads} attention heads are not a multiple of "
                f"{self.num_key_value_heads} key-value heads"
            )
        if self.head_dim % 2:
            raise ArtifactError(f"config.json: head_dim = {self.head_dim}: must be even")
        if self.hidden_act not in self.ACTIVATIONS:
            raise ArtifactError(f"config.json: activation {self.hidden_act!r}: this family has {self.ACTIVATIONS}")

    @classmethod
    def fields_from_hf(cls, hf: dict) -> dict:
        """The constructor's arguments from config.json; a family overrides it to add what only it has."""
        required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        missing = [name for name in required if hf.get(name) is None]
        if missing:
            raise ArtifactError(f"config.json: no {', '.join(missing)}")
        names = [field.name for field in dataclasses.fields(cls) if field.name != "rope"]
        given = {name: hf[name] for name in names if hf.get(name) is not None}
        heads = hf["num_attention_heads"]
        given.setdefault("num_key_value_heads", heads)
        if "head_dim" not in given:
            if type(heads) is not int or type(hf["hidden_size"]) is not int or heads < 1:
                raise ArtifactError("config.json: hidden_size and num_attention_heads must be positive integers")
            given["head_dim"] = hf["hidden_size"] // heads
        parameters = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        given["rope"] = Rope.from_hf(parameters, hf.get("rope_theta") or 10_000.0)
        return given

    @classmethod
    def from_hf(cls, hf: dict) -> Self:
        """Read the architecture from a config.json.

        Raises:
          ArtifactError: a field is missing, of a wrong type or out of range, or asks for what isn't built.
        """
        try:
            return cls(**cls.fields_from_hf(hf))
        except (TypeError, AttributeError) as error:
            raise ArtifactError(f"config.json: {error}") from error

    @abc.abstractmethod
    def block(self) -> nnx.Module:
        """A fresh block of this family, its weights still to be bound: called with (x, sight), it returns (x, cache)."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer in tokens, the current one included; None is full attention."""
        return (None,) * self.num_hidden_layers

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


def layer_windows(hf: dict, layers: int, sliding: list[bool]) -> tuple[int | None, ...]:
    """Windows from `layer_types` where config.json has it, else from the family's own pattern `sliding`."""
    window = hf.get("sliding_window")
    types = hf.get("layer_types")
    if types is not None:
        known = {"sliding_attention", "full_attention"}
        if len(types) != layers or set(types) - known:
            raise ArtifactError(f"config.json: layer_types must name {layers} layers, each one of {sorted(known)}")
        sliding = [kind == "sliding_attention" for kind in types]
    if window is None:
        return (None,) * layers
    if type(window) is not int or not 0 < window < LARGEST:
        raise ArtifactError(f"config.json: sliding_window = {window!r}: must be a positive integer")
    return tuple(window if slides else None for slides in sliding)
