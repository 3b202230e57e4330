"""What a student copies beside the logits: distances against NumPy, taps against the layers run one by one."""

import dataclasses
import json
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from compress import cli
from compress.distill import stage
from compress.distill.loss import distillation_loss
from compress.distill.settings import Distill
from compress.distill.strategies import PROJECTION, STRATEGIES, layer_pairs, make_matching
from compress.errors import RecipeError
from compress.models import decoder, read_config
from compress.models.attention import MASKED, visible
from compress.models.decoder import Tap
from compress.models.folder import load
from compress.train.fit import FitSettings, fit
from tests import tiny_training as tiny
from tests.tiny_models import EXEMPLARS, RECORDS, config_of, stacked_of
from tests.tiny_run import CONFIG, rows, write_jsonl, write_model

N = 6
vectors = arrays.arrays(np.float32, N, elements=st.integers(-1000, 1000).map(lambda x: x / 128))
HIDDEN, MAPS = STRATEGIES["hidden"], STRATEGIES["attention"]


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    with tiny.unoptimized():
        yield


# Distances.


def cosine(a, b):
    return 1 - (a * b).sum(-1) / np.sqrt((a**2).sum(-1) * (b**2).sum(-1))


def mean_square(a, b):
    return ((a - b) ** 2).mean(-1)


def map_kl(a, b):
    """Of maps [..., S], zero where a key is masked."""
    return np.where(b > 0, b * (np.log(np.where(b > 0, b, 1)) - np.log(np.where(a > 0, a, 1))), 0).sum(-1)


def map_square(a, b):
    return ((a - b) ** 2).sum(-1) / (b > 0).sum(-1)


DEFINITIONS = {
    "hidden": {"cosine": cosine, "mse": mean_square},
    "attention": {"kl": map_kl, "mse": map_square},
}
CASES = [(name, loss) for name, strategy in STRATEGIES.items() for loss in strategy.losses]
COMPILED = {case: jax.jit(STRATEGIES[case[0]].losses[case[1]]) for case in CASES}


def slope_of(case):
    """The gradient of a distance in the student's vector, or in the scores behind its attention map."""
    free = jax.nn.log_softmax if case[0] == "attention" else lambda x: x
    return jax.jit(jax.grad(lambda student, teacher: COMPILED[case](free(student), teacher)))


SLOPES = {case: slope_of(case) for case in CASES}
cases = pytest.mark.parametrize("case", CASES, ids=str)


def shown(case, values, keys):
    """A layer's showing made of any numbers, and what its definition takes: for a map its log and its weights."""
    if case[0] == "hidden":
        return values, np.float64(values)
    seen = np.arange(N) < keys
    logs = tiny.numpy_log_softmax(np.where(seen, values, -1e9))
    return np.where(seen, logs, MASKED).astype(np.float32), np.exp(logs) * seen


@cases
@settings(max_examples=40, deadline=None)
@given(student=vectors, teacher=vectors, keys=st.integers(1, N))
def test_a_distance_is_its_definition_and_not_negative(case, student, teacher, keys):
    (ours, a), (theirs, b) = (shown(case, values, keys) for values in (student, teacher))
    value = float(COMPILED[case](ours, theirs))
    assert value >= -1e-5
    if case != ("hidden", "cosine") or (np.abs(student).max() > 0.01 and np.abs(teacher).max() > 0.01):
        assert value == pytest.approx(DEFINITIONS[case[0]][case[1]](a, b), rel=1e-4, abs=1e-5)


@cases
@settings(max_examples=20, deadline=None)
@given(student=vectors, keys=st.integers(2, N))
def test_a_distance_is_nothing_between_equals_alone(case, student, keys):
    student = np.where(np.abs(student) < 0.5, 1, student).astype(np.float32) / 4
    ours, _ = shown(case, student, keys)
    other, _ = shown(case, student + np.float32(3) * (np.arange(N) == 0) * np.where(student[0] < 0, 1, -1), keys)
    assert COMPILED[case](ours, ours) == pytest.approx(0, abs=1e-6)
    np.testing.assert_allclose(SLOPES[case](ours, ours), 0, atol=1e-5)
    assert COMPILED[case](ours, other.astype(np.float32)) > 1e-4


@cases
def test_no_slope_is_nan_where_a_vector_is_zero_or_a_weight_underflows(case):
    hard = np.array([0, -300, -300, -300, -300, -300], np.float32) if case[0] == "attention" else np.zeros(N)
    for student, teacher in ((hard, hard[::-1]), (hard[::-1], hard)):
        ours, theirs = (shown(case, np.float32(values), N)[0] for values in (student, teacher))
        assert np.isfinite(COMPILED[case](ours, theirs))
        assert np.isfinite(SLOPES[case](ours, theirs)).all()


