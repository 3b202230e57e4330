"""The model families against transformers' logits, and what must hold of a decoder whatever the family."""

import dataclasses
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.models import MODELS, decoder, read_config
from export.quantized import QuantizedTensor, QuantSpec, pack
from tests.goldens.make_models import LENGTH
from tests.tiny_models import EXEMPLARS, RECORDS, config_of, forward, golden, stacked_of, weights_of

TOLERANCE = 1e-4
families = pytest.mark.parametrize("case", EXEMPLARS.values())
extend = jax.jit(decoder.extend, static_argnums=0)

SPECS = {
    "dense": None,
    "int4": QuantSpec(bits=4, group_size=16),
    "int4 asymmetric": QuantSpec(bits=4, group_size=8, symmetric=False, scale_dtype="float32"),
    "int8": QuantSpec(bits=8, group_size=16),
}


def quantize(weight: np.ndarray, spec: QuantSpec | None) -> np.ndarray | QuantizedTensor:
    """The nearest codes with scales from the groups' ranges; good enough to tell specs apart."""
    if spec is None:
        return weight
    groups = weight.reshape(weight.shape[0], -1, spec.group_size)
    low, high = groups.min(-1), groups.max(-1)
    if spec.symmetric:
        scale, zero = 2 * np.maximum(-low, high) / (spec.levels - 1), np.full(low.shape, spec.levels // 2)
    else:
        scale = (high - low) / (spec.levels - 1)
        zero = np.clip(np.rint(-low / scale), 0, spec.levels - 1)
    codes = np.clip(np.rint(groups / scale[..., None]) + zero[..., None], 0, spec.levels - 1).astype(np.uint8)
    stored = scale.astype(jnp.dtype(spec.scale_dtype))
    return QuantizedTensor(
        pack(codes.reshape(weight.shape), spec.bits), stored, None if spec.symmetric else zero.astype(np.uint8), spec
    )


def quantized_weights(case: str, kinds: list[str]) -> dict:
    """The weights of a case with the linears of layer i quantized by SPECS[kinds[i]]."""
    weights = dict(weights_of(case))
    for name in decoder.linears(config_of(case)):
        weights[name] = quantize(weights[name], SPECS[kinds[int(name.split(".")[2])]])
    return weights


def test_goldens_show_every_family_with_tied_and_untied_heads():
    shown = {(record["config"]["model_type"], config_of(case).tie_word_embeddings) for case, record in RECORDS.items()}
    assert shown == set(itertools.product(MODELS, (True, False)))


def test_goldens_go_beyond_every_window_and_have_odd_head_sizes():
    configs = [config_of(case) for case in RECORDS]
    assert all(window is None or window < LENGTH for config in configs for window in config.windows)
    odd = {type(config) for config in configs if config.head_dim * config.num_attention_heads != config.hidden_size}
    assert len({type(config) for config in configs} - odd) <= 1  # Qwen 2's config has no head_dim.


@pytest.mark.parametrize("case", RECORDS)
def test_logits_are_those_of_transformers(case):
    tokens, expected = golden(case)
    assert expected.std() >= 1
    np.testing.assert_allclose(forward(config_of(case), stacked_of(case), tokens), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", RECORDS)
def test_old_and_new_styles_of_config_are_read_alike(case):
    # "written" is what transformers 5 makes of the config that the case was given in either style.
    assert "rope_parameters" in RECORDS[case]["written"]
    assert read_config(RECORDS[case]["written"]) == config_of(case)


@families
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_packed_documents_get_the_logits_of_each_alone(case, data):
    """Two documents a row, padding of any content before, between and after: each has transformers' logits."""
    originals, expected = golden(case)
    tokens = np.full((2, LENGTH), data.draw(st.integers(0, 95), label="padding"), np.int32)
    positions, segments = np.zeros((2, 2, LENGTH), np.int32)
    found = []
    for row, order in enumerate(((0, 1), (1, 0))):
        bounds = st.lists(st.integers(0, LENGTH), min_size=4, max_size=4)
        begin, end, later, last = sorted(data.draw(bounds, label="bounds"))
        for number, (which, at) in enumerate(zip(order, (slice(begin, end), slice(later, last))), 1):
            length = at.stop - at.start
            tokens[row, at], positions[row, at], segments[row, at] = (
                originals[which, :length],
                np.arange(length),
                number,
            )
            found.append((row, at, expected[which, :length]))
    got = np.asarray(forward(config_of(case), stacked_of(case), tokens, positions, segments))
    assert np.isfinite(got).all()
    for row, at, wanted in found:
        np.testing.assert_allclose(got[row, at], wanted, rtol=0, atol=TOLERANCE)


@families
@settings(max_examples=15, deadline=None)
@given(bounds=st.tuples(*[st.integers(0, LENGTH)] * 3), swap=st.booleans())
def test_branches_get_the_logits_of_each_alone(case, bounds, swap):
    """Of two rows: the trunk of one, its rest as a branch, then a branch that only goes on from the trunk."""
    originals, expected = golden(case)
    split, end, other = bounds
    split = min(split, end)
    source = originals[::-1] if swap else originals
    wanted = expected[::-1] if swap else expected
    tail = np.arange(split, max(split, other))
    row = np.concatenate([source[0, :end], source[1, tail]])
    positions = np.concatenate([np.arange(end), tail])
    branches = np.concatenate([np.arange(end) >= split, np.full(len(tail), 2)])
    alone = np.concatenate([source[0, :split], source[1, tail]])
    fill = lambda x, to=2 * LENGTH: np.pad(np.asarray(x, np.int32), (0, to - len(x)))[None]  # noqa: E731
    config, stacked = config_of(case), stacked_of(case)
    got = np.asarray(
        forward(config, stacked, fill(row), fill(positions), fill(np.ones(len(row))), branches=fill(branches))
    )[0]
    second = np.asarray(forward(config, stacked, fill(alone), segments=fill(np.ones(len(alone)))))[0]
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got[:end], wanted[0, :end], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(got[end : len(row)], second[split : len(alone)], rtol=0, atol=TOLERANCE)


CHUNKED = [(case, 3) for case in EXEMPLARS.values()] + [(EXEMPLARS["gemma3_text"], n) for n in (1, 8)]


@pytest.mark.parametrize(("case", "chunk"), CHUNKED)
def test_decoding_against_the_cache_gives_the_logits_of_the_whole(case, chunk):
    """Rows of unequal length, right-padded in the first call; then chunks, the last of them padded too."""
    config, stacked = config_of(case), stacked_of(case)
    originals, expected = golden(case)
    calls = [np.array([7, 4])] + [np.array([chunk, chunk])] * ((LENGTH - 7) // chunk) + [np.array([0, 1])]
    width = [max(7, chunk)] + [chunk] * (len(calls) - 1)
    cache = decoder.empty_cache(config, 2, sum(width))
    done = np.zeros(2, int)
    for lengths, columns in zip(calls, width):
        steps = np.arange(columns)
        real = steps < lengths[:, None]
        at = np.where(real, done[:, None] + steps, 0)
        tokens = np.where(real, np.take_along_axis(originals, at, axis=1), 5).astype(np.int32)
        hidden, cache = extend(config, stacked, cache, tokens, at.astype(np.int32), real.astype(np.int32))
        got = np.asarray(decoder.logits(config, stacked, hidden))
        for row in range(2):
            now = slice(done[row], done[row] + lengths[row])
            np.testing.assert_allclose(got[row, : lengths[row]], expected[row, now], rtol=0, atol=TOLERANCE)
        done += lengths
    assert done.min() > LENGTH - 7


@pytest.mark.parametrize(
    "kinds", [["dense"] * 4, ["int4", "int8", "int8", "int4"], ["int4", "int4 asymmetric", "dense", "dense"]]
)
def test_layers_are_stacked_by_runs_of_one_spec_and_unstacked_again(kinds):
    case = EXEMPLARS["qwen3"]
    weights = quantized_weights(case, kinds)
    stacked = decoder.stack(config_of(case), weights)
    assert [decoder.depth(segment) for segment in stacked.layers] == [
        len(list(run)) for _, run in itertools.groupby(kinds)
    ]
    again = decoder.unstack(config_of(case), stacked)
    assert jax.tree.structure(again) == jax.tree.structure(weights)
    jax.tree.map(partial(np.testing.assert_array_equal, strict=True), jax.tree.map(np.asarray, again), weights)


@pytest.mark.parametrize("case", ["gemma3", "qwen2-sliding"])  # a tied head and one of its own
def test_quantized_weights_count_as_what_they_dequantize_to(case):
    config = config_of(case)
    weights = quantized_weights(case, ["int4", "int4", "int4 asymmetric", "int4 asymmetric"])
    for name in {decoder.EMBEDDING, decoder.HEAD} & set(weights):
        weights[name] = quantize(weights[name], SPECS["int8"])
    plain = {n: w.dequantize() if isinstance(w, QuantizedTensor) else w for n, w in weights.items()}
    tokens, floats = golden(case)
    got, expected = (np.asarray(forward(config, decoder.stack(config, w), tokens)) for w in (weights, plain))
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)
    assert np.abs(got - floats).max() > 1e-2


def test_remat_changes_neither_values_nor_gradients():
    case = EXEMPLARS["gemma2"]
    config, tokens = config_of(case), jnp.asarray(golden(case)[0])

    @partial(jax.jit, static_argnums=1)
    @jax.value_and_grad
    def loss(stacked, remat):
        hidden = decoder.hidden_states(config, stacked, tokens, remat=remat)
        return jnp.mean(jax.nn.logsumexp(decoder.logits(config, stacked, hidden), axis=-1))

    (kept, kept_slopes), (again, again_slopes) = (loss(stacked_of(case), remat) for remat in (False, True))
    np.testing.assert_allclose(again, kept, rtol=1e-6)
    assert all(np.abs(slope).max() > 0 for slope in jax.tree.leaves(kept_slopes))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), again_slopes, kept_slopes)


