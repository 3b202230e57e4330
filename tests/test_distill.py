"""Divergences and the distillation loss against NumPy, and the three ways to a student."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from compress.distill.loss import distillation_loss, token_loss
from compress.distill.prune import cut_layers
from compress.distill.student import even_layers, make_student
from compress.distill.temperature import SCHEDULES, Tempered, TemperedBatches, temperatures
from compress.errors import RecipeError
from compress.models import decoder, read_config
from compress.models.folder import Model, save
from compress.train.divergences import DIVERGENCES, forward_kl
from export.errors import ArtifactError
from tests import tiny_training as tiny
from tests.tiny_models import RECORDS, config_of, weights_of

V = 7
logits = arrays.arrays(np.float32, V, elements=st.floats(-20, 20, width=32))
# Probabilities that float32 cannot hold.
sharp = arrays.arrays(np.float32, V, elements=st.sampled_from([-1e4, -200.0, -1.0, 0.0, 3.0, 200.0, 1e4]))
names = pytest.mark.parametrize("name", DIVERGENCES)
# Every entry, at several weights where it takes one: id -> (name, mix).
CASES = {
    f"{name} {mix}" if mix else name: (name, mix)
    for name, entry in DIVERGENCES.items()
    for mix in ((0.1, 0.5, 0.9) if entry.mix else (None,))
}
cases = pytest.mark.parametrize("case", CASES)
COMPILED = {case: jax.jit(DIVERGENCES[name].at(mix)) for case, (name, mix) in CASES.items()}
NEARLY_KL = {name: jax.jit(entry.at(1e-3)) for name, entry in DIVERGENCES.items() if entry.mix}
SLOPES = {case: jax.jit(jax.grad(divergence)) for case, divergence in COMPILED.items()}


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    with tiny.unoptimized():
        yield


def kl(p, q):
    return (np.exp(p) * (p - q)).sum(-1)


def mixture(p, q, mix):
    return np.log(mix * np.exp(p) + (1 - mix) * np.exp(q))


def jsd(student, teacher, mix):
    middle = mixture(teacher, student, mix)
    return mix * kl(teacher, middle) + (1 - mix) * kl(student, middle)


# name -> definition on log-probabilities of the student and of the teacher [..., V], and the mixture's weight
DEFINITIONS = {
    "forward_kl": lambda s, t, mix: kl(t, s),
    "reverse_kl": lambda s, t, mix: kl(s, t),
    "jsd": jsd,
    "skew_forward_kl": lambda s, t, mix: kl(t, mixture(t, s, mix)),
    "skew_reverse_kl": lambda s, t, mix: kl(s, mixture(s, t, mix)),
    "total_variation": lambda s, t, mix: np.abs(np.exp(s) - np.exp(t)).sum(-1) / 2,
}


@cases
@settings(max_examples=40, deadline=None)
@given(student=logits, teacher=logits)
def test_a_divergence_is_its_definition(case, student, teacher):
    name, mix = CASES[case]
    wanted = DEFINITIONS[name](tiny.numpy_log_softmax(student), tiny.numpy_log_softmax(teacher), mix)
    assert COMPILED[case](student, teacher) == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@cases
@settings(max_examples=40, deadline=None)
@given(student=logits, teacher=logits, shift=st.floats(-50, 50, width=32))
def test_a_divergence_is_not_negative_and_does_not_see_a_shift(case, student, teacher, shift):
    value = float(COMPILED[case](student, teacher))
    assert value >= -1e-5
    assert COMPILED[case](student + shift, teacher) == pytest.approx(value, rel=1e-3, abs=1e-3)
    assert COMPILED[case](student, teacher + shift) == pytest.approx(value, rel=1e-3, abs=1e-3)


@cases
@settings(max_examples=20, deadline=None)
@given(student=logits)
def test_a_divergence_from_itself_is_nothing_and_has_no_slope(case, student):
    assert COMPILED[case](student, student) == pytest.approx(0, abs=1e-6)
    np.testing.assert_allclose(SLOPES[case](student, student), 0, atol=1e-5)


@cases
@settings(max_examples=20, deadline=None)
@given(student=logits, index=st.integers(0, V - 1), change=st.sampled_from([-3.0, 3.0]))
def test_distributions_that_differ_are_apart(case, student, index, change):
    student = student / 20  # so that no probability is next to nothing
    teacher = student + np.float32(change) * (np.arange(V) == index)
    assert COMPILED[case](student, teacher) > 1e-5


@cases
@settings(max_examples=40, deadline=None)
@given(student=sharp, teacher=sharp)
def test_a_probability_that_underflows_leaves_value_and_slope_finite(case, student, teacher):
    slope = np.asarray(SLOPES[case](student, teacher))
    assert np.isfinite(COMPILED[case](student, teacher))
    assert np.isfinite(slope).all()
    # A mixture bounds the slope; with m >= w q, the sum of q |log(q / m)| is at most log(1 / w) + 1.
    name, mix = CASES[case]
    assert name == "reverse_kl" or np.abs(slope).sum() <= 2 * (2 + np.log(1 / min(mix or 1, 1 - (mix or 0))))


def test_of_the_divergences_only_the_reverse_kl_has_a_slope_without_bound():
    student, teacher = np.array([0.0, 0.0], np.float32), np.array([0.0, 1e4], np.float32)
    assert np.abs(SLOPES["reverse_kl"](student, teacher)).sum() > 1000


@settings(max_examples=40, deadline=None)
@given(student=sharp, teacher=sharp)
def test_the_total_variation_and_the_jsd_are_bounded(student, teacher):
    assert 0 <= COMPILED["total_variation"](student, teacher) <= 1 + 1e-6
    assert COMPILED["jsd 0.5"](student, teacher) <= np.log(2) + 1e-6


@settings(max_examples=40, deadline=None)
@given(student=logits, teacher=logits)
def test_what_turns_around_and_what_is_symmetric(student, teacher):
    there = {case: float(divergence(student, teacher)) for case, divergence in COMPILED.items()}
    back = {case: float(divergence(teacher, student)) for case, divergence in COMPILED.items()}
    pairs = [("forward_kl", "reverse_kl"), ("jsd 0.1", "jsd 0.9"), ("jsd 0.5", "jsd 0.5")]
    pairs += [("skew_forward_kl 0.1", "skew_reverse_kl 0.1"), ("total_variation", "total_variation")]
    assert [there[a] for a, _ in pairs] == pytest.approx([back[b] for _, b in pairs], rel=1e-4, abs=1e-5)


@settings(max_examples=20, deadline=None)
@given(student=logits, teacher=logits)
def test_a_small_weight_of_the_mixture_gives_the_kl(student, teacher):
    student, teacher = student / 10, teacher / 10
    forward, reverse = (float(COMPILED[name](student, teacher)) for name in ("forward_kl", "reverse_kl"))
    near = {name: float(divergence(student, teacher)) for name, divergence in NEARLY_KL.items()}
    assert near["jsd"] / 1e-3 == pytest.approx(forward, rel=0.05, abs=1e-3)
    assert near["skew_forward_kl"] == pytest.approx(forward, rel=0.05, abs=1e-4)
    assert near["skew_reverse_kl"] == pytest.approx(reverse, rel=0.05, abs=1e-4)


def test_forward_and_reverse_are_told_apart():
    student, teacher = np.array([0, 0], np.float32), np.array([0, 3], np.float32)
    forward, reverse = (float(COMPILED[name](student, teacher)) for name in ("forward_kl", "reverse_kl"))
    assert abs(forward - reverse) > 0.1


def definition(student, teacher, target, name, temperature, alpha):
    """The loss, the divergence and the cross-entropy of every token from whole logits."""
    common = min(student.shape[-1], teacher.shape[-1])
    soft = [tiny.numpy_log_softmax(x[..., :common] / temperature) for x in (student, teacher)]
    distance = temperature**2 * DEFINITIONS[name](*soft, DIVERGENCES[name].mix)
    nll = -np.take_along_axis(tiny.numpy_log_softmax(student), target[..., None], -1)[..., 0]
    return alpha * distance + (1 - alpha) * nll, distance, nll


@names
@settings(max_examples=15, deadline=None)
@given(
    student=logits,
    teacher=logits,
    target=st.integers(0, V - 1),
    temperature=st.floats(0.5, 8),
    alpha=st.floats(0, 1),
    rows=st.sampled_from([(V, V - 2), (V - 2, V)]),
)
def test_a_token_s_loss_mixes_the_divergence_at_temperature_with_cross_entropy(
    name, student, teacher, target, temperature, alpha, rows
):
    student, teacher = student[: rows[0]], teacher[: rows[1]]
    target %= V - 2
    value, logged = token_loss(
        jnp.asarray(student),
        jnp.asarray(teacher),
        jnp.int32(target),
        jnp.float32(temperature),
        divergence=DIVERGENCES[name].at(),
        alpha=alpha,
    )
    wanted = definition(student, teacher, np.array(target), name, temperature, alpha)
    found = (value, logged["divergence"], logged["cross_entropy"])
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3)


def test_tau_squared_keeps_the_gradient_s_scale():
    rng = np.random.default_rng(0)
    student, teacher = rng.normal(0, 0.01, (2, V)).astype(np.float32)
    norms = []
    for temperature in (1.0, 2.0, 16.0):
        given = jnp.asarray(teacher), jnp.int32(0), jnp.float32(temperature)
        slope = jax.grad(lambda s, g=given: token_loss(s, *g, divergence=forward_kl, alpha=1.0)[0])
        norms.append(float(jnp.linalg.norm(slope(jnp.asarray(student)))))
    assert norms == pytest.approx([norms[0]] * 3, rel=0.05)


def whole(name="forward_kl", temperature=2.0, alpha=0.9, batch=None):
    """Sum, count and logged sums of the pair's loss, from whole logits in NumPy."""
    ours = np.asarray(tiny.logits_of(tiny.STUDENT, tiny.student(), batch))[:, :-1]
    theirs = np.asarray(tiny.logits_of(tiny.TEACHER, tiny.teacher(), batch))[:, :-1]
    mask = batch.mask[:, 1:]
    parts = definition(
        ours.astype(np.float64), theirs.astype(np.float64), batch.tokens[:, 1:], name, temperature, alpha
    )
    return [(part * mask).sum() for part in parts], mask.sum()


