"""Generation with a cache against the full forward pass, and sampling against NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.generate.decode import generate
from compress.generate.sampling import GREEDY, Sampling, keep_top_k, keep_top_p, sample
from compress.models import decoder
from tests import tiny_training as tiny
from tests.tiny_models import EXEMPLARS, config_of, forward, stacked_of

PROMPTS = [[5], [7, 3, 9, 11, 2], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [90, 17]]
NEW = 10


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    with tiny.unoptimized():
        yield


def run(prompts=PROMPTS, case=None, **options):
    config, stacked = (tiny.STUDENT, tiny.student()) if case is None else (config_of(case), stacked_of(case))
    return generate(config, stacked, prompts, **{"max_tokens": NEW, **options})


@pytest.fixture(scope="module")
def greedy():
    return run()


def likeliest(config, stacked, prompt, count, width=32):
    """Greedy continuation by a whole forward pass for each token, all of one width."""
    tokens = list(prompt)
    for _ in range(count):
        row = np.zeros((1, width), np.int32)
        row[0, : len(tokens)] = tokens
        segments = (np.arange(width)[None] < len(tokens)).astype(np.int32)
        positions = np.arange(width, dtype=np.int32)[None]
        tokens.append(int(forward(config, stacked, row, positions, segments)[0, len(tokens) - 1].argmax()))
    return tokens[len(prompt) :]


def test_greedy_takes_the_argmax_of_the_full_forward_pass(greedy):
    assert greedy == [likeliest(tiny.STUDENT, tiny.student(), prompt, NEW) for prompt in PROMPTS]
    assert len({tuple(row) for row in greedy}) == len(PROMPTS)


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3"])
def test_windows_hold_while_decoding(family):
    case = EXEMPLARS[family]
    config = config_of(case)
    prompt = PROMPTS[2]
    assert min(window for window in config.windows if window) < len(prompt)
    assert run([prompt], case) == [likeliest(config, stacked_of(case), prompt, NEW)]


def test_keys_and_values_in_8_bits_give_nearly_the_logits_of_floats_in_a_quarter_of_the_bytes():
    config, stacked = tiny.STUDENT, tiny.student()
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, tiny.VOCAB, (2, 12)).astype(np.int32)
    at = np.tile(np.arange(12, dtype=np.int32), (2, 1))

    extend = jax.jit(partial(decoder.extend, config))

    def decoded(dtype):
        cache, logits = decoder.empty_cache(config, 2, 12, dtype), []
        for part in (np.s_[:, :8], np.s_[:, 8:]):
            hidden, cache = extend(stacked, cache, tokens[part], at[part], np.ones_like(at[part]))
            logits.append(decoder.logits(config, stacked, hidden))
        return np.concatenate(logits, axis=1), cache.layers

    (exact, floats), (near, codes) = decoded(jnp.float32), decoded(jnp.int8)
    assert 0 < np.abs(near - exact).max() < 0.1 * exact.std()
    assert np.sqrt(np.square(near - exact).mean()) < 0.02 * exact.std()
    keys = np.asarray(floats.keys)
    step = np.abs(keys).max(-1, keepdims=True) / 127
    assert np.all(np.abs(np.asarray(codes.keys.codes * codes.keys.scales)[0] - keys[0]) <= step[0] * (0.5 + 1e-4))
    for slots, wide in ((codes.keys, floats.keys), (codes.values, floats.values)):
        assert slots.codes.nbytes == wide.nbytes / 4 and slots.scales.nbytes == wide.nbytes / config.head_dim


def test_generation_takes_a_cache_in_8_bits(greedy):
    found = run(int8_cache=True)
    assert [len(tokens) for tokens in found] == [NEW] * len(PROMPTS)
    assert [tokens[0] for tokens in found] == [tokens[0] for tokens in greedy]


def test_a_quantized_model_generates_as_its_dequantized_one():
    packed, dense = tiny.packed_weights(), {}
    for name, value in packed.items():
        dense[name] = value if isinstance(value, np.ndarray) else np.asarray(value.dequantize())
    one, two = (
        generate(tiny.STUDENT, decoder.stack(tiny.STUDENT, w), PROMPTS, max_tokens=NEW) for w in (packed, dense)
    )
    assert one == two


def test_prompts_of_unequal_length_do_not_disturb_one_another(greedy):
    assert [run([prompt])[0] for prompt in PROMPTS] == greedy


def test_a_longer_answer_begins_with_the_shorter(greedy):
    assert [row[:3] for row in greedy] == run(max_tokens=3)
    assert [len(row) for row in run(max_tokens=70)] == [70] * len(PROMPTS)


def test_a_row_ends_before_its_first_stop_token_and_others_go_on(greedy):
    stop = greedy[1][4]
    found = run(stop=[stop, 4_000])
    for ours, whole in zip(found, greedy):
        assert ours == (whole[: whole.index(stop)] if stop in whole else whole)
    assert len(found[1]) < NEW
    assert any(len(row) == NEW for row in found)


def test_a_prompt_without_a_token_is_refused():
    with pytest.raises(ValueError, match="no token"):
        run([[1], []])


def test_a_seed_gives_the_same_tokens_and_another_seed_others():
    warm = Sampling(temperature=1.5)
    one, again, other = (run(sampling=warm, seed=seed) for seed in (1, 1, 2))
    assert one == again
    assert one != other
    assert run(sampling=warm, seed=1, max_tokens=4) == [row[:4] for row in one]


def test_a_row_s_draw_depends_on_its_place_and_not_on_other_rows():
    warm = Sampling(temperature=1.5)
    same = run([[5], [5], [5]], sampling=warm)
    assert len({tuple(row) for row in same}) == 3
    assert run([[5], [7, 8, 9], [1, 2]], sampling=warm)[0] == same[0]


def test_one_candidate_is_greedy_at_any_temperature(greedy):
    assert run(sampling=Sampling(temperature=5.0, top_k=1)) == greedy
    assert run(sampling=Sampling(temperature=5.0, top_p=1e-6)) == greedy


rows = st.lists(st.lists(st.integers(-30, 30), min_size=9, max_size=9, unique=True), min_size=2, max_size=2).map(
    lambda drawn: np.array(drawn, np.float32) / 8
)
top_k = jax.jit(keep_top_k, static_argnums=1)


@settings(max_examples=40, deadline=None)
@given(logits=rows, k=st.sampled_from([1, 3, 9, 20]))
def test_top_k_keeps_the_k_largest(logits, k):
    threshold = np.sort(logits, axis=-1)[:, ::-1][:, min(k, 9) - 1, None]
    np.testing.assert_array_equal(top_k(logits, k), np.where(logits >= threshold, logits, -np.inf))


def test_top_k_keeps_all_that_tie_with_the_last():
    found = keep_top_k(jnp.array([[1.0, 3.0, 1.0, 0.0]]), 2)
    np.testing.assert_array_equal(np.isfinite(found), [[True, True, True, False]])


@settings(max_examples=80, deadline=None)
@given(logits=rows, p=st.floats(0.05, 0.999))
def test_top_p_keeps_the_fewest_likeliest_that_reach_p(logits, p):
    found = np.isfinite(keep_top_p(jnp.asarray(logits), p))
    probability = np.exp(tiny.numpy_log_softmax(logits))
    for kept, row in zip(found, probability):
        ranked = np.argsort(-row)
        count = kept.sum()
        assert kept[ranked[:count]].all()  # the likeliest
        assert count >= 1
        assert row[ranked[:count]].sum() >= p - 1e-5  # reach p
        assert count == 1 or row[ranked[: count - 1]].sum() < p + 1e-5  # and fewer would not
    np.testing.assert_array_equal(np.asarray(keep_top_p(jnp.asarray(logits), p))[found], logits[found])


def draw(logits, sampling, count=4000):
    """How often each token is drawn."""
    keys = jax.random.split(jax.random.key(0), count)
    drawn = sample(jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (count, len(logits))), sampling, keys)
    return np.bincount(drawn, minlength=len(logits)) / count


LOGITS = np.log([0.4, 0.3, 0.2, 0.1])


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (GREEDY, [1, 0, 0, 0]),
        (Sampling(temperature=1.0), [0.4, 0.3, 0.2, 0.1]),
        (Sampling(temperature=0.5), np.array([16, 9, 4, 1]) / 30),
        (Sampling(temperature=1.0, top_k=2), [4 / 7, 3 / 7, 0, 0]),
        (Sampling(temperature=1.0, top_p=0.75), [4 / 9, 3 / 9, 2 / 9, 0]),
        (Sampling(temperature=1.0, top_k=3, top_p=0.5), [4 / 7, 3 / 7, 0, 0]),
        # Temperature comes before top-p: at 0.5 the first token alone has 16/30.
        (Sampling(temperature=0.5, top_p=0.5), [1, 0, 0, 0]),
    ],
)
def test_tokens_are_drawn_by_their_probabilities(sampling, expected):
    found = draw(LOGITS, sampling)
    np.testing.assert_allclose(found, expected, atol=0.03)
    np.testing.assert_array_equal(found[np.asarray(expected) == 0], 0)
