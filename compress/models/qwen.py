"""Qwen 2, 2.5 and 3: Llama's block with biased queries, keys and values (2) or normalized heads (3).

Sources: arXiv:2407.10671 (Qwen2, section 2.2.1), arXiv:2505.09388 (Qwen3, section 2).
"""

import dataclasses
from typing import ClassVar

from flax import nnx

from compress.models.attention import Attention
from compress.models.config import integer, layer_windows
from compress.models.llama import LlamaBlock, LlamaConfig


@dataclasses.dataclass(frozen=True)
class Qwen2Config(LlamaConfig):
    """Layers from `max_window_layers` on slide, where `use_sliding_window` says so."""

    use_sliding_window: bool = False

    ABSENT: ClassVar[dict[str, int]] = {"num_key_value_heads": 32, "sliding_window": 4096}

    @classmethod
    def fields_from_hf(cls, hf: dict) -> dict:
        given = super().fields_from_hf(hf)
        first = integer(hf, "max_window_layers", 28, least=0)
        windowed = hf if given.get("use_sliding_window") else hf | {"sliding_window": None}
        sliding = [layer >= first for layer in range(given["num_hidden_layers"])]
        return given | {"layer_windows": layer_windows(windowed, sliding)}

    def block(self) -> nnx.Module:
        return Qwen2Block(self)


@dataclasses.dataclass(frozen=True)
class Qwen3Config(Qwen2Config):
    ABSENT: ClassVar[dict[str, int]] = {**Qwen2Config.ABSENT, "head_dim": 128}

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
