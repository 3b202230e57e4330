"""Grids and round-to-nearest, and what every quantizer of integers in the registry must do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.quantize.grid import choose_grid
from compress.quantize.quantizers import QUANTIZERS
from compress.quantize.rtn import fake_quantize, rtn
from export.errors import ArtifactError
from export.quantized import QuantSpec

SPECS = [
    QuantSpec(bits, group, symmetric, dtype)
    for bits, group, symmetric, dtype in [
        (4, 32, True, "bfloat16"),
        (4, 32, False, "bfloat16"),
        (4, 64, True, "float16"),
        (4, 64, False, "float32"),
        (8, 32, True, "bfloat16"),
        (8, 64, False, "float16"),
        (3, 32, True, "bfloat16"),
        (5, 64, False, "bfloat16"),
        (6, 64, True, "float16"),
    ]
]


def weights(seed: int, shape=(6, 128), scale=0.05) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)


def hessian_of(seed: int, size: int) -> np.ndarray:
    """The Gram matrix of correlated inputs of unequal size."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(4 * size, size // 4)) @ rng.normal(size=(size // 4, size))
    x = (x + rng.normal(size=x.shape)) * np.exp(rng.normal(size=size))
    return (x.T @ x / len(x)).astype(np.float32)


INTEGERS = [name for name in QUANTIZERS if name != "nf4"]


def quantize(name: str, w: np.ndarray, spec: QuantSpec, **keywords):
    hessian = hessian_of(0, w.shape[-1]) if QUANTIZERS[name].calibrated else None
    return QUANTIZERS[name].quantize(w, spec, hessian=hessian, **keywords)


def grid_error(w: np.ndarray, scale: np.ndarray, zero: np.ndarray, spec: QuantSpec) -> np.ndarray:
    """The squared error a group of the nearest codes, by definition."""
    x = w.reshape(*w.shape[:-1], -1, spec.group_size).astype(np.float64)
    s, z = scale[..., None].astype(np.float64), zero[..., None].astype(np.float64)
    q = np.clip(np.round(x / s) + z, 0, spec.levels - 1)
    return np.square((q - z) * s - x).sum(-1)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), log_scale=st.floats(-4, 3), shift=st.floats(-2, 2))
