"""AWQ: folding leaves every family's layer as it was, and what is rounded afterwards is nearer to the outputs."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.data.batch import Batch
from compress.models import MODELS
from compress.models.decoder import layer_data, split_layers
from compress.quantize.awq import awq, fold, output_errors, scales, stored
from compress.quantize.calibrate import capture_all, output
from compress.quantize.gptq import gram
from compress.quantize.layer import Layer
from compress.quantize.rtn import rtn
from export.errors import ArtifactError
from export.quantized import QuantSpec
from tests.tiny_models import EXEMPLARS, config_of, weights_of

SPEC = QuantSpec(4, 4)


@cache
def layer_of(case: str) -> Layer:
    """A drawn model's first layer, some inputs of it far larger than others, and what it makes of random states."""
    config, rng = config_of(case), np.random.default_rng(0)
    prefix = "model.layers.0."
    weights = {name: jnp.asarray(value) for name, value in split_layers(config, weights_of(case))[1][0].items()}
    for name in weights:
        if name.endswith("norm.weight"):
            weights[name] = weights[name] * jnp.exp(jnp.asarray(rng.normal(0, 1.5, weights[name].shape), jnp.float32))
    specs = {name: SPEC for name, value in weights.items() if value.ndim == 2}
    shape = (2, 12)
    segments, positions = np.ones(shape, np.int32), np.tile(np.arange(12, dtype=np.int32), (2, 1))
    batches = [Batch(np.zeros(shape, np.int32), segments, positions, np.ones(shape, np.float32))]
    states = [jnp.asarray(rng.normal(size=(*shape, config.hidden_size)), jnp.float32)]
    data = tuple(jnp.asarray(part[0]) for part in layer_data(config))
    targets, grams = capture_all(config, weights, states, data, batches)
    return Layer(config, prefix, weights, specs, grams, states, targets, [], data, batches)


@pytest.mark.parametrize("family", MODELS)
def test_folding_changes_no_output_and_only_what_it_may(family):
    task = layer_of(EXEMPLARS[family])
    folded = fold(task)
    found = output(task.config, folded.weights, task.inputs[0], task.data, task.batches[0])
    np.testing.assert_allclose(found, task.targets[0], rtol=2e-3, atol=5e-4)
    changed = {n for n, value in folded.weights.items() if np.any(np.asarray(value != task.weights[n]))}
    assert changed > {f"{name}.weight" for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj")}
    assert not {name for name in changed if "q_norm" in name or "k_norm" in name or "post_feedforward" in name}
    for name in changed:
        if name.endswith("norm.weight"):
            np.testing.assert_array_equal(stored(folded.weights[name]), folded.weights[name])
    _, grams = capture_all(task.config, folded.weights, task.inputs, task.data, task.batches)
    for joined, value in grams.items():
        np.testing.assert_allclose(folded.grams[joined], value, rtol=2e-2, atol=1e-2 * float(jnp.abs(value).max()))


def test_biases_of_values_scale_along():
    task = layer_of(EXEMPLARS["qwen2"])
    folded = fold(task)
    ratio = task.weights["self_attn.v_proj.bias"] / folded.weights["self_attn.v_proj.bias"]
    rows = jnp.repeat(ratio.reshape(task.config.num_key_value_heads, 1, -1), 1, axis=1).reshape(-1)
    assert float(jnp.abs(rows - 1).max()) > 0.01
    groups = task.config.num_attention_heads // task.config.num_key_value_heads
    wanted = jnp.repeat(ratio.reshape(task.config.num_key_value_heads, 1, -1), groups, axis=1).reshape(-1)
    found = (folded.weights["self_attn.o_proj.weight"] / task.weights["self_attn.o_proj.weight"])[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


def test_linears_that_are_left_out_are_folded_along_but_do_not_choose():
    task = layer_of(EXEMPLARS["llama"])
    bare = dataclasses.replace(task, specs={"self_attn.q_proj.weight": SPEC})
    folded = fold(bare)
    found = output(task.config, folded.weights, task.inputs[0], task.data, task.batches[0])
    np.testing.assert_allclose(found, task.targets[0], rtol=2e-3, atol=5e-4)
    assert folded.weights["mlp.down_proj.weight"] is task.weights["mlp.down_proj.weight"]
    assert folded.weights["self_attn.k_proj.weight"] is not task.weights["self_attn.k_proj.weight"]


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), alpha=st.floats(0, 1), gemma=st.booleans(), norm=st.booleans())
def test_scales_are_those_of_the_definition(seed, alpha, gemma, norm):
    config = config_of(EXEMPLARS["gemma2" if gemma else "llama"])
    rng = np.random.default_rng(seed)
    kv, groups, head = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads, 4
    config = dataclasses.replace(config, head_dim=head)
    size = kv * groups * head
    energy = np.exp(rng.normal(0, 2, size))
    energy[rng.integers(size)] = 0.0
    source = rng.normal(size=size) if norm else rng.normal(size=(kv * head, 3))
    by_input, by_channel = scales(config, jnp.asarray(source, jnp.float32), jnp.diag(jnp.asarray(energy)), alpha)
    wanted = energy if norm else energy.reshape(kv, groups, head).mean(1).reshape(-1)
    live = wanted > 0
    power = np.where(live, wanted, 1.0) ** (alpha / 2)
    expected = np.where(live, power / np.sqrt(power[live].max() * power[live].min()), 1.0)
    # A norm's weight is rounded to bfloat16, the scale with it; it stays where it would become zero.
    if norm:
        gain = config.norm_offset + source
        near = np.abs(by_channel / expected - 1) <= 2.0**-8 * (1 + config.norm_offset * np.abs(expected / gain))
        assert np.all(near | (np.asarray(by_channel) == 1) & gemma)
    else:
        np.testing.assert_allclose(by_channel, expected, rtol=1e-4)
        np.testing.assert_allclose(np.asarray(by_input).reshape(kv, groups, head)[:, -1].reshape(-1), by_channel)