def test_the_cosine_does_not_see_a_length():
    a, b = np.random.default_rng(0).normal(size=(2, N)).astype(np.float32)
    assert COMPILED["hidden", "cosine"](3 * a, 5 * b) == pytest.approx(float(COMPILED["hidden", "cosine"](a, b)))


# Taps.


@partial(jax.jit, static_argnums=0)
def one_by_one(config, stacked, batch):
    """Each layer's output [B, T, D] and attention weights averaged over heads [B, T, S], layers run without a scan."""
    x = decoder.embed(config, stacked, batch.tokens, jnp.float32)
    mask = visible(batch.positions, batch.segments, batch.positions, batch.segments)
    outputs, maps = [], []
    layers = decoder.split_layers(config, decoder.unstack(config, stacked))[1]
    for data, layer in zip(zip(*decoder.layer_data(config)), layers, strict=True):
        block, (x, _) = decoder.run_block(config, layer, x, data, decoder.View(batch.positions, batch.positions, mask))
        outputs.append(x)
        maps.append(jax.nn.softmax(block.self_attn.scores.get_value()).mean((1, 2)))
    return outputs, maps


def tapped(config, stacked, batch, layers, remat=False):
    read = lambda block, x: {name: strategy.tap(block, x) for name, strategy in STRATEGIES.items()}  # noqa: E731

    @jax.jit
    def run(stacked, batch):
        view = {"positions": batch.positions, "segments": batch.segments}
        return decoder.tapped_states(config, stacked, batch.tokens, Tap(layers, read), **view, remat=remat)

    return run(stacked, batch)


@pytest.mark.parametrize("family", ["gemma2", "llama"])
def test_a_tap_reads_the_layers_asked_for_in_their_order(family):
    case = EXEMPLARS[family]
    config, batch = config_of(case), tiny.batch(0, rows=2)
    batch = dataclasses.replace(batch, tokens=batch.tokens % config.vocab_size)
    layers = (3, 1)
    hidden, kept = tapped(config, stacked_of(case), batch, layers, remat=family == "llama")
    outputs, maps = one_by_one(config, stacked_of(case), batch)
    assert kept["hidden"].shape[0] == kept["attention"].shape[0] == len(layers)
    for index, layer in enumerate(layers):
        np.testing.assert_allclose(kept["hidden"][index], outputs[layer], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(np.exp(kept["attention"][index]), maps[layer], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(np.exp(kept["attention"]).sum(-1), 1, rtol=1e-5)
    plain = decoder.final_norm(config, stacked_of(case), jnp.asarray(outputs[-1]))
    np.testing.assert_allclose(hidden, plain, rtol=1e-4, atol=1e-4)


def test_a_masked_key_has_no_weight():
    batch = tiny.batch(1, rows=2)
    _, kept = tapped(tiny.STUDENT, tiny.student(), batch, (0,))
    hidden = ~np.asarray(visible(batch.positions, batch.segments, batch.positions, batch.segments))
    assert hidden.any()
    assert (np.asarray(kept["attention"][0])[hidden] < MASKED / 2).all()
    assert (np.asarray(kept["attention"][0])[~hidden] > -1e4).all()


# The layer map.


def deep(layers):
    return dataclasses.replace(tiny.STUDENT, num_hidden_layers=layers)


@pytest.mark.parametrize(
    ("layer_map", "spec", "student", "teacher", "pairs"),
    [
        ("0:1,1:3", "half", 2, 4, ((0, 1), (1, 3))),
        ("1:0", "folder", 2, 3, ((1, 0),)),
        ("0:2,1:2", "folder", 2, 3, ((0, 2), (1, 2))),
        ("", "half", 2, 4, ((0, 0), (1, 3))),
        ("", "layers:3", 3, 4, ((0, 0), (1, 2), (2, 3))),
        ("", "layers:1", 1, 4, ((0, 0),)),
        ("", "layers:1,2", 2, 4, ((0, 1), (1, 2))),
        ("", "cut:layers=2,ffn=8", 2, 4, ((0, 0), (1, 3))),
        ("", "cut:layers=2@importance", 2, 4, ((0, 1), (1, 3))),
        ("", "config.json", 2, 4, ((0, 1), (1, 3))),
        ("", "folder", 2, 3, ((0, 1), (1, 2))),
        ("", "folder", 3, 2, ((0, 0), (1, 1), (2, 1))),
    ],
)
def test_layers_are_paired_as_given_or_as_cut_or_evenly(layer_map, spec, student, teacher, pairs):
    assert layer_pairs(layer_map, spec, deep(student), deep(teacher)) == pairs


@given(student=st.integers(1, 60), teacher=st.integers(1, 60))
def test_an_even_map_pairs_every_layer_in_order_and_the_last_with_the_last(student, teacher):
    pairs = layer_pairs("", "folder", deep(student), deep(teacher))
    ours, theirs = zip(*pairs, strict=True)
    assert ours == tuple(range(student))
    assert theirs[-1] == teacher - 1
    assert theirs[0] >= 0
    steps = np.diff((-1, *theirs))
    assert steps.min() >= 0
    assert steps.max() - steps.min() <= 1


# What the settings ask for.


def matching_of(student=tiny.STUDENT, teacher=tiny.TEACHER, **options):
    given = Distill(teacher="t", data=(Path("d"),), student="folder", sequence_length=tiny.LENGTH, **options)
    return make_matching(given, student, teacher)


def test_nothing_asked_for_is_nothing_made():
    assert matching_of() is None
    assert matching_of(hidden_loss="mse", layer_map="0:0") is None


def test_only_what_is_asked_for_is_tapped_and_only_of_the_layers_paired():
    matching = matching_of(hidden=0.5, layer_map="1:2")
    assert [tap.layers for tap in matching.taps()] == [(1,), (2,)]
    loss = distillation_loss(tiny.STUDENT, tiny.TEACHER, matching=matching)
    start = with_projections(matching)
    text = str(jax.make_jaxpr(loss)(start, tiny.teacher(), tiny.batch(0, rows=2), None))
    assert f"f32[1,2,{tiny.LENGTH},{tiny.TEACHER.hidden_size}]" in text  # a layer of the teacher's three
    assert f"f32[3,2,{tiny.LENGTH},{tiny.TEACHER.hidden_size}]" not in text
    assert f"f32[1,2,{tiny.LENGTH},{tiny.LENGTH}]" not in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_map": "2:0"}, r"layer_map '2:0': the student has layers 0 to 1, the teacher 0 to 2"),
        ({"layer_map": "0:3"}, r"layer_map '0:3': the student has layers"),
        ({"layer_map": "0:1,0:2"}, r"a student's layer is named twice"),
        ({"hidden_match": "pooling"}, r"teacher's width 48 is not a multiple of the student's 32; use projection"),
    ],
)
def test_what_does_not_fit_the_pair_is_refused(options, message):
    with pytest.raises(RecipeError, match=message):
        matching_of(hidden=1.0, **options)


