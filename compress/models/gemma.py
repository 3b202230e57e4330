"""Gemma 2 and Gemma 3 (text): scaled embedding, 1 + w norms on both sides of each part, alternating windows.

Sources: arXiv:2408.00118 (Gemma 2, section 2), arXiv:2503.19786 (Gemma 3, section 2).
"""

import dataclasses
from functools import partial
from typing import ClassVar

import jax
import numpy as np
from flax import nnx

from compress.models.attention import Attention, Sight
from compress.models.config import DecoderConfig, Rope, integer, layer_windows, positive, table
from compress.models.linear import RMSNorm
from compress.models.llama import GatedMLP
from export.errors import ArtifactError

GLOBAL_ROPE = Rope(theta=1_000_000.0)
LOCAL_ROPE = Rope(theta=10_000.0)


@dataclasses.dataclass(frozen=True)
class Gemma2Config(DecoderConfig):
    """Every other layer slides; attention scores and logits are soft-capped."""

    hidden_act: str = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    max_position_embeddings: int = 8192
    query_pre_attn_scalar: float = 256.0
    attention_bias: bool = False
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0

    ACTIVATIONS: ClassVar[tuple[str, ...]] = ("gelu_pytorch_tanh",)
    ABSENT: ClassVar[dict[str, int]] = {"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096}

    def block(self) -> nnx.Module:
        return Gemma2Block(self)

    @classmethod
    def slides(cls, hf: dict, layer: int) -> bool:
        return layer % 2 == 0

    @classmethod
    def fields_from_hf(cls, hf: dict) -> dict:
        if hf.get("use_bidirectional_attention"):
            raise ArtifactError("config.json: use_bidirectional_attention is not supported: decoders look back only")
        # Gemma's config.json names the activation twice; hidden_activation is the one that counts.
        given = super().fields_from_hf(hf | {"hidden_act": hf.get("hidden_activation") or "gelu_pytorch_tanh"})
        for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
            if cap in hf and hf[cap] is None:
                given[cap] = None
        sliding = [cls.slides(hf, layer) for layer in range(given["num_hidden_layers"])]
        return given | {"layer_windows": layer_windows(hf, sliding)}

    @property
    def embedding_scale(self) -> float:
        return self.hidden_size**0.5

    @property
    def norm_offset(self) -> float:
        return 1.0

    @property
    def logit_softcap(self) -> float | None:
        return self.final_logit_softcapping


@dataclasses.dataclass(frozen=True)
class Gemma3Config(Gemma2Config):
    """Five sliding layers to a full one, each kind with RoPE frequencies of its own; no soft caps."""

    max_position_embeddings: int = 131_072
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    rope: Rope = GLOBAL_ROPE
    local_rope: Rope = LOCAL_ROPE

    def block(self) -> nnx.Module:
        return Gemma3Block(self)

    @classmethod
    def slides(cls, hf: dict, layer: int) -> bool:
        hidden = integer(hf, "_sliding_window_pattern", 6)
        return (layer + 1) % integer(hf, "sliding_window_pattern", hidden) != 0

    @classmethod
    def fields_from_hf(cls, hf: dict) -> dict:
        by_kind = table(hf, "rope_parameters")
        nested = "full_attention" in by_kind or "sliding_attention" in by_kind
        full = table(by_kind, "full_attention") if nested else by_kind
        local = table(by_kind, "sliding_attention") if nested else {}
        given = super().fields_from_hf(hf | {"rope_parameters": full})
        return given | {"local_rope": Rope.from_hf(local, positive(hf, "rope_local_base_freq", LOCAL_ROPE.theta))}

    @property
    def frequencies(self) -> np.ndarray:
        full, local = (rope.frequencies(self.head_dim) for rope in (self.rope, self.local_rope))
        return np.stack([full if window is None else local for window in self.windows])


class Gemma2Block(nnx.Module):
    """Norms before and after attention and MLP."""

    QK_NORM: ClassVar[bool] = False

    def __init__(self, config: Gemma2Config):
        norm = partial(RMSNorm, config.hidden_size, config.rms_norm_eps, config.norm_offset)
        self.input_layernorm = norm()
        self.self_attn = Attention(
            config,
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            qk_norm=self.QK_NORM,
            scale=config.query_pre_attn_scalar**-0.5,
            softcap=config.attn_logit_softcapping,
        )
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.mlp = GatedMLP(config, partial(jax.nn.gelu, approximate=True))
        self.post_feedforward_layernorm = norm()

    def __call__(self, x, sight: Sight):
        seen, cache = self.self_attn(self.input_layernorm(x), sight)
        x = x + self.post_attention_layernorm(seen)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x))), cache


class Gemma3Block(Gemma2Block):
    QK_NORM: ClassVar[bool] = True