@names
def test_the_loss_of_a_pair_of_models_is_its_definition(name):
    assert tiny.TEACHER.vocab_size > tiny.STUDENT.vocab_size  # padding rows
    batch = tiny.batch(5, rows=4)
    loss = distillation_loss(tiny.STUDENT, tiny.TEACHER, divergence=name, temperature=3.0, alpha=0.7, chunk=8)
    total, count, metrics = jax.jit(loss)(tiny.student(), tiny.teacher(), batch, None)
    sums, targets = whole(name, 3.0, 0.7, batch)
    assert count == targets
    np.testing.assert_allclose([total, metrics["divergence"][0], metrics["cross_entropy"][0]], sums, rtol=1e-4)
    assert all(weight == targets for _, weight in metrics.values())


@pytest.fixture(scope="module")
def step():
    """Loss and gradient of the pair."""
    loss = distillation_loss(tiny.STUDENT, tiny.TEACHER, chunk=16)

    def run(trainable, frozen, batch):
        total, count, metrics = loss(trainable, frozen, batch, None)
        return total, (count, metrics)

    return jax.jit(jax.value_and_grad(run, has_aux=True))


def test_padding_never_reaches_the_loss_or_the_gradient(step):
    batch = tiny.batch(6, rows=4)
    noise = np.random.default_rng(0).integers(0, tiny.VOCAB, batch.tokens.shape, dtype=np.int32)
    assert (batch.segments == 0).any()
    other = dataclasses.replace(batch, tokens=np.where(batch.segments == 0, noise, batch.tokens))
    one, two = (step(tiny.student(), tiny.teacher(), b) for b in (batch, other))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), one, two)