def operations(config, layers: int, function) -> int:
    """Number of operations that `function(config, stacked)` lowers to for a model of this many layers."""
    deep = dataclasses.replace(config, num_hidden_layers=layers, layer_windows=(config.windows * layers)[:layers])
    weights = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in decoder.shapes(deep).items()}
    stacked = jax.eval_shape(partial(decoder.stack, deep), weights)
    return jax.jit(partial(function, deep)).lower(stacked).as_text().count(" = stablehlo.")


def train(config, stacked):
    def loss(stacked):
        hidden = decoder.hidden_states(config, stacked, jnp.zeros((1, LENGTH), jnp.int32), remat=True)
        return jnp.sum(decoder.logits(config, stacked, hidden))

    return jax.grad(loss)(stacked)


def decode(config, stacked):
    one = jnp.ones((1, 1), jnp.int32)
    return decoder.extend(config, stacked, decoder.empty_cache(config, 1, LENGTH), one, one, one)


@pytest.mark.parametrize(
    ("case", "function"), [(case, train) for case in EXEMPLARS.values()] + [(EXEMPLARS["gemma3_text"], decode)]
)
def test_thirty_layers_lower_to_the_program_of_two(case, function):
    few, many = (operations(config_of(case), layers, function) for layers in (2, 30))
    assert few > 50
    assert many == few


