"""NF4 and its scales against their definitions, and as a base in memory."""

import math
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.artifact import require_form
from compress.errors import RecipeError
from compress.models import read_config
from compress.models.folder import Model
from compress.models.linear import product
from compress.quantize.base import packed_base
from compress.quantize.nf4 import SPEC, nf4
from compress.quantize.preflight import check_settings
from compress.quantize.quantizers import QUANTIZERS
from compress.quantize.rtn import rtn
from compress.quantize.settings import Quantize
from export.errors import ArtifactError
from export.quantized import NF4_LEVELS, SCALE_LEVELS, NF4Tensor, QuantSpec, unpack
from tests.tiny_run import CONFIG
from tests.tiny_run import weights as drawn

# arXiv:2305.14314, appendix E.
PUBLISHED = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]
LEVELS, SCALES = NF4_LEVELS.astype(np.float64), SCALE_LEVELS.astype(np.float64)


def weights(seed: int, shape=(6, 128), scale=0.05) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)


def scales_by_definition(w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The blocks' exact scales, these once they are quantized to the nearest of 256 levels, and how far they may be."""
    exact = np.abs(w.astype(np.float64)).reshape(len(w), -1, 64).max(-1)
    distance = (exact - exact.mean()).reshape(-1)
    found, bound = np.empty_like(distance), np.empty_like(distance)
    for first in range(0, len(distance), 256):
        block = distance[first : first + 256]
        largest = np.abs(block).max()
        near = np.abs(block[:, None] / (largest or 1) - SCALES).argmin(1)
        found[first : first + 256] = SCALES[near] * largest + exact.mean()
        bound[first : first + 256] = np.diff(SCALES).max() / 2 * largest
    return exact, found.reshape(exact.shape), bound.reshape(exact.shape)


def test_the_levels_are_those_of_the_paper_and_equally_likely_under_a_normal():
    np.testing.assert_allclose(NF4_LEVELS, PUBLISHED, rtol=0, atol=2e-7)
    assert (NF4_LEVELS[0], NF4_LEVELS[7], NF4_LEVELS[15]) == (-1, 0, 1)
    outermost = 1.848131  # in standard deviations, where the tail holds (1/30 + 1/32) / 2 of the mass
    mass = np.array([(1 + math.erf(level * outermost / math.sqrt(2))) / 2 for level in LEVELS])
    assert mass[0] == pytest.approx((1 / 30 + 1 / 32) / 2, rel=1e-5)
    np.testing.assert_allclose(np.diff(mass[:8]), (0.5 - mass[0]) / 7, rtol=1e-5)
    np.testing.assert_allclose(np.diff(mass[7:]), (0.5 - mass[0]) / 8, rtol=1e-5)


def test_the_levels_of_scales_double_from_decade_to_decade():
    assert SCALE_LEVELS.shape == (256,) and np.all(np.diff(SCALE_LEVELS) > 0)
    np.testing.assert_array_equal(SCALE_LEVELS[:127], -SCALE_LEVELS[254:127:-1])
    assert (SCALE_LEVELS[127], SCALE_LEVELS[255]) == (0, 1)
    for decade in range(7):
        inside = SCALES[(10.0 ** (decade - 7) < SCALES) & (10.0 ** (decade - 6) > SCALES)]
        assert len(inside) == 2**decade
        step = 0.9 * 10.0 ** (decade - 6) / 2**decade
        np.testing.assert_allclose(inside, 10.0 ** (decade - 7) + step * (np.arange(2**decade) + 0.5), rtol=1e-6)


@pytest.mark.parametrize("shape", [(6, 128), (5, 64), (40, 640)], ids=str)
def test_codes_are_the_nearest_on_scales_that_are_the_nearest(shape):
    w = weights(0, shape)
    q = nf4(w)
    exact, scales, bound = scales_by_definition(w)
    assert (q.shape, q.ndim, q.packed.dtype, q.scale.dtype) == (shape, 2, jnp.uint8, jnp.uint8)
    assert q.nested.shape == (-(-exact.size // 256),)
    blocks = w.astype(np.float64).reshape(*exact.shape, 64)
    wanted = LEVELS[np.abs(blocks[..., None] / scales[..., None, None] - LEVELS).argmin(-1)] * scales[..., None]
    np.testing.assert_allclose(q.dequantize(), wanted.reshape(shape), rtol=1e-5, atol=1e-7)
    assert np.all(np.abs(scales - exact) <= bound * (1 + 1e-6))
    assert np.square(scales - exact).sum() < 1e-4 * np.square(exact).sum()


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), log_scale=st.floats(-20, 20), tail=st.floats(1, 30))
def test_no_weight_is_further_off_than_half_a_gap_and_what_its_scale_is_off(seed, log_scale, tail):
    rng = np.random.default_rng(seed)
    w = (rng.standard_t(tail, (6, 128)) * 10.0**log_scale).astype(np.float32)
    q = jax.tree.map(np.asarray, nf4(w))
    got = q.dequantize(np.float32)
    assert np.isfinite(got).all()
    exact, scales, _ = scales_by_definition(w)
    room = np.diff(LEVELS).max() / 2 * np.abs(scales) + np.maximum(exact - np.abs(scales), 0)
    assert np.all(np.abs(got - w).reshape(6, 2, 64) <= room[..., None] * (1 + 1e-4) + 1e-4 * exact.max())


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_what_was_quantized_once_gets_the_same_codes_again(seed):
    once = nf4(weights(seed))
    again = nf4(once.dequantize())
    np.testing.assert_array_equal(again.codes(), once.codes())
    # Only the mean that the scales are told from moves, and then they are rounded anew: by half a gap of their levels.
    room = np.diff(SCALE_LEVELS).max() / 2 * float(again.nested.max())
    np.testing.assert_allclose(again.dequantize(), once.dequantize(), rtol=1e-5, atol=1.001 * room)


def test_numpy_jax_and_stacked_layers_agree():
    layers = [nf4(weights(seed)) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    assert isinstance(stacked, NF4Tensor) and stacked.shape == (3, 6, 128)
    assert stacked.nbytes == sum(layer.nbytes for layer in layers)
    for layer, one in zip(layers, np.asarray(jax.jit(NF4Tensor.dequantize)(stacked))):
        np.testing.assert_allclose(jax.tree.map(np.asarray, layer).dequantize(np.float32), one, rtol=1e-6)
        np.testing.assert_array_equal(NF4_LEVELS[unpack(np.asarray(layer.packed), 4)] == 0, one == 0)


def test_weights_of_one_size_and_zeros_are_exact():
    w = np.full((4, 128), 0.75, np.float32)
    w[::2] *= -1
    np.testing.assert_array_equal(nf4(w).dequantize(), w)
    assert not np.asarray(nf4(np.zeros((4, 64), np.float32)).dequantize()).any()


def test_a_broken_weight_or_a_row_of_no_whole_blocks_is_refused():
    with pytest.raises(ArtifactError, match=r"96 inputs.*group_size = 64"):
        nf4(weights(0, (4, 96)))
    w = weights(0)
    w[2, 3], w[4, 5] = np.nan, np.inf
    with pytest.raises(ArtifactError, match="2 of 768 weights are NaN or infinite"):
        nf4(w)


def test_it_takes_fewer_bits_than_integers_in_the_same_groups_and_loses_less_of_a_normal():
    w = weights(0, (256, 512))
    q, integers = QUANTIZERS["nf4"].quantize(w, QuantSpec()), rtn(w, QuantSpec(4, 64))
    error = lambda tensor: np.square(np.asarray(tensor.dequantize()) - w).sum() / np.square(w).sum()  # noqa: E731
    assert q.nbytes < integers.nbytes and error(q) < error(integers)
    assert 8 * q.nbytes / w.size == pytest.approx(4 + 8 / 64 + 32 / (64 * 256) + 32 / w.size)


def test_a_product_with_it_is_that_of_its_dense_weight_and_it_gets_no_gradient():
    q, x = nf4(weights(0)), jnp.asarray(weights(1, (3, 128)))
    dense = q.dequantize()
    np.testing.assert_allclose(product(x, q), x @ dense.T, rtol=1e-5, atol=1e-6)
    loss = lambda x, w: jnp.square(product(x, w)).sum()  # noqa: E731
    dx, dq = jax.grad(loss, (0, 1), allow_int=True)(x, q)
    np.testing.assert_allclose(dx, jax.grad(loss)(x, dense), rtol=1e-5, atol=1e-6)
    assert not any(np.asarray(leaf, np.float32).any() for leaf in (dq.nested, dq.mean))


@pytest.mark.parametrize(
    ("is_nf4", "name", "gguf_type", "said"),
    [
        (True, "compressed-tensors", "auto", "compressed-tensors: it has no NF4.*quantize --method gptq"),
        (True, "gguf", "auto", "gguf: it has no NF4"),
        (True, "gguf", "Q4_0", "gguf: it has no NF4"),
        (True, "orbax", "auto", "orbax: it has no NF4"),
        (False, "bitsandbytes", "auto", "not in NF4: compress quantize --method nf4"),
        (True, "bitsandbytes", "auto", None),
        (True, "safetensors", "auto", None),
        (True, "gguf", "F16", None),
        (False, "gguf", "Q4_0", None),
    ],
)
def test_it_is_written_as_itself_or_in_floats(is_nf4, name, gguf_type, said):
    with nullcontext() if said is None else pytest.raises(RecipeError, match=said):
        require_form(is_nf4, name, gguf_type, "model")


@pytest.mark.parametrize(
    "other", [{"bits": 8}, {"group_size": 32}, {"symmetric": False}, {"embedding_bits": 8}, {"fallback_group_size": 32}]
)
def test_it_has_no_other_form(other):
    with pytest.raises(RecipeError, match="nf4"):
        Quantize(method="nf4", **other)


def test_rows_of_no_whole_blocks_are_refused_early_and_no_other_block_is_offered():
    config, said = read_config(CONFIG), "I = 96.*nf4 has no other blocks; with rtn --group-size 32 fits"
    with pytest.raises(RecipeError, match=said):
        check_settings(Quantize(method="nf4"), config)
    with pytest.raises(RecipeError, match=said):
        packed_base(Model(CONFIG, config, drawn(), {}), SPEC, "nf4")
