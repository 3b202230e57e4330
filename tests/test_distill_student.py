"""Students cut by importance and by width: what is kept, and that what does not matter can go without a trace."""

import dataclasses
import json
from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from compress.data.split import training_and_held_out
from compress.distill import stage
from compress.distill.importance import IMPORTANCES, Seen, important_layers, measure, most_important
from compress.distill.prune import cut_layers
from compress.distill.settings import Distill
from compress.distill.student import initial_student, make_student, student_architecture
from compress.errors import DataError, RecipeError
from compress.models import decoder, read_config
from compress.models.folder import Model, load
from compress.preflight import preflight
from compress.quantize.settings import Quantize
from compress.settings import Common, Data
from compress.train.trace import Trace
from tests import tiny_run
from tests import tiny_training as tiny
from tests.tiny_models import EXEMPLARS, RECORDS, config_of, forward, weights_of

LIVE_LAYERS, LIVE = [0, 2, 3], {"hidden": 40, "ffn": 60, "kv_heads": 1}
EVERYTHING = "cut:layers=3@importance,hidden=40,ffn=60,kv_heads=1"


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    with tiny.unoptimized():
        yield


def model(case="llama-biased"):
    return Model(RECORDS[case]["config"], config_of(case), weights_of(case), {"tokenizer.json": b"{}"})


@cache
def text():
    return [tiny.batch(seed) for seed in (0, 1)]


# Importance.

B, T, D = 2, 3, 4
numbers = arrays.arrays(np.float32, (B, T, D), elements=st.floats(-8, 8, width=16))


def seen(x, y):
    """A layer of two norms, two key-value heads and D feed-forward channels, made of two arrays."""
    x, y = jnp.asarray(x), jnp.asarray(y)
    return Seen(x, y, normed=[x, y], heads=jnp.stack([x, y], axis=2), ffn=y)


def influence(x, y):
    length = np.sqrt((x * x).sum(-1)) * np.sqrt((y * y).sum(-1))
    return 1 - np.divide((x * y).sum(-1), length, out=np.zeros_like(length), where=length > 0)


DEFINITIONS = {
    "layers": influence,
    "hidden": lambda x, y: (np.abs(x) + np.abs(y)) / 2,
    "ffn": lambda x, y: np.abs(y),
    "kv_heads": lambda x, y: np.sqrt(np.stack([(x * x).sum(-1), (y * y).sum(-1)], axis=-1)),
}