@pytest.mark.parametrize("case", ["qwen2", "gemma3"])
def test_fresh_weights_normalize_and_add_little_to_the_residual(case):
    config = config_of(case)
    weights = decoder.init(config, jax.random.key(3), jnp.bfloat16)
    assert {name: weight.shape for name, weight in weights.items()} == decoder.shapes(config)
    for name, weight in weights.items():
        values = np.asarray(weight, np.float32)
        if name.endswith("norm.weight"):
            assert (values + config.norm_offset == 1).all()
        elif values.ndim == 1:
            assert (values == 0).all()
        else:
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            np.testing.assert_allclose(values.std(), 0.02 / (8**0.5 if residual else 1), rtol=0.1)


def test_parts_of_a_model_combine_to_the_whole():
    case = EXEMPLARS["qwen2"]
    stacked = stacked_of(case)
    biases, others = decoder.partition(stacked, lambda name: name.endswith(".bias"))
    assert len(jax.tree.leaves(biases)) == 3
    assert not any(name.endswith(".bias") for segment in others.layers for name in segment)
    again = decoder.combine(biases, others)
    assert jax.tree.structure(again) == jax.tree.structure(stacked)
    jax.tree.map(np.testing.assert_array_equal, again, stacked)


def test_weights_are_split_into_layers_in_order_with_all_their_tensors():
    case = EXEMPLARS["qwen2"]
    weights = dict(reversed(weights_of(case).items()))
    rest, layers = decoder.split_layers(config_of(case), weights)
    for index, tensors in enumerate(layers):
        assert {name: tensor.shape for name, tensor in tensors.items()} == decoder.block_shapes(config_of(case))
        assert all(tensor is weights[f"model.layers.{index}.{name}"] for name, tensor in tensors.items())
    assert len(layers) == 4
    assert len(rest) + sum(map(len, layers)) == len(weights)