def test_no_weight_is_further_from_its_value_than_the_whole_range_would_leave_it(spec, seed, log_scale, shift):
    w = (weights(seed, scale=1.0) + np.float32(shift)) * np.float32(10**log_scale)
    q = rtn(w, spec)
    low, high = np.minimum(w.reshape(6, -1, spec.group_size).min(-1), 0), w.reshape(6, -1, spec.group_size).max(-1)
    width = 2 * np.maximum(-low, high) if spec.symmetric else np.maximum(high, 0) - low
    step = width / (spec.levels - 2 if spec.symmetric else spec.levels - 1)
    error = np.square(np.asarray(q.dequantize()) - w).reshape(6, -1, spec.group_size).sum(-1)
    # Half a step a weight, a second half where the zero point is rounded, and the scale's own rounding.
    rounding = float(jnp.finfo(spec.scale_dtype).eps) * spec.levels
    rounding = rounding + spec.levels * float(jnp.finfo(spec.scale_dtype).smallest_subnormal) / step
    assert np.all(error <= spec.group_size * np.square(step * (1 + rounding)))
    assert np.isfinite(error).all()


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_search_is_never_worse_than_the_whole_range_and_codes_are_the_nearest(spec):
    w = weights(1)
    plain, searched = rtn(w, spec, clip_steps=0), rtn(w, spec)
    errors = []
    for q in (plain, searched):
        zero = np.full(q.scale.shape, spec.levels // 2) if q.zero is None else np.asarray(q.zero)
        errors.append(grid_error(w, np.asarray(q.scale, np.float64), zero, spec))
        measured = np.square(np.asarray(q.dequantize(), np.float64) - w).reshape((*errors[-1].shape, -1)).sum(-1)
        np.testing.assert_allclose(measured, errors[-1], rtol=1e-3, atol=1e-12)
    assert np.all(errors[1] <= errors[0] * 1.001)
    assert errors[1].sum() < 0.95 * errors[0].sum()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_scale_is_rounded_before_codes_are_chosen(dtype):
    spec = QuantSpec(8, 64, True, dtype)
    w = weights(2, (4, 64))
    q = rtn(w, spec)
    assert q.scale.dtype == jnp.dtype(dtype)
    stored = np.asarray(q.scale, np.float32)
    expected = np.clip(np.round(w / stored) + 128, 0, 255)
    np.testing.assert_array_equal(np.asarray(q.codes()), expected)


def test_importance_moves_the_grid_to_the_inputs_that_matter():
    w = weights(3, (32, 64))
    importance = np.where(np.arange(64) % 8 == 0, 1000.0, 1.0).astype(np.float32)
    spec = QuantSpec(4, 64, True)

    def weighted_error(scale):
        s = np.asarray(scale, np.float64)
        q = np.clip(np.round(w / s) + 8, 0, 15)
        return (importance * np.square((q - 8) * s - w)).sum()

    plain, _ = choose_grid(jnp.asarray(w), spec)
    weighted, _ = choose_grid(jnp.asarray(w), spec, importance=jnp.asarray(importance))
    assert weighted_error(weighted) < 0.95 * weighted_error(plain)


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_quantizer_gives_finite_weights_of_the_right_types(name, spec):
    w = weights(4)
    q = quantize(name, w, spec)
    assert (q.shape, q.spec, q.packed.dtype) == (w.shape, spec, jnp.uint8)
    assert q.scale.dtype == jnp.dtype(spec.scale_dtype)
    assert (q.zero is None) == spec.symmetric
    assert np.all(np.asarray(q.scale, np.float32) > 0)
    assert np.asarray(q.codes()).max() < spec.levels
    if q.zero is not None:
        assert q.zero.dtype == jnp.uint8
        assert np.asarray(q.zero).max() < spec.levels
    error = np.square(np.asarray(q.dequantize()) - w).sum() / np.square(w).sum()
    assert error < 0.04 * 4.0 ** (4 - spec.bits)


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_weights_that_lie_on_a_grid_come_back_unchanged(name, spec):
    once = np.asarray(quantize(name, weights(5), spec).dequantize())
    again = np.asarray(quantize(name, once, spec).dequantize())
    np.testing.assert_allclose(again, once, rtol=5e-7 if spec.scale_dtype == "float32" else 0)


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_groups_of_zeros_and_of_one_value_are_exact(name, spec):
    w = weights(6)
    w[0], w[1, :64], w[2], w[3] = 0.0, 0.0, 0.75, -0.75
    q = quantize(name, w, spec)
    got = np.asarray(q.dequantize())
    assert np.isfinite(np.asarray(q.scale, np.float32)).all()
    np.testing.assert_array_equal(got[[0, 2, 3]], w[[0, 2, 3]])
    np.testing.assert_array_equal(got[1, :64], 0.0)


@pytest.mark.parametrize("name", INTEGERS)
def test_a_broken_weight_or_a_group_that_does_not_fit_is_refused(name):
    w = weights(7)
    with pytest.raises(ArtifactError, match=r"128 inputs.*group_size = 96"):
        quantize(name, w, QuantSpec(4, 96))
    w[2, 3], w[4, 5] = np.nan, np.inf
    with pytest.raises(ArtifactError, match="2 of 768 weights are NaN or infinite"):
        quantize(name, w, QuantSpec(4, 32))


@pytest.mark.parametrize("spec", SPECS[:2], ids=str)
def test_stacked_layers_are_quantized_one_by_one(spec):
    w = weights(8, (3, 4, 64))
    stacked = rtn(w, spec)
    for i, layer in enumerate(w):
        np.testing.assert_array_equal(np.asarray(stacked.dequantize())[i], np.asarray(rtn(layer, spec).dequantize()))


@pytest.mark.parametrize("spec", SPECS[:2], ids=str)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 2))
def test_fake_quantization_has_the_value_of_rtn_and_the_gradient_of_its_input(spec, seed):
    w, upstream = weights(seed), weights(seed + 1)
    value, pull = jax.vjp(lambda w: fake_quantize(w, spec), jnp.asarray(w))
    np.testing.assert_array_equal(value, rtn(w, spec).dequantize())
    np.testing.assert_array_equal(pull(jnp.asarray(upstream))[0], upstream)


def test_tiny_and_huge_weights_keep_finite_scales():
    for size in (1e-30, 1e-7, 1e5, 1e30):
        for dtype in ("float16", "bfloat16"):
            q = rtn(weights(9, (2, 64), 1.0) * np.float32(size), QuantSpec(4, 64, False, dtype))
            assert np.isfinite(np.asarray(q.dequantize())).all()