@pytest.mark.parametrize("part", IMPORTANCES)
@settings(max_examples=30, deadline=None)
@given(x=numbers, y=numbers)
def test_an_importance_is_its_definition(part, x, y):
    wanted = DEFINITIONS[part](x.astype(np.float64), y.astype(np.float64))
    np.testing.assert_allclose(IMPORTANCES[part](seen(x, y)), wanted, rtol=1e-4, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(x=numbers, y=numbers, factor=st.floats(0.25, 4))
def test_a_layer_s_influence_is_that_of_its_direction(x, y, factor):
    of = lambda x, y: np.asarray(IMPORTANCES["layers"](seen(x, y)))  # noqa: E731
    assert ((of(x, y) >= -1e-5) & (of(x, y) <= 2 + 1e-5)).all()
    np.testing.assert_allclose(of(x, factor * y), of(x, y), atol=1e-4)
    something = (x * x).sum(-1) > 0
    np.testing.assert_allclose(of(x, factor * x)[something], 0, atol=1e-5)


@pytest.mark.parametrize("part", IMPORTANCES)
@settings(max_examples=30, deadline=None)
@given(x=numbers, y=numbers, order=st.permutations(range(B)))
def test_a_row_s_importance_does_not_depend_on_the_others(part, x, y, order):
    importance = IMPORTANCES[part](seen(x, y))
    np.testing.assert_array_equal(importance[np.array(order)], IMPORTANCES[part](seen(x[order], y[order])))


@given(importance=arrays.arrays(np.float32, (3, 6), elements=st.floats(0, 4, width=16)), count=st.integers(1, 6))
def test_the_most_important_are_not_below_any_other(importance, count):
    for row, chosen in zip(importance, most_important(importance, count), strict=True):
        assert len(chosen) == count
        assert (np.diff(chosen) > 0).all()
        assert row[chosen].min() >= np.delete(row, chosen).max(initial=-1)


@given(importance=arrays.arrays(np.float32, 7, elements=st.floats(0, 4, width=16)), count=st.integers(2, 7))
def test_the_important_layers_have_both_ends_among_them(importance, count):
    chosen = important_layers(importance, count)
    assert len(chosen) == count
    assert chosen[0] == 0 and chosen[-1] == 6
    assert chosen[1:-1] == [1 + i for i in most_important(importance[1:-1], count - 2)]
    assert important_layers(importance, 1) == [0]


def test_a_layer_s_influence_is_measured_between_its_input_and_its_output():
    teacher, batch = model(), text()[0]
    states = []
    for layers in ([0], [0, 1]):
        cut = cut_layers(teacher, layers)
        stacked = decoder.stack(cut.config, cut.weights)
        x = decoder.embed(cut.config, stacked, batch.tokens, jnp.float32)
        mask = batch.segments[:, :, None] == batch.segments[:, None, :]
        mask &= batch.positions[:, None, :] <= batch.positions[:, :, None]
        view = decoder.View(batch.positions, batch.positions, mask)
        states.append(np.asarray(decoder.run_layers(cut.config, stacked, x, view)[0]))
    wanted = influence(*states)[batch.segments > 0].mean()
    found = measure(teacher.config, teacher.weights, [batch]).importance["layers"]
    assert found[1] == pytest.approx(wanted, rel=1e-4)


def test_importance_is_a_mean_over_tokens_whatever_their_batch():
    teacher, (one, other) = model(), text()
    whole, first, second = (
        measure(teacher.config, teacher.weights, batches) for batches in ([one, other], [one], [other])
    )
    a, b = ((batch.segments > 0).sum() for batch in (one, other))
    assert (one.segments == 0).any()
    for part in IMPORTANCES:
        mean = (a * first.importance[part] + b * second.importance[part]) / (a + b)
        np.testing.assert_allclose(whole.importance[part], mean, rtol=1e-4, atol=1e-6)
    noise = np.where(one.segments == 0, 5, one.tokens)
    again = measure(teacher.config, teacher.weights, [dataclasses.replace(one, tokens=noise)])
    for part in IMPORTANCES:
        np.testing.assert_allclose(again.importance[part], first.importance[part], rtol=1e-6, atol=1e-7)


def test_without_text_nothing_is_measured():
    with pytest.raises(DataError, match="no text to measure importance on"):
        make_student("cut:layers=2@importance", model(), seed=0)


# Cuts.


def with_dead_parts(case, parts):
    """The model with layer 1, the channels 5k, 20 feed-forward channels a layer or a key-value head a layer dead."""
    teacher = model(case)
    config = teacher.config
    weights = {name: value.copy() for name, value in teacher.weights.items()}

    def silence(rows, *modules):
        for name, value in weights.items():
            if name.split(".")[-2] in modules:
                value[rows(int(name.split(".")[2]))] = 0

    rng = np.random.default_rng(0)
    units = [rng.choice(config.intermediate_size, 20, replace=False) for _ in range(config.num_hidden_layers)]
    if "layers" in parts:
        silence(lambda layer: slice(None) if layer == 1 else [], "o_proj", "down_proj")
    if "hidden" in parts:
        dead = np.arange(2, 48, 6)
        weights[decoder.EMBEDDING][:, dead] = 0
        silence(lambda _: dead, "o_proj", "down_proj")
    if "ffn" in parts:
        silence(lambda layer: units[layer], "up_proj")
    if "kv_heads" in parts:
        head = config.head_dim
        silence(lambda layer: slice(layer % 2 * head, (layer % 2 + 1) * head), "v_proj")
    return dataclasses.replace(teacher, weights=weights)


def logits_of(found):
    batch = text()[0]
    stacked = decoder.stack(found.config, found.weights)
    logits = forward(found.config, stacked, batch.tokens, batch.positions, batch.segments)
    return np.asarray(logits)[batch.segments > 0]


CASES = [(case, EVERYTHING) for case in EXEMPLARS.values()]
CASES += [("llama-biased", f"cut:{part}") for part in EVERYTHING.removeprefix("cut:").split(",")]


@pytest.mark.parametrize(("case", "spec"), CASES)
def test_what_does_nothing_goes_and_the_logits_stay(case, spec):
    teacher = with_dead_parts(case, spec)
    student = make_student(spec, teacher, seed=0, calibration=text)
    # Beside a sum over fewer channels, a norm's eps is not quite as small.
    atol = 2e-3 if "hidden" in spec else 1e-4
    np.testing.assert_allclose(logits_of(student), logits_of(teacher), rtol=1e-4, atol=atol)
    assert {name: value.shape for name, value in student.weights.items()} == decoder.shapes(student.config)
    assert all(value.dtype == np.float32 for value in student.weights.values())
    assert read_config(json.loads(json.dumps(student.hf))) == student.config
    if "layers" in spec:
        assert student.config.windows == tuple(teacher.config.windows[layer] for layer in LIVE_LAYERS)
    whole = student_architecture(spec, teacher.config)
    assert dataclasses.replace(whole, layer_windows=()) == dataclasses.replace(student.config, layer_windows=())
    config, sizes = teacher.config, {part: size for part, size in LIVE.items() if part in spec}
    assert student.config.hidden_size == sizes.get("hidden", config.hidden_size)
    assert student.config.intermediate_size == sizes.get("ffn", config.intermediate_size)
    kv_heads = sizes.get("kv_heads", config.num_key_value_heads)
    assert student.config.num_key_value_heads == kv_heads
    assert student.config.num_attention_heads == 2 * kv_heads
    assert student.config.head_dim == config.head_dim


@pytest.mark.parametrize("case", ["gemma2", "mistral", "qwen3-sliding"])
@pytest.mark.parametrize("spec", ["half", "layers:3", "layers:1,2", "cut:layers=3"])
def test_the_architecture_of_an_even_cut_is_known_before_any_weight(case, spec):
    assert student_architecture(spec, config_of(case)) == make_student(spec, model(case), seed=0).config


def test_a_cut_that_keeps_all_is_the_teacher():
    teacher = model()
    student = make_student("cut:hidden=48,ffn=80,kv_heads=2", teacher, seed=0)
    assert student.config == teacher.config
    for name, value in student.weights.items():
        np.testing.assert_array_equal(value, teacher.weights[name])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("cut:", "'' is not one of layers=N"),
        ("cut:hidden=8,", "'' is not one of"),
        ("cut:depth=3", "'depth=3' is not one of"),
        ("cut:hidden=8@importance", "'hidden=8@importance' is not one of"),
        ("cut:layers=3@chance", "'layers=3@chance' is not one of"),
        ("cut:ffn=-1", "'ffn=-1' is not one of"),
        ("cut:ffn=8,ffn=9", "'ffn=9' is not one of .*, each given once"),
        ("cut:layers=5@importance", "the teacher has 4 layers"),
        ("cut:layers=0", "the teacher has 4 layers"),
        ("cut:hidden=96", "hidden=96: must be at least 1 and at most the teacher's 48"),
        ("cut:ffn=81", "ffn=81: must be .* at most the teacher's 80"),
        ("cut:kv_heads=0", "kv_heads=0: must be at least 1"),
        ("cut:kv_heads=3", "kv_heads=3: must be .* at most the teacher's 2"),
        ("cut:hidden=42", "4 attention heads do not divide a width of 42"),
    ],
)
def test_a_cut_that_does_not_suit_is_refused_before_any_weight_is_read(spec, message):
    with pytest.raises(RecipeError, match=rf"student '{spec}': {message}"):
        student_architecture(spec, config_of("llama-biased"))


