"""A tiny random model of every family, float or quantized, with a tokenizer: what the engines are given to read.

Matrices are drawn so that logits have a standard deviation near 1 or above. Every number is one that bfloat16 holds,
and so is every product of a code and a scale, NF4's aside: what an engine then computes differs by its own rounding
alone.
"""

import json
from functools import cache, partial
from typing import Literal

import jax
import ml_dtypes
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from compress.models import read_config
from compress.models.config import DecoderConfig
from compress.models.decoder import Stacked, hidden_states, logits, shapes, stack
from compress.quantize.nf4 import nf4
from export.checkpoint import Checkpoint, host, to_numpy
from export.gguf_pretokenizers import PRE_TOKENIZERS, to_json
from export.quantized import NF4_BLOCK, QuantizedTensor, QuantSpec, Weights, pack

LENGTH = 24
SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GEMMA = {"sliding_window": 8, "query_pre_attn_scalar": 32, "tie_word_embeddings": True}
FAMILIES = {
    "llama": {"tie_word_embeddings": False},
    "llama-3": {"rope_scaling": LLAMA_3, "tie_word_embeddings": True},
    "llama-linear-biased": {
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
    },
    "mistral": {"sliding_window": None, "tie_word_embeddings": False},
    "qwen2": {"head_dim": 16, "tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False},
    "gemma2": {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0, **GEMMA},
    "gemma3_text": {"rope_local_base_freq": 100.0, **GEMMA},
}
"""By model_type, with what tells a variant of the family apart after a hyphen."""

# How matrices are quantized: by the first key that is part of a tensor's name. NF4 takes rows of whole blocks alone.
KINDS: dict[str, dict[str, QuantSpec | Literal["nf4"]]] = {
    "float": {},
    "int4": {"": QuantSpec(4, 32)},
    "nf4": {"layers": "nf4"},
    "int4 layers": {"layers": QuantSpec(4, 32)},
    "int4 asymmetric": {"": QuantSpec(4, 32, symmetric=False)},
    "int5": {"": QuantSpec(5, 32)},
    "int5 asymmetric": {"": QuantSpec(5, 32, symmetric=False)},
    "int3 asymmetric": {"": QuantSpec(3, 32, symmetric=False)},
    "int6 asymmetric": {"": QuantSpec(6, 32, symmetric=False)},
    "all bits": {
        "down_proj": QuantSpec(3, 96),
        "1.self_attn": QuantSpec(4, 64),
        "o_proj": QuantSpec(5, 64),
        "gate_proj": QuantSpec(8, 32),
        "layers": QuantSpec(6, 32),
    },
    "blocks": {
        "embed_tokens": QuantSpec(8, 64),
        "down_proj": QuantSpec(5, 96, symmetric=False),
        "1.self_attn": QuantSpec(4, 64, symmetric=False),
        "2.": QuantSpec(4, 32),
        "layers": QuantSpec(5, 64),
    },
    "several": {
        "embed_tokens": QuantSpec(8, 64),
        "down_proj": QuantSpec(8, 96),
        "1.self_attn": QuantSpec(4, 64),
        "layers": QuantSpec(4, 32),
    },
}

TEXTS = (
    "My fellow citizens, we've 1234 reasons to be  glad.\n\n\tThe state of the union's strong!\n",
    "naïve café, Ünïcödé, 日本語, ½ ² 😀   \r\n  x",
    "<s>literal</s> and [PAD3] <0x0A>",
    "   ",
)
TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"


def config_of(case: str) -> dict:
    """config.json of an example."""
    return {"model_type": case.split("-")[0], **SIZES, **FAMILIES[case]}


@cache
def checkpoint(case: str, kind: str = "float") -> Checkpoint:
    """An example of `FAMILIES` in weights of a kind of `KINDS`."""
    config, rng = config_of(case), np.random.default_rng(7)
    weights: Weights = {}
    for name, shape in shapes(read_config(config)).items():
        spec = next((spec for key, spec in KINDS[kind].items() if key in name), None)
        spread = 0.3 if len(shape) == 1 else 1.5 / np.sqrt(shape[1])
        if name == "model.embed_tokens.weight":
            spread *= 0.5 if "gemma" in case else 4
        if isinstance(spec, QuantSpec) and len(shape) == 2:
            weights[name] = _quantized(rng, shape, spec, spread)
        elif spec == "nf4" and len(shape) == 2 and shape[1] % NF4_BLOCK == 0:
            weights[name] = host(nf4((spread * rng.standard_normal(shape)).astype(np.float32)))
        else:
            center = 1.0 if name.endswith("norm.weight") and "gemma" not in case else 0.0
            drawn = center + spread * rng.standard_normal(shape)
            weights[name] = drawn.astype(ml_dtypes.bfloat16).astype(np.float32)
    return Checkpoint(config, weights, tokenizer_files())


def _quantized(rng: np.random.Generator, shape: tuple[int, ...], spec: QuantSpec, spread: float) -> QuantizedTensor:
    codes = rng.integers(0, spec.levels, shape, dtype=np.uint8)
    groups = (shape[0], shape[1] // spec.group_size)
    # The bits of a code and of a scale are together at most the eight of bfloat16.
    unit = 1 << (8 - spec.bits) // 2
    size = 2.0 ** np.round(np.log2(spread * np.sqrt(12) / spec.levels)) / unit
    scale = (size * rng.integers(unit, 2 * unit, groups)).astype(ml_dtypes.bfloat16)
    zero = None if spec.symmetric else rng.integers(spec.levels // 4, 3 * spec.levels // 4, groups, dtype=np.uint8)
    return QuantizedTensor(pack(codes, spec.bits), scale, zero, spec)


@cache
def expected(case: str, kind: str = "float") -> tuple[np.ndarray, np.ndarray]:
    """Tokens [T] and the logits [T, V] that `compress` gives an example."""
    tokens = np.random.default_rng(1).integers(0, SIZES["vocab_size"], LENGTH)
    return tokens, ours(checkpoint(case, kind), tokens)


def ours(model: Checkpoint, tokens: np.ndarray) -> np.ndarray:
    """Logits [T, V] of tokens [T] by `compress`; weights are dequantized first, so that all kinds share a program."""
    config = read_config(model.config)
    floats = {name: to_numpy(name, model.weights[name], "float32") for name in model.weights}
    return np.asarray(_run(config, stack(config, floats), tokens))


@partial(jax.jit, static_argnums=0)
def _run(config: DecoderConfig, stacked: Stacked, tokens: np.ndarray) -> jax.Array:
    return logits(config, stacked, hidden_states(config, stacked, tokens[None]))[0]


def tokenizer_files(name: str = "gpt-2", size: int = 300) -> dict[str, bytes]:
    """A byte-level tokenizer trained on `TEXTS` that cuts words as `name` does."""
    rule = PRE_TOKENIZERS[name]
    backend = Tokenizer(models.BPE(ignore_merges=rule.ignore_merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    tokenizer = json.loads(backend.to_str())
    tokenizer["pre_tokenizer"] = to_json(rule)
    tokenizer["normalizer"] = None if rule.normalizer is None else {"type": rule.normalizer}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": True,
        "chat_template": TEMPLATE,
    }
    return {"tokenizer.json": json.dumps(tokenizer).encode(), "tokenizer_config.json": json.dumps(settings).encode()}