def test_rows_add_up(step):
    """Sum and count of a batch are the sums over its rows: a token counts the same in whatever row."""
    batch = tiny.batch(7, rows=4)
    (total, (count, _)), grads = step(tiny.student(), tiny.teacher(), batch)
    blank = jax.tree.map(np.zeros_like, batch)
    parts = []
    for row in range(4):
        kept = jax.tree.map(lambda x, z, at=row: np.where(np.arange(4)[:, None] == at, x, z), batch, blank)
        parts.append(step(tiny.student(), tiny.teacher(), kept))
    (sums, (counts, _)), gradients = jax.tree.map(lambda *leaves: sum(leaves), *parts)
    assert counts == count
    assert sums == pytest.approx(float(total), rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), gradients, grads)


def test_a_student_that_is_its_teacher_has_nothing_to_learn():
    loss = distillation_loss(tiny.STUDENT, tiny.STUDENT, alpha=1.0)

    def run(trainable, frozen, batch):
        return loss(trainable, frozen, batch, None)[0]

    total, grads = jax.jit(jax.value_and_grad(run))(tiny.student(), tiny.student(), tiny.batch(8, rows=2))
    assert total == pytest.approx(0, abs=1e-4)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(grads)) < 1e-3


# The temperature's schedule.


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(start=st.floats(0.5, 8), end=st.floats(0.5, 8), steps=st.integers(2, 50))
def test_a_temperature_goes_steadily_from_the_first_step_s_to_the_last_one_s(schedule, start, end, steps):
    values = temperatures(schedule, start, end, steps)
    assert len(values) == steps
    assert values[[0, -1]] == pytest.approx([start, end], rel=1e-6)
    assert (np.diff(values) * np.sign(end - start) >= -1e-6).all()
    # Both are as far from one end as the mirrored step is from the other.
    assert values + values[::-1] == pytest.approx(np.full(steps, start + end), rel=1e-5)


