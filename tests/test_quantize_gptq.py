"""GPTQ against its definition, and against rounding to nearest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compress.quantize.gptq import gptq, gram, round_in_order, solve
from compress.quantize.grid import choose_grid
from compress.quantize.rtn import rtn
from export.errors import ArtifactError
from export.quantized import QuantSpec

SPECS = [QuantSpec(4, 16, True), QuantSpec(4, 16, False), QuantSpec(8, 32, False, "float16")]


def problem(seed: int, outputs: int = 12, inputs: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Weights, and the Hessian of correlated inputs of unequal size."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(4 * inputs, inputs // 4)) @ rng.normal(size=(inputs // 4, inputs))
    x = (x + rng.normal(size=x.shape)) * np.exp(rng.normal(size=inputs))
    w = rng.normal(0, 0.05, (outputs, inputs))
    return w.astype(np.float32), (x.T @ x / len(x)).astype(np.float32)


def output_error(w, hessian, tensor) -> float:
    d = w.astype(np.float64) - np.asarray(tensor.dequantize(), np.float64)
    return float(np.trace(d @ hessian @ d.T) / np.trace(w @ hessian @ w.T))


def optimal_brain_quantization(w, hessian, order, spec, *, scale, zero, damp=0.01):
    """Section 3 of the paper as it stands: round an input, spread its error by H^-1, eliminate it from H^-1.

    Returns the dequantized weight, and w as it was when each input's turn came.
    """
    h = hessian.astype(np.float64) + damp * np.diag(hessian).mean() * np.eye(len(hessian))
    inverse, left = np.linalg.inv(h), w.astype(np.float64)
    rounded, seen = np.zeros_like(left), np.zeros_like(left)
    for j in order:
        g = j // spec.group_size
        s, z = scale[:, g].astype(np.float64), zero[:, g].astype(np.float64)
        seen[:, j] = left[:, j]
        rounded[:, j] = (np.clip(np.round(left[:, j] / s) + z, 0, spec.levels - 1) - z) * s
        left = left - np.outer((left[:, j] - rounded[:, j]) / inverse[j, j], inverse[j])
        inverse = inverse - np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
        inverse[j, j] = 1.0
    return rounded, seen


def zeros_of(tensor) -> np.ndarray:
    return np.full(tensor.scale.shape, tensor.spec.levels // 2) if tensor.zero is None else np.asarray(tensor.zero)


@pytest.mark.parametrize("act_order", ["static", "none"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_it_rounds_as_the_papers_definition_does(spec, act_order):
    for seed in range(3):
        w, hessian = problem(seed)
        tensor = gptq(w, hessian, spec, act_order=act_order)
        order = np.argsort(-np.diag(hessian), kind="stable") if act_order == "static" else np.arange(len(hessian))
        expected, _ = optimal_brain_quantization(
            w, hessian, order, spec, scale=np.asarray(tensor.scale), zero=zeros_of(tensor)
        )
        # A tie that float32 and float64 break differently changes the rest of its row, so rows are compared.
        same = np.all(np.abs(np.asarray(tensor.dequantize()) - expected) < 1e-5, axis=1)
        assert same.mean() >= (0.9 if spec.bits == 4 else 0.5)
        assert output_error(w, hessian, tensor) == pytest.approx(
            np.trace((w - expected) @ hessian @ (w - expected).T) / np.trace(w @ hessian @ w.T), rel=0.05
        )


@pytest.mark.parametrize("spec", SPECS[:2], ids=str)
def test_without_an_order_a_group_gets_its_grid_when_it_is_reached(spec):
    w, hessian = problem(3)
    tensor = gptq(w, hessian, spec, act_order="none")
    damped = hessian + 0.01 * np.diag(hessian).mean() * np.eye(len(hessian))
    cost = 1 / np.square(np.diag(np.linalg.cholesky(np.linalg.inv(damped.astype(np.float64))).T))
    rounded = np.asarray(tensor.dequantize(), np.float64)
    for g in range(w.shape[1] // spec.group_size):
        at = slice(g * spec.group_size, (g + 1) * spec.group_size)
        # Moving the later inputs to where they cost least, given the errors of the earlier ones.
        errors = w[:, : at.start] - rounded[:, : at.start]
        moved = w.astype(np.float64)
        rest = damped[at.start :, at.start :]
        moved[:, at.start :] += errors @ damped[: at.start, at.start :] @ np.linalg.inv(rest)
        scale, _ = choose_grid(
            jnp.asarray(moved[:, at], jnp.float32), spec, importance=jnp.asarray(cost[at], jnp.float32)
        )
        same = np.asarray(scale[:, 0], np.float32) == np.asarray(tensor.scale[:, g], np.float32)
        assert same.mean() >= 0.75


@pytest.mark.parametrize("act_order", ["static", "none"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_outputs_are_closer_than_rounding_to_nearest_leaves_them(spec, act_order):
    for seed in range(5):
        w, hessian = problem(seed, 16, 128)
        assert output_error(w, hessian, gptq(w, hessian, spec, act_order=act_order)) < 0.7 * output_error(
            w, hessian, rtn(w, spec)
        )


@pytest.mark.parametrize("act_order", ["static", "none"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_uncorrelated_inputs_of_one_size_make_it_round_to_nearest(spec, act_order):
    w, _ = problem(5)
    ours, nearest = gptq(w, np.eye(64, dtype=np.float32), spec, act_order=act_order), rtn(w, spec)
    np.testing.assert_array_equal(np.asarray(ours.codes()), np.asarray(nearest.codes()))
    np.testing.assert_array_equal(np.asarray(ours.dequantize()), np.asarray(nearest.dequantize()))


def test_an_input_that_is_always_zero_is_rounded_to_nearest_and_disturbs_no_other():
    w, hessian = problem(6)
    hessian[:, [3, 40]] = hessian[[3, 40], :] = 0.0
    solution = solve(w, hessian, SPECS[0])
    assert float(solution.damping) == pytest.approx(0.01)
    others = np.delete(np.arange(64), [3, 40])
    assert output_error(w, hessian, solution.tensor) < 0.7 * output_error(w, hessian, rtn(w, SPECS[0]))
    step = np.repeat(np.asarray(solution.tensor.scale, np.float32), 16, axis=1)
    error = np.abs(np.asarray(solution.tensor.dequantize()) - w)
    inside = np.abs(w) <= 7 * step
    assert np.all((error <= 0.5001 * step)[:, [3, 40]] | ~inside[:, [3, 40]])
    assert np.any((error > 0.51 * step)[:, others])
    nothing = gptq(w, np.zeros((64, 64), np.float32), SPECS[0])
    np.testing.assert_array_equal(np.asarray(nothing.codes()), np.asarray(rtn(w, SPECS[0]).codes()))


def test_damping_grows_until_there_is_a_factor_and_is_reported():
    w, hessian = problem(7)
    broken = hessian - 0.05 * np.diag(hessian).mean() * np.eye(64, dtype=np.float32)
    broken[np.arange(64), np.arange(64)] = np.maximum(np.diag(broken), 1e-3)
    solution = solve(w, broken, SPECS[0])
    assert float(solution.damping) > 0.05
    assert np.isfinite(np.asarray(solution.tensor.dequantize())).all()
    far = np.ones((64, 64), np.float32) * -1e9 + 2e9 * np.eye(64, dtype=np.float32) * 1e-6
    with pytest.raises(ArtifactError, match="no Cholesky factor"):
        gptq(w, far, SPECS[0], damp=1e-12)


def test_a_broken_hessian_or_an_unknown_order_is_refused():
    w, hessian = problem(8)
    with pytest.raises(ArtifactError, match="act_order = 'desc'"):
        gptq(w, hessian, SPECS[0], act_order="desc")
    hessian[2, 2] = np.inf
    with pytest.raises(ArtifactError, match="activations are NaN or infinite"):
        gptq(w, hessian, SPECS[0])


def test_the_reported_error_is_that_of_the_outputs():
    w, hessian = problem(9)
    solution = solve(w, hessian, SPECS[1])
    assert float(solution.error) == pytest.approx(output_error(w, hessian, solution.tensor), rel=1e-3)


def test_stacked_layers_are_solved_one_by_one():
    pairs = [problem(seed) for seed in (10, 11)]
    w, hessian = (jnp.stack([pair[i] for pair in pairs]) for i in (0, 1))
    together = jax.vmap(lambda w, h: round_in_order(w, h, 0.01, SPECS[1], "static", 8).tensor)(w, hessian)
    for i, pair in enumerate(pairs):
        alone = gptq(*pair, SPECS[1], clip_steps=8)
        same = np.asarray(together.codes()[i]) == np.asarray(alone.codes())
        assert same.mean() > 0.99


def test_masked_tokens_never_reach_the_hessian():
    rng = np.random.default_rng(12)
    x = rng.normal(size=(10, 6)).astype(np.float32)
    mask = rng.random(10) < 0.5
    kept = x[mask]
    x[~mask] = np.nan
    got = gram(jnp.asarray(x), jnp.asarray(mask))
    np.testing.assert_allclose(np.asarray(got), kept.T @ kept, rtol=1e-5)