def problem(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A weight, and the Hessian of inputs of which few are far larger than the others."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(256, 64)) * np.exp(1.5 * rng.normal(size=64))
    return rng.normal(0, 0.05, (16, 64)).astype(np.float32), np.asarray(x.T @ x / 256, np.float32)


@pytest.mark.parametrize("spec", [QuantSpec(4, 32), QuantSpec(4, 32, False)], ids=str)
def test_scaled_inputs_leave_less_error_at_the_output_and_the_clip_search_sees_it(spec):
    errors = np.zeros(2)
    for seed in range(4):
        w, hessian = problem(seed)
        energy = np.diag(hessian)
        candidates = jnp.stack([jnp.asarray(energy ** (alpha / 2), jnp.float32) for alpha in (0.0, 0.25)])
        errors += np.asarray(output_errors(jnp.asarray(w), jnp.asarray(hessian), candidates, spec))

        def error(tensor, w=w, hessian=hessian):
            d = w - np.asarray(tensor.dequantize())
            return float(np.trace(d @ hessian @ d.T))

        assert error(awq(w, hessian, spec)) < 0.9 * error(rtn(w, spec))
    assert errors[1] < 0.8 * errors[0]


def test_dead_inputs_keep_their_scale_and_a_broken_hessian_is_refused():
    task = layer_of(EXEMPLARS["llama"])
    grams = {name: value.at[2].set(0).at[:, 2].set(0) for name, value in task.grams.items()}
    folded = fold(dataclasses.replace(task, grams=grams))
    assert all(bool(jnp.isfinite(value).all()) for value in folded.weights.values())
    same = folded.weights["mlp.down_proj.weight"][:, 2] == task.weights["mlp.down_proj.weight"][:, 2]
    assert bool(same.all())
    nothing = fold(dataclasses.replace(task, grams=jax.tree.map(jnp.zeros_like, grams)))
    assert all(bool(jnp.isfinite(value).all()) for value in nothing.weights.values())
    w, hessian = problem(0)
    hessian[3, 4] = np.nan
    with pytest.raises(ArtifactError, match="activations are NaN or infinite"):
        awq(w, hessian, QuantSpec(4, 32))


def test_inputs_that_calibration_never_saw_keep_some_weight():
    w = np.random.default_rng(1).normal(0, 0.05, (8, 32)).astype(np.float32)
    hessian = np.asarray(gram(jnp.zeros((4, 32)), jnp.ones(4, bool)))
    np.testing.assert_array_equal(awq(w, hessian, QuantSpec(4, 32)).dequantize(), rtn(w, QuantSpec(4, 32)).dequantize())