def test_schedules_are_their_definitions():
    done = np.arange(5) / 4
    assert temperatures("linear", 4.0, 2.0, 5) == pytest.approx(4 - 2 * done)
    assert temperatures("cosine", 4.0, 2.0, 5) == pytest.approx(2 + (4 - 2) * 0.5 * (1 + np.cos(np.pi * done)))
    assert temperatures("cosine", 4.0, 2.0, 1) == [4]


class Handed(list):
    """Batches that know where they are."""

    def __iter__(self):
        self.at = getattr(self, "at", 0)
        while self.at < len(self):
            self.at += 1
            yield self[self.at - 1]

    def state(self):
        return {"at": self.at}

    def restore(self, state):
        self.at = state["at"]


def test_a_schedule_goes_on_where_it_was_and_stays_at_its_end():
    def made():
        return TemperedBatches(Handed([tiny.batch(seed, rows=1) for seed in range(5)]), np.float32([3, 2, 1]))

    whole = list(made())
    assert [float(item.temperature[0]) for item in whole] == [3, 2, 1, 1, 1]
    first = made()
    seen = [next(first) for _ in range(2)]
    rest = made()
    rest.restore(first.state())
    jax.tree.map(np.testing.assert_array_equal, [*seen, *rest], whole)


def test_each_step_s_batch_carries_its_temperature_and_compiles_once():
    loss = jax.jit(distillation_loss(tiny.STUDENT, tiny.TEACHER, temperature=1.0, alpha=0.7, chunk=8))
    batches = [tiny.batch(seed, rows=4) for seed in range(3)]
    carried = list(TemperedBatches(Handed(batches), temperatures("linear", 4.0, 2.0, 3)))
    assert [item.temperature.tolist() for item in carried] == [[4.0] * 4, [3.0] * 4, [2.0] * 4]
    for item, batch, tau in zip(carried, batches, (4.0, 3.0, 2.0), strict=True):
        total, count, metrics = loss(tiny.student(), tiny.teacher(), item, None)
        sums, targets = whole(temperature=tau, alpha=0.7, batch=batch)
        np.testing.assert_allclose([total, metrics["divergence"][0], metrics["cross_entropy"][0]], sums, rtol=1e-4)
        assert count == targets
    assert loss._cache_size() == 1


def test_a_masked_token_s_temperature_never_makes_the_gradient_nan(step):
    batch = tiny.batch(6, rows=4)
    _, grads = step(tiny.student(), tiny.teacher(), Tempered(batch, np.full(4, 2, np.float32)))
    _, same = step(tiny.student(), tiny.teacher(), batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), grads, same)


# The student.


def model(case="llama-llama3-tied"):
    return Model(RECORDS[case]["config"], config_of(case), weights_of(case), {"tokenizer.json": b"{}"})