@pytest.mark.parametrize(
    "text", ["0", "0:", "a:b", "0:1,", "0:1 ,1:2", "-1:0", "0:1;1:2", pytest.param("0:" + "9" * 5000, id="long")]
)
def test_a_layer_map_that_is_none_is_refused(text):
    with pytest.raises(RecipeError, match=r"give pairs of layers student:teacher, as in 0:1,1:3"):
        matching_of(layer_map=text)


def test_attention_through_unlike_windows_is_refused_where_the_rows_are_long_enough_to_tell():
    config = read_config(RECORDS[EXEMPLARS["gemma2"]]["config"])
    near, far = config.windows[:2]
    assert near is not None
    assert far is None
    options = {"attention": 1.0, "student": "layers:4", "layer_map": "0:1", "teacher": "t", "data": (Path("d"),)}
    with pytest.raises(RecipeError, match=rf"layer 0 of the student looks back {near} tokens and layer 1 .* layer_map"):
        make_matching(Distill(**options, sequence_length=near + 1), config, config)
    assert make_matching(Distill(**options, sequence_length=near), config, config)


# The loss.


def with_projections(matching, seed=0):
    student = tiny.student()
    return dataclasses.replace(student, rest=student.rest | matching.projections(jax.random.key(seed)))


@cache
def every_strategy():
    """Of both strategies, weighted, over layers out of order; a projection bridges the widths."""
    return matching_of(hidden=0.5, hidden_loss="mse", attention=2.0, attention_loss="kl", layer_map="1:2,0:1")


@pytest.fixture(scope="module")
def step():
    """Loss and gradient of the pair under both strategies."""
    loss = distillation_loss(tiny.STUDENT, tiny.TEACHER, matching=every_strategy(), chunk=16)

    def run(trainable, frozen, batch):
        total, count, metrics = loss(trainable, frozen, batch, None)
        return total, (count, metrics)

    return jax.jit(jax.value_and_grad(run, has_aux=True))


