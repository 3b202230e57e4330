"""Qwen 2, 2.5 and 3: Llama's block with biased queries, keys and values (2) or normalized heads (3).

Sources: arXiv:2407.10671 (Qwen2, section 2.2.1), arXiv:2505.09388 (Qwen3, section 2).
"""

import dataclasses

from flax import nnx

from compress.models.attention import Attention
from compress.models.config import layer_windows
from compress.models.llama import LlamaBlock, LlamaConfig


@dataclasses.dataclass(frozen=True)
class Qwen2Config(LlamaConfig):
    @classmethod
    def fields_from_hf(cls, hf: dict) -> dict:
        given = super().fields_from_hf(hf)
        layers = given["num_hidden_layers"]
        first = hf.get("max_window_layers", 28)
        windowed = hf if hf.get("use_sliding_window") else hf | {"sliding_window": None}
        given["layer_windows"] = layer_windows(windowed, layers, [layer >= first for layer in range(layers)])
        return given

    def block(self) -> nnx.Module:
        return Qwen2Block(self)


@dataclasses.dataclass(frozen=True)
class Qwen3Config(Qwen2Config):
    def block(self) -> nnx.Module:
        return Qwen3Block(self)


class Qwen2Block(LlamaBlock):
    @staticmethod
    def attention(config: LlamaConfig) -> Attention:
        return Attention(config, bias=True)


class Qwen3Block(LlamaBlock):
    @staticmethod
    def attention(config: LlamaConfig) -> Attention:
        return Attention(config, bias=config.attention_bias, output_bias=config.attention_bias, qk_norm=True)