@given(layers=st.integers(1, 200), data=st.data())
def test_an_even_cut_keeps_as_many_layers_as_asked_with_both_ends(layers, data):
    kept = data.draw(st.integers(1, layers))
    chosen = even_layers(layers, kept)
    assert len(set(chosen)) == kept
    assert chosen == sorted(chosen)
    assert chosen[0] == 0
    assert kept == 1 or chosen[-1] == layers - 1
    gaps = np.diff(chosen)
    assert kept == 1 or gaps.max() - gaps.min() <= 1


@pytest.mark.parametrize(
    ("spec", "kept"),
    [("half", [0, 3]), ("layers:1", [0]), ("layers:3", [0, 2, 3]), ("layers:4", [0, 1, 2, 3]), ("layers:0,2", [0, 2])],
)
def test_a_cut_keeps_the_teacher_s_own_layers_renumbered(spec, kept):
    teacher = model()
    student = make_student(spec, teacher, seed=0)
    assert student.config == read_config(teacher.hf | {"num_hidden_layers": len(kept)})
    assert student.weights.keys() == decoder.shapes(student.config).keys()
    assert student.files == teacher.files
    for name, value in student.weights.items():
        match = decoder.LAYER.fullmatch(name)
        source = f"model.layers.{kept[int(match[1])]}.{match[2]}" if match else name
        np.testing.assert_array_equal(value, teacher.weights[source])
    assert teacher.hf == RECORDS["llama-llama3-tied"]["config"]


@pytest.mark.parametrize("case", ["gemma3", "gemma2", "qwen3-sliding", "qwen2-sliding", "mistral"])
@pytest.mark.parametrize("kept", [[0, 3], [1, 2], [2]])
def test_a_kept_layer_keeps_its_window_and_its_frequencies(case, kept):
    teacher = model(case)
    student = cut_layers(teacher, kept)
    assert student.config.windows == tuple(teacher.config.windows[layer] for layer in kept)
    np.testing.assert_array_equal(student.config.frequencies, teacher.config.frequencies[kept])
    assert read_config(json.loads(json.dumps(student.hf))) == student.config


def test_a_student_of_all_layers_is_the_teacher():
    teacher = model("gemma3")
    student = cut_layers(teacher, [0, 1, 2, 3])
    assert student.config == teacher.config
    assert student.weights.keys() == teacher.weights.keys()


@pytest.mark.parametrize("spec", ["layers:0", "layers:5", "layers:0,4", "layers:2,1", "layers:1,1"])
def test_layers_that_the_teacher_lacks_are_refused(spec):
    with pytest.raises(RecipeError, match=r"4 layers|between 0 and 3"):
        make_student(spec, model(), seed=0)


@pytest.mark.parametrize("spec", ["third", "layers:", "layers:1,", "layers:-1", "no/such/folder"])
def test_a_student_that_is_nothing_known_is_refused_with_what_is(spec):
    with pytest.raises(RecipeError, match=r"give half, layers:N, .* a config.json, or a model folder"):
        make_student(spec, model(), seed=0)


def test_a_config_makes_a_fresh_student_with_the_teacher_s_tokenizer(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny.STUDENT_HF))
    teacher = model()
    one, again, other = (make_student(str(path), teacher, seed=seed) for seed in (0, 0, 1))
    assert one.config == tiny.STUDENT
    assert {name: value.shape for name, value in one.weights.items()} == decoder.shapes(tiny.STUDENT)
    assert one.files == teacher.files
    jax.tree.map(np.testing.assert_array_equal, one.weights, again.weights)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not np.array_equal(one.weights[name], other.weights[name])
    assert np.std(one.weights[name]) == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "mamba"}', '{"model_type": "llama"}'])
def test_a_config_that_is_none_is_refused_by_its_name(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ArtifactError, match=r"config.json: not a config.json of a model"):
        make_student(str(path), model(), seed=0)


def test_a_folder_is_a_student_as_it_is(tmp_path):
    student = Model(tiny.STUDENT_HF, tiny.STUDENT, tiny.student_weights(), {"tokenizer.json": b"{}"})
    save(student, tmp_path)
    found = make_student(str(tmp_path), model(), seed=0)
    assert found.config == tiny.STUDENT
    for name, value in found.weights.items():
        np.testing.assert_allclose(value, student.weights[name], rtol=2**-8)  # bfloat16 on disk
