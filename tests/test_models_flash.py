"""Kernels that never hold the scores: which one takes what, that they lower for their platform, and the numbers."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compress.models import decoder, flash
from compress.models.attention import attend, visible
from compress.train.mesh import make_mesh, on_mesh, place, place_rows
from tests import tiny_training as tiny

TIME, SCALE = 128, 0.3
INTERPRETED = {"splash": partial(flash.splash, interpret=True)}


def rows(count: int):
    """Segments and positions of packed rows that end in padding."""
    segments = np.tile(np.repeat([1, 2, 3, 0], [40, 1, 70, TIME - 111]).astype(np.int32), (count, 1))
    positions = np.tile(np.r_[0:40, 0:1, 0:70, np.zeros(TIME - 111)].astype(np.int32), (count, 1))
    return segments, positions


def arrays(dtype, heads=4, kv_heads=2, head_dim=16):
    draw = np.random.default_rng(0)
    return [jnp.asarray(draw.normal(size=(2, TIME, n, head_dim)), dtype) for n in (heads, kv_heads, kv_heads)]


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_splash_kernel_attends_as_the_common_way_does_with_its_gradients(softcap):
    segments, positions = rows(2)
    mask = visible(positions, segments, positions, segments)

    def common(q, k, v):
        return attend(q, k, v, mask, SCALE, softcap)

    def splash(q, k, v):
        return INTERPRETED["splash"](q, k, v, mask, jnp.asarray(segments), scale=SCALE, softcap=softcap)

    def of(attention):
        seen = lambda *qkv: (jnp.sin(attention(*qkv)) * (segments > 0)[..., None, None]).sum()  # noqa: E731
        return jax.jit(jax.value_and_grad(seen, argnums=(0, 1, 2)))(*arrays(jnp.float32))

    (value, slopes), (expected, expected_slopes) = of(splash), of(common)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), slopes, expected_slopes)


TAKEN = {"time": 512, "head_dim": 64, "softcap": None, "packed": True}


@pytest.mark.parametrize(
    ("device", "changes", "kernel"),
    [
        (("cpu", 0), {}, None),
        (("tpu", 0), {}, "splash"),
        (("tpu", 0), {"softcap": 50.0}, "splash"),
        (("tpu", 0), {"packed": False}, None),
        (("tpu", 0), {"time": 500}, None),
        (("gpu", 8), {}, "cudnn"),
        (("gpu", 8), {"packed": False, "time": 500}, "cudnn"),
        (("gpu", 8), {"softcap": 50.0}, None),
        (("gpu", 8), {"time": 511}, None),
        (("gpu", 8), {"head_dim": 256}, None),
        (("gpu", 9), {"head_dim": 256}, "cudnn"),
        (("gpu", 9), {"head_dim": 60}, None),
        (("gpu", 7), {}, None),
        (("gpu", 0), {}, None),  # not NVIDIA's
    ],
    ids=str,
)
def test_the_platform_and_the_shapes_choose_the_kernel(device, changes, kernel):
    assert flash.kernel_for(*device, jnp.bfloat16, **TAKEN | changes) == kernel
    assert flash.kernel_for(*device, jnp.float32, **TAKEN | changes) is None


def model(dtype=jnp.bfloat16, **changes):
    """A tiny model, and the sum of its hidden states with gradients, as a function of weights and rows."""
    config = dataclasses.replace(tiny.STUDENT, **changes)
    weights = {name: value for name, value in tiny.student_weights().items() if name in decoder.shapes(config)}
    stacked = jax.tree.map(lambda leaf: leaf.astype(dtype), decoder.stack(config, weights))

    def loss(stacked, tokens, segments, positions, branches=None):
        view = {"segments": segments, "positions": positions, "branches": branches}
        hidden = decoder.hidden_states(config, stacked, tokens, **view).astype(jnp.float32)
        return (jnp.sin(hidden) * (segments > 0)[..., None]).sum()

    return jax.value_and_grad(loss), stacked


def lowered(platform: str, branches=None, **changes) -> str:
    loss, stacked = model(**changes)
    segments, positions = rows(2)
    traced = jax.jit(loss).trace(stacked, np.zeros((2, TIME), np.int32), segments, positions, branches)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def holds_scores(program: str) -> bool:
    """Whether float32 scores of all heads and pairs of a row are among a program's values."""
    heads, kv_heads = tiny.STUDENT.num_attention_heads, tiny.STUDENT.num_key_value_heads
    return bool(re.search(rf"tensor<2x{kv_heads}x{heads // kv_heads}x{TIME}x{TIME}xf32>", program))


def test_models_lower_to_the_kernels_of_a_tpu_and_a_gpu_and_hold_no_scores(monkeypatch):
    assert holds_scores(lowered("tpu"))
    monkeypatch.setattr(flash, "device_kind", lambda: ("tpu", 0))
    assert "tpu_custom_call" in lowered("tpu")
    assert not holds_scores(lowered("tpu"))
    for unlike in ({"branches": np.zeros((2, TIME), np.int32)}, {"layer_windows": (8, None)}):
        assert holds_scores(lowered("tpu", **unlike))
    # No cuDNN is here to ask for its version.
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(flash, "device_kind", lambda: ("gpu", 9))
    for any_mask in ({}, {"branches": np.zeros((2, TIME), np.int32)}, {"layer_windows": (8, None)}):
        program = lowered("cuda", **any_mask)
        assert "fmhaScaleBiasSoftmaxBackward" in program
        assert not holds_scores(program)
    assert holds_scores(lowered("cuda", dtype=jnp.float32))


@pytest.mark.parametrize("shape", [(2, 2, 2), (2, 1, 4)], ids=str)
def test_on_a_mesh_a_kernel_sees_a_devices_own_rows_and_heads(shape, monkeypatch):
    loss, stacked = model(num_hidden_layers=1)
    segments, positions = rows(4)
    tokens = np.random.default_rng(1).integers(0, tiny.VOCAB, segments.shape).astype(np.int32)
    expected, expected_slopes = jax.jit(loss)(stacked, tokens, segments, positions)
    monkeypatch.setattr(flash, "device_kind", lambda: ("tpu", 0))
    monkeypatch.setattr(flash, "KERNELS", INTERPRETED)
    mesh = make_mesh(*shape)
    batch = place_rows(mesh, (tokens, segments, positions))
    with tiny.unoptimized():
        value, slopes = jax.jit(on_mesh(mesh, loss))(place(mesh, stacked), *batch)
    np.testing.assert_allclose(value, expected, rtol=1e-2)
    for ours, theirs in zip(jax.tree.leaves(slopes), jax.tree.leaves(expected_slopes), strict=True):
        ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
        assert np.linalg.norm(ours - theirs) < 0.03 * np.linalg.norm(theirs)
