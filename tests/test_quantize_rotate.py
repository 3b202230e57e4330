"""Rotations leave every family's logits as they were, and what is rotated can be written and read again."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.errors import RecipeError
from compress.models import MODELS, read_config
from compress.models.decoder import EMBEDDING, FINAL_NORM, HEAD, stack
from compress.models.folder import Model, load, save
from compress.quantize.rotate import hadamard, orthogonal, require_rotation, rotate, rotated
from tests.tiny_models import EXEMPLARS, config_of, forward, golden, weights_of
from tests.tiny_run import CONFIG, tokenizer_files, weights

POST_NORMED = ("gemma2", "gemma3_text")


def normed(case: str) -> dict[str, np.ndarray]:
    """Weights whose norms are far from one."""
    rng = np.random.default_rng(1)
    norms = {name: value for name, value in weights_of(case).items() if name.endswith("norm.weight")}
    return weights_of(case) | {
        name: value * np.exp(rng.normal(0, 1, value.shape)).astype(np.float32) for name, value in norms.items()
    }


@pytest.mark.parametrize("mode", ["value", "full"])
@pytest.mark.parametrize("family", MODELS)
def test_logits_stay_as_they_were(family, mode):
    case = EXEMPLARS[family]
    config, given_weights = config_of(case), normed(case)
    if mode == "full" and family in POST_NORMED:
        with pytest.raises(RecipeError, match=r"before it adds to the residual stream.*\"value\" is exact"):
            require_rotation(config, mode)
        return
    tokens, _ = golden(case)
    before = forward(config, stack(config, given_weights), jnp.asarray(tokens))
    model = rotated(Model({}, config, given_weights, {}), mode, seed=3)
    after = forward(model.config, stack(model.config, model.weights), jnp.asarray(tokens))
    np.testing.assert_allclose(after, before, rtol=1e-3, atol=2e-3 * float(np.abs(before).max()))
    moved = {name for name, value in model.weights.items() if not np.array_equal(value, given_weights.get(name))}
    assert {"model.layers.0.self_attn.v_proj.weight", "model.layers.0.self_attn.o_proj.weight"} <= moved
    assert (EMBEDDING in moved) is (mode == "full")
    if mode == "full":
        np.testing.assert_array_equal(model.weights[FINAL_NORM], 1.0)
        assert HEAD in model.weights


def test_without_a_mode_nothing_moves_and_the_seed_decides_the_rotation():
    case = EXEMPLARS["llama"]
    same = rotate(config_of(case), weights_of(case), "none")
    assert all(np.array_equal(same[name], value) for name, value in weights_of(case).items())
    one, again, other = (rotate(config_of(case), weights_of(case), "full", seed)[EMBEDDING] for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, other)


@pytest.mark.parametrize("size", [1, 2, 8, 12, 20, 28, 36, 64, 192, 576, 896])
def test_hadamard_matrices_have_orthogonal_rows_of_one_and_minus_one(size):
    matrix = hadamard(size)
    np.testing.assert_array_equal(np.abs(matrix), 1)
    np.testing.assert_array_equal(matrix @ matrix.T, size * np.eye(size))


@settings(max_examples=20, deadline=None)
@given(size=st.integers(2, 70), seed=st.integers(0, 2**32 - 1))
def test_every_size_has_a_rotation_which_spreads_a_channel_where_a_hadamard_matrix_is_known(size, seed):
    matrix = orthogonal(size, np.random.default_rng(seed))
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=1e-5)
    if hadamard(size) is not None:
        np.testing.assert_allclose(np.abs(matrix), size**-0.5, rtol=1e-6)


def test_an_untied_model_is_written_and_read_again(tmp_path):
    case = dict(CONFIG, num_hidden_layers=1)
    files = tokenizer_files()
    model = Model(case, read_config(case), weights(case), files)
    turned = rotated(model, "full")
    (tmp_path / "turned").mkdir()
    save(turned, tmp_path / "turned")
    assert json.loads((tmp_path / "turned/config.json").read_text())["tie_word_embeddings"] is False
    again = load(tmp_path / "turned")
    assert not again.config.tie_word_embeddings
    np.testing.assert_allclose(again.weights[HEAD], turned.weights[HEAD], rtol=2**-8)
    tokens = jnp.arange(12)[None]
    before = forward(model.config, stack(model.config, model.weights), tokens)
    after = forward(again.config, stack(again.config, again.weights), tokens)
    assert float(jnp.abs(after - before).max()) < 0.05 * float(jnp.abs(before).max())
    assert dataclasses.replace(again.config, tie_word_embeddings=True) == model.config
