"""Products with packed weights: which path takes what, that kernels lower for their platform, and the numbers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.models import quantized_matmul as paths
from compress.models.linear import product
from compress.models.quantized_matmul import PATHS, dequantized, path_for, quantized_matmul
from compress.train.mesh import make_mesh, on_mesh
from export.quantized import QuantizedTensor, QuantSpec, pack

INTERPRETED = {name: PATHS[name] if name == "blocks" else partial(PATHS[name], interpret=True) for name in PATHS}
SPECS = [QuantSpec(bits, size, symmetric) for bits, size, symmetric in ((4, 32, True), (4, 64, False), (8, 32, False))]


def drawn(seed: int, rows: int, outputs: int, inputs: int, spec: QuantSpec, dtype) -> tuple[jax.Array, QuantizedTensor]:
    draw = np.random.default_rng(seed)
    groups = (outputs, inputs // spec.group_size)
    codes = draw.integers(0, spec.levels, (outputs, inputs), np.uint8)
    zero = None if spec.symmetric else draw.integers(0, spec.levels, groups, np.uint8)
    scale = (draw.uniform(0.5, 1, groups) / spec.levels).astype(jnp.bfloat16)
    weight = QuantizedTensor(pack(codes, spec.bits), scale, zero, spec)
    return jnp.asarray(draw.normal(size=(rows, inputs)), dtype), jax.tree.map(jnp.asarray, weight)


def by_definition(x: jax.Array, weight: QuantizedTensor) -> np.ndarray:
    """The product in float64, with the weight rounded to the dtype of x as the multipliers have it."""
    return np.asarray(x, np.float64) @ np.asarray(weight.dequantize(x.dtype), np.float64).T


@pytest.mark.parametrize("name", PATHS)
@settings(max_examples=5, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.sampled_from([1, 70]),
    outputs=st.sampled_from([16, 272]),
    groups=st.sampled_from([1, 5]),
    spec=st.builds(QuantSpec, bits=st.sampled_from([4, 8]), group_size=st.sampled_from([32, 64]), symmetric=...),
    in_bfloat16=st.booleans(),
)
def test_every_path_multiplies_with_the_weights_that_the_codes_stand_for(
    name, seed, rows, outputs, groups, spec, in_bfloat16
):
    dtype = jnp.bfloat16 if in_bfloat16 else jnp.float32
    x, weight = drawn(seed, rows, outputs, groups * spec.group_size, spec, dtype)
    found, want = (
        np.asarray(INTERPRETED[name](x, weight), np.float64),
        by_definition(x, weight),
    )
    assert found.shape == want.shape
    # Half a unit of the result's last place, and on a CPU one for each half of the sum.
    np.testing.assert_allclose(found, want, rtol=0, atol=(2**-7 if in_bfloat16 else 1e-5) * np.abs(want).max())


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_more_bytes_than_a_tpu_takes_at_once_are_summed(spec):
    x, weight = drawn(0, 5, 24, 1536, spec, jnp.bfloat16)
    want = by_definition(x, weight)
    np.testing.assert_allclose(INTERPRETED["tpu"](x, weight), want, rtol=0, atol=2**-8 * np.abs(want).max())


def test_cpu_blocks_that_do_not_divide_the_outputs_are_whole(monkeypatch):
    monkeypatch.setattr(paths, "CHUNK", 7 * 128)
    x, weight = drawn(0, 5, 24, 128, SPECS[0], jnp.float32)
    np.testing.assert_allclose(PATHS["blocks"](x, weight), by_definition(x, weight), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("spec", "rows"), [(SPECS[0], 2), (SPECS[1], 200), (SPECS[2], 2)], ids=str)
def test_the_gradient_is_that_of_the_dequantized_product_and_the_weight_is_a_constant(spec, rows):
    x, weight = drawn(0, rows, 24, 128, spec, jnp.float32)
    loss = lambda path: lambda x, weight: jnp.sin(path(x, weight)).sum()  # noqa: E731
    value, (dx, d_weight) = jax.value_and_grad(loss(product), (0, 1), allow_int=True)(x, weight)
    expected, d_expected = jax.value_and_grad(loss(dequantized))(x, weight)
    np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(dx, d_expected, rtol=1e-3, atol=1e-4 * np.abs(d_expected).max())
    assert not np.asarray(d_weight.scale, np.float32).any()


def test_leading_axes_stay():
    x, weight = drawn(0, 6, 24, 128, SPECS[0], jnp.float32)
    found = quantized_matmul(x.reshape(2, 3, 128), weight)
    assert found.shape == (2, 3, 24)
    np.testing.assert_allclose(found.reshape(6, 24), by_definition(x, weight), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("device", "changes", "path"),
    [
        (("cpu", 0), {"dtype": jnp.float32}, "blocks"),
        (("cpu", 0), {"rows": 129}, None),
        (("cpu", 0), {"spec": QuantSpec(8)}, None),
        (("tpu", 0), {}, "tpu"),
        (("tpu", 0), {"spec": QuantSpec(8, symmetric=False)}, "tpu"),
        (("tpu", 0), {"dtype": jnp.float32}, None),
        (("tpu", 0), {"rows": 257}, None),
        (("tpu", 0), {"spec": QuantSpec(scale_dtype="float16")}, None),
        (("gpu", 8), {}, "gpu"),
        (("gpu", 9), {"rows": 256}, "gpu"),
        (("gpu", 9), {"rows": 257}, None),
        (("gpu", 9), {"dtype": jnp.float32}, None),
        (("gpu", 9), {"spec": QuantSpec(4, 96)}, None),
        (("gpu", 9), {"spec": QuantSpec(4, 16)}, None),
        (("gpu", 9), {"shape": (4095, 4096)}, None),
        (("gpu", 7), {}, None),
        (("gpu", 0), {}, None),  # not NVIDIA's
    ],
    ids=str,
)
def test_the_platform_the_shapes_and_the_dtype_choose_the_path(device, changes, path):
    taken = {"dtype": jnp.bfloat16, "rows": 16, "shape": (4096, 4096), "spec": QuantSpec(4, 64)}
    assert path_for(*device, **taken | changes) == path


@pytest.mark.parametrize(
    ("device", "platform", "call"), [(("gpu", 9), "cuda", "triton"), (("tpu", 0), "tpu", "tpu_custom_call")], ids=str
)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_products_lower_to_the_kernels_of_a_gpu_and_a_tpu_and_hold_no_weight(device, platform, call, spec, monkeypatch):
    x, weight = drawn(0, 5, 48, 1536, spec, jnp.bfloat16)
    monkeypatch.setattr(paths, "device_kind", lambda: device)

    def lowered(x) -> str:
        # Another function each time: jit keeps what it has traced by the function.
        traced = jax.jit(partial(paths.multiply)).trace(x, weight)
        return traced.lower(lowering_platforms=(platform,)).as_text()

    assert call in lowered(x) and "48x1536xbf16" not in lowered(x)
    assert call not in lowered(x.astype(jnp.float32))


def test_on_a_mesh_the_compiler_is_left_to_split_the_product(monkeypatch):
    x, weight = drawn(0, 4, 24, 128, SPECS[0], jnp.float32)
    monkeypatch.setattr(paths, "PATHS", {})
    mesh = make_mesh(jax.device_count(), 1, 1)
    np.testing.assert_allclose(
        jax.jit(on_mesh(mesh, quantized_matmul))(x, weight), by_definition(x, weight), rtol=1e-5, atol=1e-4
    )
