"""Llama 2 and 3.x, SmolLM2 and Mistral (arXiv:2302.13971, arXiv:2310.06825)."""

import dataclasses
from typing import ClassVar

import jax
from flax import nnx

from compress.models.attention import Attention, Sight
from compress.models.config import DecoderConfig, layer_windows
from compress.models.linear import Linear, RMSNorm


@dataclasses.dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    attention_bias: bool = False
    mlp_bias: bool = False

    def block(self) -> nnx.Module:
        return LlamaBlock(self)


@dataclasses.dataclass(frozen=True)
class MistralConfig(LlamaConfig):
    """Llama whose layers all slide, unless `sliding_window` is null."""

    ABSENT: ClassVar[dict[str, int]] = {"num_key_value_heads": 8, "sliding_window": 4096}

    @classmethod
    def fields_from_hf(cls, hf: dict) -> dict:
        given = super().fields_from_hf(hf)
        return given | {"layer_windows": layer_windows(hf, [True] * given["num_hidden_layers"])}


class GatedMLP(nnx.Module):
    """`down(act(gate(x)) * up(x))` (arXiv:2002.05202, eq. 5)."""

    def __init__(self, config: DecoderConfig, activation, *, bias: bool = False):
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=bias)
        self.activation = activation

    def __call__(self, x):
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class LlamaBlock(nnx.Module):
    """Pre-norm attention and gated MLP, each added to the residual stream."""

    def __init__(self, config: LlamaConfig):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = self.attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config, jax.nn.silu, bias=config.mlp_bias)

    @staticmethod
    def attention(config: LlamaConfig) -> Attention:
        return Attention(config, bias=config.attention_bias, output_bias=config.attention_bias)

    def __call__(self, x, sight: Sight):
        seen, cache = self.self_attn(self.input_layernorm(x), sight)
        x = x + seen
        return x + self.mlp(self.post_attention_layernorm(x)), cache
