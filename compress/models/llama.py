"""Llama 2 and 3.x, SmolLM2 and Mistral (arXiv:2302.13971, arXiv:2310.06825)."""

import dataclasses

import jax
from flax import nnx

from compress.models.attention import Attention, Sight
from compress.models.config import DecoderConfig, layer_windows
from compress.models.linear import Linear, RMSNorm


@dataclasses.dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    attention_bias: bool = False
    mlp_bias: bool = False
    layer_windows: tuple[int | None, ...] = ()

    @classmethod
    def fields_from_hf(cls, hf: dict) -> dict:
        given = super().fields_from_hf(hf)
        layers = given["num_hidden_layers"]
        # Mistral slides in every layer; Llama never does, whatever its config.json carries along.
        windowed = hf if hf.get("model_type") == "mistral" else hf | {"sliding_window": None, "layer_types": None}
        given["layer_windows"] = layer_windows(windowed, layers, [True] * layers)
        return given

    def block(self) -> nnx.Module:
        return LlamaBlock(self)

    @property
    def windows(self) -> tuple[int | None, ...]:
        return self.layer_windows


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
