"""Every feature of every family is switched off in turn, and must be missed."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compress.models import MODELS, decoder
from compress.models.config import DecoderConfig
from tests.tiny_models import RECORDS, config_of, golden, weights_of


def override(config: DecoderConfig, **attributes) -> DecoderConfig:
    """The config with some of its family's methods and properties replaced."""
    family = type(f"Other{type(config).__name__}", (type(config),), attributes)
    return family(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})


def lose_biases(config, weights, part):
    gone = [name for name in weights if name.endswith(".bias") and part in name]
    return (config, weights | {name: np.zeros_like(weights[name]) for name in gone}) if gone else None


def lose_qk_norm(config, weights):
    def block(config):
        block = super(type(config), config).block()
        block.self_attn.q_norm = block.self_attn.k_norm = None
        return block

    kept = {name: weight for name, weight in weights.items() if "q_norm" not in name and "k_norm" not in name}
    return (override(config, block=block), kept) if len(kept) < len(weights) else None


def lose_window(config, weights):
    if not any(config.windows):
        return None
    return override(config, windows=(None,) * len(config.windows), frequencies=config.frequencies), weights


def lose_rope_scaling(config, weights):
    rope = dataclasses.replace(config.rope, kind="default")
    return (dataclasses.replace(config, rope=rope), weights) if rope != config.rope else None


def replacing(**fields: Callable[[DecoderConfig], object]):
    """Fields set to something else, in those models that have them and have them set."""

    def lose(config, weights):
        if any(getattr(config, name, None) is None for name in fields):
            return None
        return dataclasses.replace(config, **{name: value(config) for name, value in fields.items()}), weights

    return lose


def overriding(name: str, off: float):
    """A property of the family put out of effect, in those models where it has one."""

    def lose(config, weights):
        return (override(config, **{name: off}), weights) if getattr(config, name) != off else None

    return lose


FEATURES: dict[str, Callable] = {
    "attention bias": lambda config, weights: lose_biases(config, weights, "self_attn"),
    "MLP bias": lambda config, weights: lose_biases(config, weights, "mlp"),
    "QK-norm": lose_qk_norm,
    "window": lose_window,
    "RoPE": lambda config, weights: (override(config, frequencies=0 * config.frequencies), weights),
    "RoPE scaling": lose_rope_scaling,
    "local RoPE": replacing(local_rope=lambda config: config.rope),
    "attention soft cap": replacing(attn_logit_softcapping=lambda config: None),
    "logit soft cap": replacing(final_logit_softcapping=lambda config: None),
    "query scale": replacing(query_pre_attn_scalar=lambda config: float(config.head_dim)),
    "1 + w norms": overriding("norm_offset", 0.0),
    "embedding scale": overriding("embedding_scale", 1.0),
}

GEMMA = {"RoPE", "RoPE scaling", "window", "attention bias", "logit soft cap", "query scale"}
GEMMA |= {"1 + w norms", "embedding scale"}
EXPECTED: dict[str, set[str]] = {
    "llama": {"RoPE", "RoPE scaling", "attention bias", "MLP bias"},
    "mistral": {"RoPE", "window"},
    "qwen2": {"RoPE", "window", "attention bias"},
    "qwen3": {"RoPE", "RoPE scaling", "window", "attention bias", "QK-norm"},
    "gemma2": GEMMA | {"attention soft cap"},
    "gemma3_text": GEMMA | {"QK-norm", "local RoPE"},
}

SWITCHES = [
    (case, feature)
    for case in RECORDS
    for feature, lose in FEATURES.items()
    if lose(config_of(case), weights_of(case)) is not None
]


def test_the_goldens_show_every_feature_of_every_family():
    shown: dict[str, set[str]] = {family: set() for family in MODELS}
    for case, feature in SWITCHES:
        shown[RECORDS[case]["config"]["model_type"]].add(feature)
    assert shown == EXPECTED


@pytest.mark.parametrize(("case", "feature"), SWITCHES)
def test_a_feature_that_is_switched_off_moves_the_logits(case, feature):
    tokens, expected = golden(case)
    config, weights = FEATURES[feature](config_of(case), weights_of(case))
    with jax.disable_jit():  # Operation by operation: no program to compile for each of the variants.
        stacked = decoder.stack(config, weights)
        got = decoder.logits(config, stacked, decoder.hidden_states(config, stacked, jnp.asarray(tokens)))
    assert np.isfinite(got).all()
    assert np.abs(got - expected).max() > 1e-2