def test_the_loss_adds_each_strategy_by_its_weight(step):
    batch, start = tiny.batch(5, rows=4), with_projections(every_strategy())
    (total, (count, metrics)), grads = step(start, tiny.teacher(), batch)
    ours, our_maps = one_by_one(tiny.STUDENT, tiny.student(), batch)
    theirs, their_maps = one_by_one(tiny.TEACHER, tiny.teacher(), batch)
    mask = batch.mask[:, 1:]
    hidden = attention = 0.0
    for index, (a, b) in enumerate([(1, 2), (0, 1)]):
        projected = np.float64(ours[a]) @ np.float64(start.rest[PROJECTION][index]).T
        hidden += (mean_square(projected, np.float64(theirs[b]))[:, :-1] * mask).sum() / 2
        attention += (map_kl(np.float64(our_maps[a]), np.float64(their_maps[b]))[:, :-1] * mask).sum() / 2
    assert count == mask.sum()
    assert {name: weight for name, (_, weight) in metrics.items()} == dict.fromkeys(
        ["divergence", "cross_entropy", "hidden", "attention"], count
    )
    assert metrics["hidden"][0] == pytest.approx(hidden, rel=1e-4)
    assert metrics["attention"][0] == pytest.approx(attention, rel=1e-4)
    logits = 0.9 * metrics["divergence"][0] + 0.1 * metrics["cross_entropy"][0]
    assert total == pytest.approx(float(logits) + 0.5 * hidden + 2.0 * attention, rel=1e-4)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
    assert float(jnp.abs(grads.rest[PROJECTION]).min(axis=0).max()) > 0


def test_padding_never_reaches_the_strategies(step):
    batch, start = tiny.batch(6, rows=4), with_projections(every_strategy())
    noise = np.random.default_rng(0).integers(0, tiny.VOCAB, batch.tokens.shape, dtype=np.int32)
    other = dataclasses.replace(batch, tokens=np.where(batch.segments == 0, noise, batch.tokens))
    one, two = (step(start, tiny.teacher(), b) for b in (batch, other))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), one, two)


def test_a_student_copies_what_it_is_to_copy():
    """Hidden states alone, through a projection that trains along; the caller's weights stay as they were."""
    matching = matching_of(hidden=1.0)
    start = with_projections(matching)
    loss = distillation_loss(tiny.STUDENT, tiny.TEACHER, alpha=0.0, matching=matching)
    batch = tiny.batch(0, rows=4)
    plan = FitSettings(steps=30, learning_rate=0.01, warmup_steps=1, global_batch=4)
    trained, trace = fit(loss, start, tiny.teacher(), [batch] * 30, plan)
    assert trace.steps[-1]["hidden"] < 0.5 * trace.steps[0]["hidden"]
    assert not np.array_equal(trained.rest[PROJECTION], start.rest[PROJECTION])


def test_pooling_averages_neighbouring_channels_of_the_teacher():
    teacher = read_config(tiny.TEACHER_HF | {"hidden_size": 64})
    matching = matching_of(teacher=teacher, hidden=1.0, hidden_loss="mse", hidden_match="pooling", layer_map="0:0")
    assert matching.projections(jax.random.key(0)) == {}
    rng = np.random.default_rng(0)
    ours, theirs = rng.normal(size=(1, 2, 3, 32)), rng.normal(size=(1, 2, 3, 64))
    found = matching.distances({"hidden": jnp.float32(ours)}, {"hidden": jnp.float32(theirs)}, None)["hidden"]
    pooled = (theirs[..., ::2] + theirs[..., 1::2]) / 2
    np.testing.assert_allclose(found, mean_square(ours, pooled)[0], rtol=1e-5)


def test_equal_widths_need_no_projection():
    assert matching_of(teacher=tiny.STUDENT, hidden=1.0).projections(jax.random.key(0)) == {}
    assert matching_of(attention=1.0).projections(jax.random.key(0)) == {}


def test_the_command_trains_projections_and_leaves_them_out_of_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "mesh_of_devices", lambda shape: None)
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "teacher")
    write_jsonl(tmp_path / "train.jsonl", [{"text": text} for text in rows(40, 1)])
    student = CONFIG | {"hidden_size": 32, "num_hidden_layers": 2}
    (tmp_path / "student.json").write_text(json.dumps(student))
    command = (
        "distill --teacher teacher --student student.json --data train.jsonl --device cpu --out out --steps 4 "
        "--global-batch 4 --sequence-length 32 --hidden 1 --attention 1 --temperature 4 --temperature-end 1"
    )
    assert cli.main(command.split()) == 0
    assert load(tmp_path / "out").weights.keys() == decoder.shapes(read_config(student)).keys()
    trace = json.loads((tmp_path / "out/training.json").read_text())
    for row in trace["steps"] + trace["validations"]:
        parts = 0.9 * row["divergence"] + 0.1 * row["cross_entropy"] + row["hidden"] + row["attention"]
        assert row["loss"] == pytest.approx(parts, rel=1e-4)