def test_no_text_is_read_where_nothing_is_measured():
    for spec in ("half", "layers:2", "layers:0,3", "cut:layers=2"):
        make_student(spec, model(), seed=0, calibration=lambda: pytest.fail("read text"))


# The stage.


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    tiny_run.write_world(folder)
    return folder


def test_a_run_makes_the_same_student_again_from_its_training_rows(world):
    teacher = load(world / "teacher")
    given = Distill(
        teacher=str(world / "teacher"),
        student="cut:layers=3@importance,hidden=48,ffn=64,kv_heads=1",
        data=(world / "train.jsonl",),
        valid=(world / "valid.jsonl",),
        sequence_length=32,
    )
    first, again = (initial_student(given, Common(), teacher) for _ in range(2))
    for name, value in first.weights.items():
        np.testing.assert_array_equal(value, again.weights[name])
    other = initial_student(dataclasses.replace(given, data=given.valid), Common(), teacher)
    assert any(not np.array_equal(value, other.weights[name]) for name, value in first.weights.items())


def test_groups_that_do_not_divide_a_cut_are_refused_before_the_run(world):
    given = Distill(teacher=str(world / "teacher"), student="cut:hidden=48", data=(world / "train.jsonl",))
    with pytest.raises(RecipeError, match="group_size = 32 does not divide the inputs of"):
        preflight({"distill": given, "quantize": Quantize(method="rtn", group_size=32)}, Data(), None)
    fits = dataclasses.replace(given, student="cut:hidden=32,ffn=64,kv_heads=1")
    preflight({"distill": fits, "quantize": Quantize(method="rtn", group_size=32)}, Data(), None)


@pytest.mark.parametrize(("given", "used"), [(None, 0.5 / 32), (1e-3, 1e-3)])
def test_the_learning_rate_is_half_over_the_student_s_width_if_not_given(world, monkeypatch, given, used):
    def fit(loss, trainable, frozen, batches, plan, **options):
        return trainable, Trace(steps=[{"count": 0.0, "seen": plan.learning_rate}])

    monkeypatch.setattr(stage, "fit", fit)
    settings = Distill(
        teacher=str(world / "teacher"),
        student="cut:hidden=32,ffn=64,kv_heads=1",
        data=(world / "train.jsonl",),
        sequence_length=32,
        learning_rate=given,
    )
    teacher = load(settings.teacher)
    start = initial_student(settings, Common(), teacher)
    texts = training_and_held_out(settings.data, settings.valid)
    _, trace, facts = stage.distill(teacher, start, *texts, settings, Common())
    assert trace.steps[0]["seen"] == facts["learning_rate"] == used
