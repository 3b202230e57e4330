"""GGUF's names for architectures and tensors, and Hugging Face's."""

import dataclasses
from typing import Any

import numpy as np

from export.errors import ArtifactError


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A model family as llama.cpp knows it.

    Attributes:
      name: `general.architecture`.
      model_type: of config.json.
      class_name: in config.json's `architectures`.
      parts: of a layer, GGUF's name to Hugging Face's.
      biases: the parts (GGUF names) that may have one, or must where `bias_always`.
      permuted: whether rows of q and k are stored for RoPE on neighbours rather than on halves.
      norm_offset: what is added to a norm's weight on disk.
    """

    name: str
    model_type: str
    class_name: str
    parts: dict[str, str]
    biases: tuple[str, ...] = ()
    bias_always: bool = False
    permuted: bool = False
    norm_offset: float = 0.0

    @property
    def gemma(self) -> bool:
        return self.name.startswith("gemma")

    @property
    def period(self) -> int:
        """Every `period`-th layer of a Gemma sees everything, the others a window."""
        return 2 if self.name == "gemma2" else 6


_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
_MLP = ("ffn_gate", "ffn_up", "ffn_down")
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

ARCHITECTURES = {
    arch.name: arch
    for arch in (
        Architecture("llama", "llama", "LlamaForCausalLM", _PARTS, biases=_ATTENTION + _MLP, permuted=True),
        Architecture("qwen2", "qwen2", "Qwen2ForCausalLM", _PARTS, biases=_ATTENTION[:3], bias_always=True),
        Architecture("qwen3", "qwen3", "Qwen3ForCausalLM", _PARTS | _QK_NORM),
        Architecture("gemma2", "gemma2", "Gemma2ForCausalLM", _PARTS | _GEMMA, norm_offset=1.0),
        Architecture("gemma3", "gemma3_text", "Gemma3ForCausalLM", _PARTS | _GEMMA | _QK_NORM, norm_offset=1.0),
    )
}
MODEL_TYPES = {arch.model_type: arch for arch in ARCHITECTURES.values()} | {"mistral": ARCHITECTURES["llama"]}


def names(arch: Architecture, layers: int) -> dict[str, str]:
    """Every tensor that a model of so many layers may have: GGUF's name to Hugging Face's."""
    table = dict(_OUTER)
    for layer in range(layers):
        for part, name in arch.parts.items():
            table[f"blk.{layer}.{part}.weight"] = f"model.layers.{layer}.{name}.weight"
            if part in arch.biases:
                table[f"blk.{layer}.{part}.bias"] = f"model.layers.{layer}.{name}.bias"
    return table


def shapes(arch: Architecture, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that the model must have, by its Hugging Face name."""
    hidden, ffn, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    of_part = {
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate": (ffn, hidden),
        "ffn_up": (ffn, hidden),
        "ffn_down": (hidden, ffn),
        "attn_q_norm": (head,),
        "attn_k_norm": (head,),
    }
    biased = set(arch.biases) if arch.bias_always else set()
    if config.get("attention_bias"):
        biased |= set(_ATTENTION) & set(arch.biases)
    if config.get("mlp_bias"):
        biased |= set(_MLP) & set(arch.biases)
    wanted: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    if not config["tie_word_embeddings"]:
        wanted["lm_head.weight"] = (config["vocab_size"], hidden)
    wanted["model.norm.weight"] = (hidden,)
    for layer in range(config["num_hidden_layers"]):
        for part, name in arch.parts.items():
            shape = of_part.get(part, (hidden,))
            wanted[f"model.layers.{layer}.{name}.weight"] = shape
            if part in biased:
                wanted[f"model.layers.{layer}.{name}.bias"] = shape[:1]
    return wanted


def check_shapes(where: str, wanted: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]) -> None:
    """Refuse tensors that are missing, of a wrong shape, or not of this architecture: all of them at once."""
    faults = [f"{name} is missing" for name in wanted if name not in found]
    faults += [f"{name} has no place in this architecture" for name in found if name not in wanted]
    faults += [
        f"{name} is {list(found[name])}, not {list(shape)}"
        for name, shape in wanted.items()
        if found.get(name, shape) != shape
    ]
    if faults:
        more = f" and {len(faults) - 20} more" if len(faults) > 20 else ""
        raise ArtifactError(f"{where}: {'; '.join(faults[:20])}{more}; the tensors must be those of its config")


def row_order(rows: int, heads: int) -> np.ndarray:
    """Indices that bring rows of a q or k projection from Hugging Face's order into llama.cpp's.

    Within a head, Hugging Face rotates row i with row i + d/2, llama.cpp row 2i with row 2i + 1. `np.argsort` of it
    leads back.
    """
    return np.arange(rows).reshape(heads, 2, rows // heads // 2).swapaxes(1, 2).reshape(-1)


def heads_permuted(arch: Architecture, config: dict[str, Any], name: str) -> int | None:
    """The number of heads whose rows are permuted in the tensor `name` (Hugging Face's), or None."""
    if arch.permuted and ".self_attn.q_proj." in name:
        return config["num_attention_heads"]
    if arch.permuted and ".self_attn.k_proj." in name:
        return config["num_key_value_heads"]
    return None
