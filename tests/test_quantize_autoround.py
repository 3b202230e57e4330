"""AutoRound: what it learns from, what it may change, and that it helps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.models.decoder import EMBEDDING, Stacked, embed, layer_data, linears, split_layers
from compress.quantize.autoround import autoround, form, landed, places, relative_error
from compress.quantize.calibrate import output
from compress.quantize.layer import Layer
from compress.quantize.rtn import rtn
from export.quantized import QuantizedTensor, QuantSpec
from tests.test_quantize_heal import batches_of
from tests.tiny_models import EXEMPLARS, config_of, weights_of


def task_of(family: str, spec: QuantSpec) -> tuple[Layer, dict[str, QuantizedTensor]]:
    """A family's first layer on random tokens, and its linears rounded to nearest."""
    config, weights = config_of(EXEMPLARS[family]), weights_of(EXEMPLARS[family])
    batches = batches_of(config, 2, padded=5)
    stem = Stacked({EMBEDDING: jnp.asarray(weights[EMBEDDING])}, [])
    inputs = [np.asarray(embed(config, stem, jnp.asarray(batch.tokens), jnp.float32)) for batch in batches]
    layer = {name: jnp.asarray(value) for name, value in split_layers(config, weights)[1][0].items()}
    frequencies, windows = layer_data(config)
    data = (jnp.asarray(frequencies[0]), jnp.asarray(windows[0]))
    targets = [np.asarray(output(config, layer, x, data, batch)) for x, batch in zip(inputs, batches, strict=True)]
    prefix = "model.layers.0."
    specs = {name.removeprefix(prefix): spec for name in linears(config) if name.startswith(prefix)}
    task = Layer(config, prefix, layer, specs, {}, inputs, targets, targets, data, batches)
    return task, {name: rtn(layer[name], spec, clip_steps=0) for name in specs}


def error_of(task: Layer, packed: dict) -> float:
    """The mean over real tokens of |y - wanted|^2 / |wanted|^2."""
    shares = []
    for x, wanted, batch in zip(task.inputs, task.targets, task.batches, strict=True):
        y = np.asarray(output(task.config, dict(task.weights) | packed, x, task.data, batch), np.float64)
        share = np.square(y - wanted).sum(-1) / np.square(np.asarray(wanted, np.float64)).sum(-1)
        shares.append(share[batch.segments > 0])
    return float(np.concatenate(shares).mean())


@pytest.mark.parametrize("family", EXEMPLARS)
def test_learning_lowers_the_layers_error_and_keeps_its_format(family):
    task, packed = task_of(family, QuantSpec(4, 16, False))
    learned = autoround(task, packed, autoround_steps=40)
    assert error_of(task, learned) < 0.8 * error_of(task, packed)
    assert learned.keys() == packed.keys()
    for name, before in packed.items():
        assert learned[name].spec == before.spec and np.array_equal(learned[name].zero, before.zero)
        assert learned[name].scale.dtype == before.scale.dtype
        moved = np.asarray(learned[name].codes(), int) - np.asarray(before.codes(), int)
        assert 0 < np.abs(moved).max() <= 1  # half a step of shift crosses one border


def test_a_result_that_is_worse_is_not_kept(monkeypatch):
    task, packed = task_of("llama", QuantSpec(8, 16, False))
    monkeypatch.setattr("compress.quantize.autoround.NARROWEST", 1.4)
    assert autoround(task, packed, autoround_steps=1) is packed


def test_no_steps_change_nothing():
    task, packed = task_of("llama", QuantSpec(4, 16, True))
    assert autoround(task, packed, autoround_steps=0) is packed


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans(), st.sampled_from([4, 8]))
def test_what_is_learned_is_what_is_stored(seed, symmetric, bits):
    rng = np.random.default_rng(seed)
    w = rng.normal(size=(3, 32)).astype(np.float32)
    tensor = rtn(w, QuantSpec(bits, 16, symmetric))
    where = places(tensor, jnp.asarray(w))
    zeros, ones = jnp.zeros_like(where), jnp.ones(tensor.scale.shape)
    same = landed(tensor, where, zeros, ones)
    assert all(map(np.array_equal, jax.tree.leaves(same), jax.tree.leaves(tensor)))
    shift = jnp.asarray(rng.uniform(-0.5, 0.5, w.shape), jnp.float32)
    factor = jnp.asarray(rng.uniform(0.5, 1.5, ones.shape), jnp.float32)
    after = landed(tensor, where, shift, factor)
    np.testing.assert_array_equal(form(tensor, where, shift, factor), after.dequantize())
    wanted = np.clip(np.round(np.asarray(where) + np.asarray(shift)), 0, 2**bits - 1)
    np.testing.assert_array_equal(after.codes(), wanted)


def test_gradients_pass_the_rounding_by():
    rng = np.random.default_rng(0)
    w, cotangent = rng.normal(size=(2, 3, 32)).astype(np.float32)
    tensor = rtn(w, QuantSpec(4, 16, True))
    where = places(tensor, jnp.asarray(w))
    start = jnp.zeros_like(where), jnp.ones(tensor.scale.shape)
    d_shift, d_factor = jax.grad(lambda *learned: jnp.sum(form(tensor, where, *learned) * cotangent), (0, 1))(*start)
    scale = np.repeat(np.asarray(tensor.scale, np.float32), 16, axis=1)
    np.testing.assert_allclose(d_shift, cotangent * scale, rtol=1e-6)
    by_group = (np.asarray(tensor.dequantize()) * cotangent).reshape(3, 2, 16).sum(-1)
    np.testing.assert_allclose(d_factor, by_group, rtol=1e-5, atol=1e-6)


def test_the_error_is_relative_to_each_token_and_passes_padding_by():
    wanted = jnp.asarray([[[3.0, 4.0], [300.0, 400.0], [0.0, 0.0], [1.0, 1.0]]])
    y = wanted + jnp.asarray([[[0.0, 5.0], [0.0, 50.0], [9.0, 9.0], [np.nan, 1.0]]])
    total, count = relative_error(y, wanted, jnp.asarray([[True, True, True, False]]))
    assert (float(total), int(count)) == (pytest.approx(1.0 + 0.01), 2)
