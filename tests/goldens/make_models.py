"""Logits of tiny random models by transformers: the goldens that `compress.models` must meet.

    python tests/goldens/make_models.py        with transformers and torch installed; writes models.json and models.npz

Weights aren't kept: `draw` draws the same ones here and in the tests.
"""

import json
from pathlib import Path

import numpy as np

GOLDENS = Path(__file__).parent
LENGTH = 24

TINY = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA = {"head_dim": 16, "hidden_activation": "gelu_pytorch_tanh"}

# config.json of each model, in the style of transformers 4 (rope_theta, rope_scaling) or of 5 (rope_parameters).
CASES: dict[str, dict] = {
    "llama": {"model_type": "llama", "head_dim": 16, "rope_theta": 500.0, "rms_norm_eps": 1e-5},
    "llama-biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama-llama3": {"model_type": "llama", "head_dim": 16, "rope_theta": 10000.0, "rope_scaling": LLAMA3},
    "llama-llama3-tied": {
        "model_type": "llama",
        "head_dim": 16,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 1000, **LLAMA3, "factor": 32},
    },
    "llama-linear": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    },
    "llama-linear-old": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2}},
    "mistral": {"model_type": "mistral", "head_dim": 16, "sliding_window": 7, "rope_theta": 1000.0},
    "mistral-tied": {
        "model_type": "mistral",
        "sliding_window": None,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    },
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, "sliding_window": 5, "rope_theta": 1000000.0},
    "qwen2-sliding": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "rope_theta": 1000000.0},
    "qwen3-sliding": {
        "model_type": "qwen3",
        "head_dim": 8,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    },
    "gemma2": {
        "model_type": "gemma2",
        **GEMMA,
        "sliding_window": 6,
        "query_pre_attn_scalar": 9,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
        "rope_theta": 10000.0,
    },
    "gemma2-untied": {
        "model_type": "gemma2",
        **GEMMA,
        "sliding_window": 8,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": None,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    },
    "gemma3": {
        "model_type": "gemma3_text",
        **GEMMA,
        "sliding_window": 6,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 40,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 100.0,
    },
    "gemma3-scaled-old": {
        "model_type": "gemma3_text",
        **GEMMA,
        "sliding_window": 6,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 48,
        "rope_theta": 1000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gemma3-scaled": {
        "model_type": "gemma3_text",
        **GEMMA,
        "sliding_window": 8,
        "query_pre_attn_scalar": 24,
        "attention_bias": True,
        "final_logit_softcapping": 5.0,
        "tie_word_embeddings": False,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
}


def draw(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """Random float32 weights, drawn in the order of their names: none is zero or one, so that each is seen to matter.

    Matrices keep a unit vector's length times 1.5, so that softmaxes are neither flat nor one-hot.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    weights = {}
    for name in sorted(shapes):
        shape = shapes[name]
        if len(shape) == 2:
            value = generator.normal(0, 1.5 * shape[1] ** -0.5, shape)
        elif name.endswith("norm.weight"):
            value = generator.uniform(0.5, 1.5, shape)
        else:
            value = generator.normal(0, 0.5, shape)
        weights[name] = value.astype(np.float32)
    return weights


def run_transformers(config: dict, seed: int) -> tuple[dict, np.ndarray, np.ndarray]:
    """The config.json that transformers writes, tokens [2, T] and logits [2, T, V] of a drawn model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = json.loads(json.dumps(config))
    parsed = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(parsed, attn_implementation="eager", dtype=torch.float32).eval()
    state = model.state_dict()
    names = [name for name in state if not (name == "lm_head.weight" and parsed.tie_word_embeddings)]
    drawn = draw({name: tuple(state[name].shape) for name in names}, seed)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in drawn.items()}, strict=False)
    tokens = np.random.Generator(np.random.PCG64(seed)).integers(0, config["vocab_size"], (2, LENGTH), dtype=np.int32)
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens).long(), use_cache=False).logits.numpy()
    return json.loads(parsed.to_json_string(use_diff=False)), tokens, logits


def main() -> None:
    import torch
    import transformers

    torch.set_num_threads(1)
    configs, arrays = {}, {}
    for seed, (case, own) in enumerate(CASES.items()):
        config = TINY | own
        written, tokens, logits = run_transformers(config, seed)
        configs[case] = {"seed": seed, "config": config, "written": written}
        arrays |= {f"{case}.tokens": tokens, f"{case}.logits": logits}
        print(f"{case}: standard deviation {logits.std():.2f}")
    made_with = {"transformers": transformers.__version__, "torch": torch.__version__}
    text = json.dumps({"made_with": made_with, "models": configs}, indent=1)
    (GOLDENS / "models.json").write_text(text + "\n")
    np.savez_compressed(GOLDENS / "models.npz", **arrays)


if __name__ == "__main__":
    main()
