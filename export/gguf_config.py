"""A model's architecture as GGUF's keys and as Hugging Face's config.json."""

import math
from typing import Any

import numpy as np
from jaxtyping import Float

from export.errors import ArtifactError
from export.gguf_header import Header
from export.gguf_names import ARCHITECTURES, Architecture


def read_config(header: Header, factors: Float[np.ndarray, " F"] | None) -> dict[str, Any]:
    """A complete config.json from a header; `factors` are the values of rope_freqs.weight.

    Raises:
      ArtifactError: the architecture is unknown, or a key is missing or out of range.
    """
    name = header.text("general.architecture")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ArtifactError(f"{header.path}: architecture {name[:40]!r} is not supported; {known} are")
    arch = ARCHITECTURES[name]
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ArtifactError(f"{header.path}: no matrix token_embd.weight; is it a whole language model?")
    hidden = header.integer(f"{name}.embedding_length", low=1)
    heads = header.integer(f"{name}.attention.head_count", low=1)
    head = header.integer(f"{name}.attention.key_length", hidden // heads, low=2, high=1 << 16)
    for key in ("attention.value_length", "rope.dimension_count"):
        if header.integer(f"{name}.{key}", head) != head:
            raise ArtifactError(f"{header.path}: {name}.{key} differs from the head's {head}: not supported")
    layers = header.integer(f"{name}.block_count", low=1, high=max(1, len(header.tensors)))
    config: dict[str, Any] = {
        "model_type": arch.model_type,
        "architectures": [arch.class_name],
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": header.integer(f"{name}.feed_forward_length", low=1),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": header.integer(f"{name}.attention.head_count_kv", heads, low=1),
        "head_dim": head,
        "hidden_act": "gelu_pytorch_tanh" if arch.gemma else "silu",
        "max_position_embeddings": header.integer(f"{name}.context_length", low=1),
        "rms_norm_eps": header.number(f"{name}.attention.layer_norm_rms_epsilon"),
        "rope_theta": header.number(f"{name}.rope.freq_base", 1e6 if name == "gemma3" else 1e4),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "attention_dropout": 0.0,
        "use_cache": True,
        "torch_dtype": {"F32": "float32", "F16": "float16"}.get(embedding.type.name, "bfloat16"),
    }
    config["rope_scaling"] = _read_rope_scaling(header, name, config, factors)
    if name == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in header.tensors
    if arch.gemma:
        config |= _read_gemma(header, arch, config)
    return config


def _read_gemma(header: Header, arch: Architecture, config: dict[str, Any]) -> dict[str, Any]:
    name, layers = arch.name, config["num_hidden_layers"]
    period = header.integer(f"{name}.attention.sliding_window_pattern", arch.period, low=1)
    window = header.integer(f"{name}.attention.sliding_window", 4096 if name == "gemma2" else 0)
    slides = [window > 0 and (layer + 1) % period != 0 for layer in range(layers)]
    found = {
        "hidden_activation": config["hidden_act"],
        "sliding_window": window or None,
        "layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides],
        "query_pre_attn_scalar": _attention_scalar(arch, config),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }
    if name == "gemma2":
        found["attn_logit_softcapping"] = header.number(f"{name}.attn_logit_softcapping", 50.0)
        found["final_logit_softcapping"] = header.number(f"{name}.final_logit_softcapping", 30.0)
    else:
        found["rope_local_base_freq"] = header.number(f"{name}.rope.freq_base_swa", 1e4)
        found["sliding_window_pattern"] = period
    return found


def _attention_scalar(arch: Architecture, config: dict[str, Any]) -> int:
    """Gemma's `query_pre_attn_scalar` as llama.cpp infers it: the 27B models are told by their depth."""
    if config["num_hidden_layers"] == (46 if arch.name == "gemma2" else 62):
        return config["hidden_size"] // config["num_attention_heads"]
    return config["head_dim"]


def _read_rope_scaling(header: Header, name: str, config: dict[str, Any], factors) -> dict[str, Any] | None:
    original = header.integer(f"{name}.rope.scaling.original_context_length", 8192, low=1)
    if factors is not None:
        return _llama3_from(header, factors, config["rope_theta"], config["head_dim"], original=original)
    kind = header.text(f"{name}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind != "linear":
        raise ArtifactError(f"{header.path}: RoPE scaling {kind[:40]!r} is not supported; linear and Llama 3's are")
    return {"rope_type": "linear", "factor": header.number(f"{name}.rope.scaling.factor")}


def llama3_factors(scaling: dict[str, Any], theta: float, head_dim: int) -> Float[np.ndarray, " F"]:
    """What each RoPE frequency is divided by under Llama 3's scaling, float32 [head_dim / 2].

    1 where the original context holds at least `high_freq_factor` turns, `factor` where it holds at most
    `low_freq_factor`, and between them the frequency is interpolated linearly in the number of turns.
    """
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    part = np.clip((_turns(scaling["original_max_position_embeddings"], theta, head_dim) - low) / (high - low), 0, 1)
    return (1 / ((1 - part) / float(scaling["factor"]) + part)).astype(np.float32)


def _turns(original: int, theta: float, head_dim: int) -> np.ndarray:
    return original * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)


def _llama3_from(header: Header, factors, theta: float, head_dim: int, *, original: int) -> dict[str, Any]:
    """The scaling that makes these factors; only their product with the original context is determined by them."""
    refused = ArtifactError(f"{header.path}: rope_freqs.weight does not hold the factors of Llama 3's RoPE scaling")
    if factors.shape != (head_dim // 2,) or not (np.isfinite(factors) & (factors >= 0.999)).all() or theta <= 1:
        raise refused
    factor = float(factors.max())
    turns = _turns(original, theta, head_dim)
    candidates = [(1.0, 4.0)]
    between = (factors > 1.001) & (factors < factor * 0.999)
    if between.sum() >= 2:
        part = (1 / factors[between] - 1 / factor) / (1 - 1 / factor)
        slope, start = np.polyfit(turns[between], part, 1)
        if slope > 0:
            candidates.append((round(-start / slope, 3), round((1 - start) / slope, 3)))
    for low, high in candidates:
        scaling = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }
        if 0 < low < high and np.allclose(llama3_factors(scaling, theta, head_dim), factors, rtol=1e-3):
            return scaling
    raise refused


def rope(config: dict[str, Any], kind: str = "full_attention") -> tuple[float, dict[str, Any]]:
    """Base and scaling of RoPE, from `rope_theta` and `rope_scaling` or from `rope_parameters`."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    by_kind = kind in found
    found = found[kind] if by_kind else found
    local = kind == "sliding_attention"
    theta = found.get("rope_theta") if by_kind or not local else None
    if theta is None:
        theta = config.get("rope_local_base_freq" if local else "rope_theta")
    if theta is None:
        theta = 1e6 if config["model_type"] == "gemma3_text" and not local else 1e4
    return float(theta), dict(found) if by_kind or not local else {}


def write_keys(arch: Architecture, config: dict[str, Any]) -> dict[str, Any]:
    """The keys `{arch}.…` that describe a config. Integers are uint32, floats float32.

    Raises:
      ArtifactError: llama.cpp would compute something else than the config says.
    """
    theta, scaling = rope(config)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "linear", "llama3") or (kind == "llama3" and arch.name != "llama"):
        raise ArtifactError(f"config.json: RoPE scaling {kind!r} of a {arch.model_type} model has no form in GGUF here")
    head, window = config["head_dim"], _window(arch, config)
    if arch.name == "qwen2" and head * config["num_attention_heads"] != config["hidden_size"]:
        raise ArtifactError("config.json: llama.cpp's qwen2 wants num_attention_heads * head_dim = hidden_size")
    context = config.get("max_position_embeddings") or 2048
    keys: dict[str, Any] = {
        "vocab_size": config["vocab_size"],
        "context_length": context if arch.gemma else min(context, window or context),
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": float(config.get("rms_norm_eps") or 1e-6),
        "rope.freq_base": theta,
        "rope.dimension_count": head,
    }
    if kind == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling["factor"])}
    if kind == "llama3":
        keys["rope.scaling.original_context_length"] = int(scaling["original_max_position_embeddings"])
    if arch.gemma:
        keys |= _gemma_keys(arch, config, window)
    return {f"{arch.name}.{key}": value for key, value in keys.items()}


def _window(arch: Architecture, config: dict[str, Any]) -> int | None:
    """The sliding window in force. llama.cpp has none for these families but Gemma: there it bounds the context."""
    used = config.get("use_sliding_window", not arch.name.startswith("qwen"))
    return config.get("sliding_window") if used else None


def _gemma_keys(arch: Architecture, config: dict[str, Any], window: int | None) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    wanted: dict[str, Any] = {
        "query_pre_attn_scalar": _attention_scalar(arch, config),
        "layer_types": [
            "full_attention" if (layer + 1) % arch.period == 0 else "sliding_attention" for layer in range(layers)
        ],
        "sliding_window_pattern": arch.period,
    }
    if arch.name == "gemma3":
        wanted |= {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    for name, value in wanted.items():
        if config.get(name, value) != value:
            raise ArtifactError(f"config.json: {name} = {config[name]!r}; llama.cpp's {arch.name} computes {value!r}")
    if not window:
        raise ArtifactError(f"config.json: no sliding_window; llama.cpp's {arch.name} needs one")
    keys: dict[str, Any] = {"attention.sliding_window": window}
    local, scaling = rope(config, "sliding_attention")
    if arch.name == "gemma3":
        if (scaling.get("rope_type") or "default") != "default":
            raise ArtifactError("config.json: RoPE scaling in sliding layers has no form in GGUF here")
        keys["rope.freq_base_swa"] = local
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if arch.name == "gemma2":
            if not config.get(cap, 50.0):
                raise ArtifactError(f"config.json: {cap} is off; llama.cpp's gemma2 always caps")
            keys[cap] = float(config.get(cap, 50.0 if cap.startswith("attn") else 30.0))
    return keys
