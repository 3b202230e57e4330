"""Preference and completion losses against NumPy, and the align stage on tiny folders, end to end."""

import dataclasses
import json
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from compress.align.loss import (
    answer_log_probabilities,
    loss_of,
    policy_divergence,
    preference_loss,
    sft_loss,
    token_nll,
)
from compress.align.mix import Staged
from compress.align.settings import Align
from compress.align.stage import PairStream, Reference, quantized_base, run
from compress.data.batch import CHOSEN, REJECTED
from compress.data.batches import PairBatches
from compress.data.rows import Rows
from compress.errors import DataError, RecipeError
from compress.models import decoder, read_config
from compress.models.folder import Model, load, save
from compress.models.lora import magnitudes, with_adapters
from compress.progress import Progress
from compress.quantize.quantizers import QUANTIZERS
from compress.settings import Common
from export.quantized import NF4Tensor, QuantizedTensor, QuantSpec
from tests import tiny_training as tiny
from tests.goldens.make_models import draw
from tests.tiny_models import EXEMPLARS, config_of, stacked_of

SCALE, BETA = 2.0, 0.3


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    with tiny.unoptimized():
        yield


@pytest.fixture(scope="module")
def parts():
    """A base with its fresh and its random adapters, pairs with the reference's log-probabilities, compiled losses."""
    base, fresh = tiny.base_and_adapters()
    _, adapters = tiny.base_and_adapters(1)
    reference = jax.jit(lambda rows: answer_log_probabilities(tiny.STUDENT, base, rows))
    return base, fresh, adapters, Reference(reference).fill(tiny.pairs(0))


@pytest.fixture(scope="module")
def dpo():
    return jax.jit(preference_loss(tiny.STUDENT, SCALE, beta=BETA, dropout=0.4))


@pytest.fixture(scope="module")
def sft():
    return jax.jit(sft_loss(tiny.STUDENT, SCALE, dropout=0.4))


def test_targets_alone_have_a_log_probability(parts):
    base, batch = parts[0], tiny.batch(3)
    nll = jax.jit(lambda batch: token_nll(tiny.STUDENT, base, batch))(batch)
    assert nll.shape == (8, tiny.LENGTH - 1)
    np.testing.assert_array_equal(np.asarray(nll)[batch.mask[:, 1:] == 0], 0)
    np.testing.assert_allclose(-nll.sum(1), tiny.dense_log_probability(tiny.STUDENT, base, batch), rtol=1e-4)


def test_at_initialisation_dpo_is_log_two_with_no_margin(parts, dpo):
    base, fresh, _, pairs = parts
    for keys in (None, jax.random.split(jax.random.key(0), 8)):
        total, count, metrics = dpo(fresh, base, pairs, keys)
        assert count == 8
        assert float(total / count) == pytest.approx(math.log(2), rel=1e-6)
        assert float(metrics["margin"][0]) == pytest.approx(0, abs=1e-4)


def test_the_reference_is_the_model_with_its_adapters_off(parts):
    base, fresh, _, pairs = parts
    policy = with_adapters(base, fresh, SCALE)
    run = jax.jit(lambda stacked, rows: answer_log_probabilities(tiny.STUDENT, stacked, rows))
    np.testing.assert_array_equal(run(policy, pairs.rows), run(base, pairs.rows))
    np.testing.assert_allclose(run(base, pairs.rows), [pairs.reference_chosen, pairs.reference_rejected], rtol=1e-5)


@pytest.mark.parametrize("case", EXEMPLARS.values())
def test_a_pair_in_one_row_has_the_log_probabilities_and_gradients_of_two(case):
    config, stacked, rows = config_of(case), stacked_of(case), tiny.pairs(2, rows=4, length=24).rows
    apart = [tiny.alone(rows, side) for side in (CHOSEN, REJECTED)]
    assert all(window is None or window < 24 for window in config.windows)
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4)), jnp.float32)

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def together(layers):
        found = answer_log_probabilities(config, dataclasses.replace(stacked, layers=layers), rows)
        return (weights * found).sum(), found

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def separate(layers):
        one = dataclasses.replace(stacked, layers=layers)
        found = jnp.stack([-token_nll(config, one, batch).sum(1) for batch in apart])
        return (weights * found).sum(), found

    (_, ours), slopes = together(stacked.layers)
    (_, theirs), others = separate(stacked.layers)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    for mine, other in zip(jax.tree.leaves(slopes), jax.tree.leaves(others), strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-4 * np.abs(other).max())


def test_dpo_of_a_model_is_its_definition(parts, dpo):
    base, _, adapters, pairs = parts
    policy = with_adapters(base, adapters, SCALE)
    ratios = [
        ours - theirs
        for ours, theirs in zip(
            tiny.dense_answers(tiny.STUDENT, policy, pairs), tiny.dense_answers(tiny.STUDENT, base, pairs)
        )
    ]
    total, count, metrics = dpo(adapters, base, pairs, None)
    margins = BETA * (ratios[0] - ratios[1])
    assert np.abs(margins).max() > 0.1
    sums = {
        "margin": margins.sum(),
        "accuracy": (margins > 0).sum(),
        "reward_chosen": BETA * ratios[0].sum(),
        "reward_rejected": BETA * ratios[1].sum(),
    }
    assert float(total) == pytest.approx(np.log1p(np.exp(-margins)).sum(), rel=1e-4)
    nll, targets = metrics.pop("cross_entropy")
    chosen, _ = tiny.dense_answers(tiny.STUDENT, policy, pairs)
    learnt = pairs.rows.mask[pairs.rows.branches == CHOSEN].sum()
    assert (float(nll), float(targets)) == (pytest.approx(-chosen.sum(), rel=1e-4), learnt)
    assert {name: float(value) for name, (value, _) in metrics.items()} == pytest.approx(sums, rel=1e-3, abs=1e-3)
    assert {float(weight) for _, weight in metrics.values()} == {float(count)} == {8.0}


def rows_of(tree, rows, total=8):
    """Some rows of a batch, then padding."""

    def fill(leaf):
        empty = np.zeros((total - len(rows), *leaf.shape[1:]), leaf.dtype)
        return np.concatenate([np.asarray(leaf)[rows], empty])

    return jax.tree.map(fill, tree)


def test_rows_that_fill_up_a_batch_count_nothing(parts, dpo, sft):
    base, _, adapters, pairs = parts
    keys = jax.random.split(jax.random.key(0), 8)
    for loss, batch in ((dpo, pairs), (sft, tiny.batch(0))):
        total, count, metrics = loss(adapters, base, batch, keys)
        halves = [
            loss(adapters, base, rows_of(batch, rows), k)
            for rows, k in (([0, 1, 2], keys), ([3, 4, 5, 6, 7], jnp.roll(keys, -3)))
        ]
        assert sum(float(half[1]) for half in halves) == float(count)
        assert sum(float(half[0]) for half in halves) == pytest.approx(float(total), rel=1e-5)
        for name, (value, _) in metrics.items():
            assert sum(float(half[2][name][0]) for half in halves) == pytest.approx(float(value), rel=1e-4, abs=1e-4)
        nothing = loss(adapters, base, rows_of(batch, []), keys)
        assert (float(nothing[0]), float(nothing[1])) == (0, 0)


@pytest.mark.parametrize("name", ["dpo", "sft"])
def test_dropout_depends_on_the_rows_keys_and_not_on_their_batch(name, parts, dpo, sft):
    base, _, adapters, pairs = parts
    loss, batch = (dpo, pairs) if name == "dpo" else (sft, tiny.batch(0))
    keys = jax.random.split(jax.random.key(5), 8)
    whole = float(loss(adapters, base, batch, keys)[0])
    order = np.array([2, 5, 0, 7, 1, 3, 6, 4])
    moved = float(loss(adapters, base, jax.tree.map(lambda leaf: leaf[order], batch), keys[order])[0])
    assert moved == pytest.approx(whole, rel=1e-5)
    assert float(loss(adapters, base, batch, keys[order])[0]) != pytest.approx(whole, rel=1e-4)
    assert float(loss(adapters, base, batch, None)[0]) != pytest.approx(whole, rel=1e-4)


@pytest.mark.parametrize("name", ["dpo", "sft"])
def test_remat_holds_less_and_changes_neither_the_loss_nor_its_gradients(name, parts):
    base, _, adapters, pairs = parts
    batch, keys = (tiny.batch(3) if name == "sft" else pairs), jax.random.split(jax.random.key(0), 8)
    settings = Align(data=(), method=name)

    def of(remat):
        loss = loss_of(dataclasses.replace(settings, remat=remat), tiny.STUDENT, SCALE, dropout=0.4)
        slopes = jax.jit(jax.value_and_grad(lambda adapters: loss(adapters, base, batch, keys)[0]))
        compiled = slopes.lower(adapters).compile()
        return compiled(adapters), compiled.memory_analysis().temp_size_in_bytes

    (again, smaller), (kept, larger) = of(True), of(False)
    assert smaller < larger
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), again, kept)


def test_sft_is_the_cross_entropy_of_the_completions(parts, sft):
    base, _, adapters, _ = parts
    batch = tiny.batch(0)
    total, count, metrics = sft(adapters, base, batch, None)
    policy = with_adapters(base, adapters, SCALE)
    assert float(total) == pytest.approx(-tiny.dense_log_probability(tiny.STUDENT, policy, batch).sum(), rel=1e-4)
    assert float(count) == batch.mask[:, 1:].sum()
    assert list(map(float, metrics["cross_entropy"])) == [float(total), float(count)]


def test_the_policy_s_divergence_is_the_mean_of_whole_distributions(parts):
    base, fresh, adapters, pairs = parts
    run = jax.jit(lambda a, b: policy_divergence(tiny.STUDENT, with_adapters(base, a, SCALE), base, b, chunk=16))
    assert float(run(fresh, pairs.rows)[0]) == pytest.approx(0, abs=1e-4)
    total, count = run(adapters, pairs.rows)
    policy = with_adapters(base, adapters, SCALE)
    wanted = 0.0
    for batch in (tiny.alone(pairs.rows, side) for side in (CHOSEN, REJECTED)):
        ours, theirs = (tiny.numpy_log_softmax(tiny.logits_of(tiny.STUDENT, m, batch))[:, :-1] for m in (policy, base))
        wanted += ((np.exp(ours) * (ours - theirs)).sum(-1) * np.asarray(batch.mask)[:, 1:]).sum()
    assert float(count) == pairs.rows.mask.sum()
    assert float(total) == pytest.approx(wanted, rel=1e-3)
    assert float(total / count) > 0.01


def sums(rows):
    """Of the ids of both answers' targets."""
    return np.stack([(rows.tokens * rows.mask * (rows.branches == side)).sum(1) for side in (CHOSEN, REJECTED)])


class Counting:
    """Log-probabilities that tell what they were asked for."""

    def __init__(self):
        self.calls = 0

    def __call__(self, rows):
        self.calls += 1
        return -sums(rows)


def test_the_reference_is_computed_once_a_pair():
    ask = Counting()
    reference = Reference(ask)
    one, two = tiny.pairs(0), tiny.pairs(1)
    mixed = jax.tree.map(lambda a, b: np.concatenate([a[:4], b[4:]]), two, one)
    filled = [reference.fill(pairs) for pairs in (one, two, mixed, one)]
    assert ask.calls == 2  # for the first two batches
    for pairs in filled:
        found = [pairs.reference_chosen, pairs.reference_rejected]
        np.testing.assert_array_equal(found, -sums(pairs.rows))
    assert filled[0].rows is one.rows


def test_pairs_that_differ_in_their_targets_alone_are_two_pairs():
    ask = Counting()
    pairs = tiny.pairs(0)
    fewer = dataclasses.replace(pairs.rows, mask=np.where(np.arange(2 * tiny.LENGTH) > 6, 0, pairs.rows.mask))
    assert (fewer.mask != pairs.rows.mask).any()
    reference = Reference(ask)
    for one in (pairs, dataclasses.replace(pairs, rows=fewer)):
        reference.fill(one)
    assert ask.calls == 2


def test_a_pair_is_the_same_however_much_padding_follows_it():
    ask = Counting()
    pairs = tiny.pairs(0)
    padded = jax.tree.map(lambda x: np.pad(x, [(0, 0), (0, 5)]), pairs.rows)
    reference = Reference(ask)
    for one in (pairs, dataclasses.replace(pairs, rows=padded)):
        reference.fill(one)
    assert ask.calls == 1


# The stage.

COLOURS, ANIMALS = ["red", "green", "blue", "white", "black", "grey", "brown", "pink"], ["cat", "dog", "cow", "fox"]
PLAN = {"steps": 12, "learning_rate": 0.02, "warmup": 0, "sequence_length": 12, "valid_every": 6}
ADAPTERS = {"rank": 4, "alpha": 8.0, "group_size": 32}


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    """A tokenizer of words."""
    backend = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    backend.train_from_iterator([" ".join([*COLOURS, *ANIMALS, "yes", "no", "is", "it", "a"])], trainer)
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    return {"tokenizer.json": backend.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, files):
    """A float model's folder and the same one quantized."""
    root = tmp_path_factory.mktemp("models")
    hf = tiny.STUDENT_HF | {"vocab_size": 24}
    config = read_config(hf)
    model = Model(hf, config, draw(decoder.shapes(config), 3), files)
    save(model, root / "float")
    save(quantized_base(load(root / "float"), Align(data=(), **ADAPTERS)), root / "quantized")
    return root


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Pairs whose answer to 'is it …' is always yes, and the same as completions; others are held out."""
    root = tmp_path_factory.mktemp("data")
    prompts = [f"is it a {colour} {animal}" for colour in COLOURS for animal in ANIMALS]
    for part, chosen in {"train": prompts[:24], "valid": prompts[24:]}.items():
        rows = [{"prompt": prompt, "chosen": "yes", "rejected": "no", "completion": "yes"} for prompt in chosen]
        (root / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def align(model, data, out, method, **options) -> tuple[dict, dict]:
    """Run the stage; its facts and its trace."""
    settings = Align(
        data=(data / "train.jsonl",),
        valid=(data / "valid.jsonl",),
        model=str(model),
        method=method,
        **{**PLAN, **ADAPTERS, **({"kl_limit": 0.0} if method == "dpo" else {}), **options},
    )
    facts = run(settings, Common(out=out, progress=Progress(quiet=True)))
    return facts, json.loads((out / "training.json").read_text())


@pytest.fixture(scope="module")
def aligned(folders, data, tmp_path_factory):
    """Both methods from both folders: on all eight devices from the float one, on one device from the quantized."""
    root, done = tmp_path_factory.mktemp("aligned"), {}
    with pytest.MonkeyPatch.context() as patch:
        for base in ("float", "quantized"):
            if base == "quantized":
                patch.setattr("compress.align.stage.mesh_of_devices", lambda shape: None)
            for method in ("dpo", "sft"):
                out = root / f"{base}-{method}"
                done[base, method] = (out, *align(folders / base, data, out, method))
    return done


cases = pytest.mark.parametrize("case", [(b, m) for b in ("float", "quantized") for m in ("dpo", "sft")], ids="-".join)


@cases
def test_what_can_be_learnt_from_the_training_rows_is_learnt_of_others(aligned, case):
    _, facts, trace = aligned[case]
    before, after = facts["validation"]["before"], facts["validation"]["after"]
    assert (before["step"], after["step"]) == (0, facts["best_step"])
    assert after["loss"] < 0.5 * before["loss"]
    assert before["kl_to_reference"] == pytest.approx(0, abs=1e-5)
    assert after["kl_to_reference"] > 0.01
    assert len(trace["steps"]) == facts["steps"] == PLAN["steps"]
    assert [row["step"] for row in trace["validations"]] == [0, 6, 12]
    if case[1] == "dpo":
        assert before["loss"] == pytest.approx(math.log(2), rel=1e-5)
        assert after["accuracy"] == 1.0
        assert after["margin"] > 0


@pytest.mark.parametrize("method", ["dpo", "sft"])
def test_a_base_that_was_quantized_before_trains_as_one_quantized_by_the_stage(aligned, method):
    one, other = (aligned[base, method][2]["steps"] for base in ("float", "quantized"))
    for ours, theirs in zip(one, other, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-2, abs=2e-3)


@cases
def test_the_base_lies_packed_beside_peft_adapters(aligned, folders, case):
    out, _, _ = aligned[case]
    model = load(out)
    assert all(isinstance(model.weights[name], QuantizedTensor) for name in decoder.linears(model.config))
    jax.tree.map(np.testing.assert_array_equal, model.weights, load(folders / "quantized").weights)
    adapters = json.loads((out / "adapter_config.json").read_text())
    assert (adapters["peft_type"], adapters["r"], adapters["lora_alpha"]) == ("LORA", 4, 8.0)
    assert model.adapters is not None
    assert {name.rpartition(".")[0] + ".weight" for name in model.adapters.weights} == decoder.linears(
        model.config
    ).keys()
    assert any(np.any(value) for name, value in model.adapters.weights.items() if name.endswith("lora_B"))


@pytest.mark.parametrize("base", ["float", "quantized"])
def test_scores_of_held_out_pairs_are_those_of_the_folder_written(aligned, data, base):
    out, facts, _ = aligned[base, "dpo"]
    scores = json.loads((out / "preference.json").read_text())
    assert scores.pop("beta") == 0.1
    model = load(out)
    rows = Rows(data / "valid.jsonl", kinds=("preference",))
    (pairs,) = PairBatches(rows, model.tokenizer, size=8, length=PLAN["sequence_length"], epochs=1, shuffle=False)
    for name, one in {"": model.merged(), "reference_": dataclasses.replace(model, adapters=None)}.items():
        stacked = decoder.stack(one.config, one.weights)
        for side, found in zip(("chosen", "rejected"), tiny.dense_answers(one.config, stacked, pairs)):
            np.testing.assert_allclose(scores[name + side], found, rtol=2e-3, atol=2e-3)
    margins = np.subtract(scores["chosen"], scores["reference_chosen"]) - np.subtract(
        scores["rejected"], scores["reference_rejected"]
    )
    assert 0.1 * margins.mean() == pytest.approx(facts["validation"]["after"]["margin"], rel=1e-3)


def test_a_stream_of_pairs_continues_exactly_with_its_mix(folders, data):
    tokenizer = load(folders / "float").tokenizer

    def made():
        rows = Rows(data / "train.jsonl", kinds=("preference",))
        batches = PairBatches(rows, tokenizer, size=4, length=12, seed=1, sample=0.5, epochs=3)
        mix = Staged()
        return PairStream(batches, Reference(Counting()), mix), mix

    def handed(stream, mix, steps):
        for number in steps:
            yield next(stream)
            if number % 2:
                mix.observe(0.5)

    whole = list(handed(*made(), range(9)))
    assert [pairs.weight.tolist() for pairs in whole[::2]] == [[w] * 4 for w in (0, 0.25, 0.5, 0.75, 1)]
    for at in range(9):
        first, mix = made()
        list(handed(first, mix, range(at)))
        second, mix = made()
        second.restore(json.loads(json.dumps(first.state())))
        jax.tree.map(np.testing.assert_array_equal, list(handed(second, mix, range(at, 9))), whole[at:])


def test_a_method_without_a_reference_asks_for_none(folders, data):
    rows = Rows(data / "train.jsonl", kinds=("preference",))
    pairs = next(PairStream(PairBatches(rows, load(folders / "float").tokenizer, size=4, length=12), None, None))
    assert not pairs.reference_chosen.any() and not pairs.reference_rejected.any() and (pairs.weight == 1).all()


def test_a_staged_mix_begins_with_sft_and_says_what_pairs_weigh(folders, data, tmp_path, monkeypatch):
    monkeypatch.setattr("compress.align.stage.mesh_of_devices", lambda shape: None)
    asked = []
    fill = Reference.fill
    monkeypatch.setattr(Reference, "fill", lambda self, pairs: asked.append(1) or fill(self, pairs))
    options = {"mix": "staged", "sample": 0.5, "sft_weight": 0.1, "valid_every": 2, "steps": 8}
    facts, trace = align(folders / "quantized", data, tmp_path / "out", "simpo", **options)
    weights = [row["preference_weight"] for row in trace["validations"]]
    assert weights[:2] == [0, 0.25] and set(weights) <= {0, 0.25, 0.5, 0.75, 1}
    first, second = trace["steps"][:2]
    assert first["loss"] == pytest.approx(first["cross_entropy"], rel=1e-5)  # answers of one length
    assert second["loss"] < first["loss"]
    assert facts["validation"]["after"]["margin"] > facts["validation"]["before"]["margin"]
    assert len(asked) == 2  # the one batch of held-out pairs, for validations and for the report
    assert json.loads((tmp_path / "out" / "preference.json").read_text())["beta"] == 1.0


def test_adapters_that_land_are_scored_as_rounding_to_nearest_leaves_them(folders, data, tmp_path, monkeypatch):
    monkeypatch.setattr("compress.align.stage.mesh_of_devices", lambda shape: None)
    _, trace = align(folders / "quantized", data, tmp_path / "out", "dpo", landing="fake_quantize", dropout=0.0)
    assert trace["validations"][-1]["loss"] < 0.8 * trace["validations"][0]["loss"]
    scores = json.loads((tmp_path / "out" / "preference.json").read_text())
    base, merged = load(tmp_path / "out"), load(tmp_path / "out").merged()
    spec = base.weights[next(iter(decoder.linears(base.config)))].spec
    landed = {name: QUANTIZERS["rtn"].quantize(merged.weights[name], spec) for name in decoder.linears(base.config)}
    rows = Rows(data / "valid.jsonl", kinds=("preference",))
    (pairs,) = PairBatches(rows, base.tokenizer, size=8, length=PLAN["sequence_length"], epochs=1, shuffle=False)
    chosen, _ = tiny.dense_answers(base.config, decoder.stack(base.config, merged.weights | landed), pairs)
    np.testing.assert_allclose(scores["chosen"], chosen, rtol=2e-3, atol=2e-3)


def test_learnt_lengths_of_rows_are_in_the_folder_as_they_were_scored(folders, data, tmp_path, monkeypatch):
    monkeypatch.setattr("compress.align.stage.mesh_of_devices", lambda shape: None)
    _, trace = align(folders / "quantized", data, tmp_path / "out", "dpo", dora=True)
    before, after = trace["validations"][0], trace["validations"][-1]
    assert after["loss"] < 0.5 * before["loss"]
    assert before["kl_to_reference"] == pytest.approx(0, abs=1e-5)
    model = load(tmp_path / "out")
    assert model.adapters is not None and model.adapters.dora
    begun = magnitudes(model.weights, model.adapters.weights)
    assert all(np.any(model.adapters.weights[name] != value) for name, value in begun.items())
    scores = json.loads((tmp_path / "out" / "preference.json").read_text())
    rows = Rows(data / "valid.jsonl", kinds=("preference",))
    (pairs,) = PairBatches(rows, model.tokenizer, size=8, length=PLAN["sequence_length"], epochs=1, shuffle=False)
    merged = model.merged()
    chosen, _ = tiny.dense_answers(merged.config, decoder.stack(merged.config, merged.weights), pairs)
    np.testing.assert_allclose(scores["chosen"], chosen, rtol=2e-3, atol=2e-3)
    with pytest.raises(RecipeError, match="has no magnitudes"):
        Align(data=(), dora=True, landing="fake_quantize", dropout=0.0)


def test_adapters_learn_on_a_base_in_nf4_which_stays_as_it_was(data, files, tmp_path, monkeypatch):
    monkeypatch.setattr("compress.align.stage.mesh_of_devices", lambda shape: None)
    hf = tiny.STUDENT_HF | {"vocab_size": 24, "hidden_size": 64}
    config = read_config(hf)
    save(Model(hf, config, draw(decoder.shapes(config), 3), files), tmp_path / "float")
    options = {"base": "nf4", "bits": 4, "group_size": 64}
    _, trace = align(tmp_path / "float", data, tmp_path / "out", "sft", **options)
    assert trace["validations"][-1]["loss"] < 0.7 * trace["validations"][0]["loss"]
    base, before = load(tmp_path / "out"), quantized_base(load(tmp_path / "float"), Align(data=(), **options))
    assert {name for name, value in base.weights.items() if isinstance(value, NF4Tensor)} == {*decoder.linears(config)}
    jax.tree.map(np.testing.assert_array_equal, base.weights, before.weights)
    assert base.adapters is not None and not base.merged().is_quantized
    again = dataclasses.replace(base, adapters=None)
    assert quantized_base(again, Align(data=(), bits=8)) is again
    with pytest.raises(RecipeError, match=r"rounds to integers.*NF4"):
        quantized_base(again, Align(data=(), landing="fake_quantize", dropout=0.0))
    with pytest.raises(RecipeError, match=r"bits = 8.*nf4 has 4 bits"):
        Align(data=(), base="nf4", bits=8)


def test_dropping_inputs_that_are_not_the_adapters_alone_is_refused():
    with pytest.raises(RecipeError, match=r"dropout = 0.05.* set dropout = 0"):
        Align(data=(), landing="fake_quantize")


def test_completions_have_no_preference_scores(aligned):
    assert not (aligned["float", "sft"][0] / "preference.json").exists()


@pytest.mark.parametrize("pack_embedding", [False, True])
def test_an_aligned_model_is_a_base_again(aligned, pack_embedding):
    """Its adapters are merged, which makes floats of its linears, and these are quantized anew."""
    model = load(aligned["float", "sft"][0]).merged()
    assert not model.is_quantized
    if pack_embedding:
        packed = QUANTIZERS["rtn"].quantize(model.weights[decoder.EMBEDDING], QuantSpec(8, 32))
        model = dataclasses.replace(model, weights=model.weights | {decoder.EMBEDDING: packed})
    base = quantized_base(model, Align(data=(), **ADAPTERS))
    assert all(isinstance(base.weights[name], QuantizedTensor) for name in decoder.linears(model.config))
    assert base.weights[decoder.EMBEDDING] is model.weights[decoder.EMBEDDING]


def test_a_group_that_does_not_divide_is_refused_and_nothing_is_written(folders, data, tmp_path):
    with pytest.raises(RecipeError, match=r"group_size = 48 does not divide .*model.layers.0.*--group-size 32"):
        align(folders / "float", data, tmp_path / "out", "dpo", group_size=48)
    assert list(tmp_path.iterdir()) == []


def test_rows_of_another_kind_are_refused_by_line_and_nothing_is_written(folders, data, tmp_path):
    (tmp_path / "train.jsonl").write_text('{"prompt": "is it a red cat", "completion": "yes"}\n')
    (tmp_path / "valid.jsonl").write_bytes((data / "valid.jsonl").read_bytes())
    with pytest.raises(DataError, match=r"train.jsonl:1: lacks column 'chosen' and 'rejected'"):
        align(folders / "float", tmp_path, tmp_path / "out", "dpo")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [{}, {"mix": "staged", "valid_every": 2}], ids=["dpo", "staged"])
def test_an_alignment_that_is_killed_ends_as_one_that_was_not(folders, data, tmp_path, monkeypatch, options):
    """The reference's values are the first ones, though other batches would have computed them."""
    monkeypatch.setattr("compress.align.stage.mesh_of_devices", lambda shape: None)
    options = {"save_every": 3, "kl_limit": 0.0, **options}
    align(folders / "quantized", data, tmp_path / "whole", "dpo", **options)

    told = []

    def killed(stage, done, total, **figures):
        told.append(done)
        if told == list(range(1, 12)):
            raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "listener", staticmethod(killed))
    with pytest.raises(KeyboardInterrupt):
        align(folders / "quantized", data, tmp_path / "killed", "dpo", **options)
    assert [path.name for path in tmp_path.glob("killed*")] == ["killed.checkpoints"]
    align(folders / "quantized", data, tmp_path / "killed", "dpo", **options)
    assert told[11:] == [10, 11, 12]
    for name in ("adapter_model.safetensors", "preference.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert [path.name for path in tmp_path.glob("killed*")] == ["killed"]


def test_a_policy_too_far_from_its_reference_stops_or_is_pulled_back(folders, data, tmp_path, monkeypatch):
    monkeypatch.setattr("compress.align.stage.mesh_of_devices", lambda shape: None)
    options = {"valid_every": 1, "kl_limit": 0.01, "learning_rate": 2e-3}
    facts, trace = align(folders / "quantized", data, tmp_path / "stopped", "dpo", **options)
    (event,) = trace["events"]
    assert event["event"] == "stopped"
    assert "over the limit of 0.01" in event["why"]
    assert trace["validations"][-1]["kl_to_reference"] > 0.01
    assert facts["validation"]["after"]["kl_to_reference"] <= 0.01
    assert 0 < facts["best_step"] < facts["steps"] < PLAN["steps"]
    _, raised = align(folders / "quantized", data, tmp_path / "raised", "dpo", **options, on_kl="raise_beta")
    assert [event["scale"] for event in raised["events"]] == [2.0 ** (i + 1) for i in range(len(raised["events"]))]
    assert raised["events"][0]["step"] == event["step"]
    assert len(raised["steps"]) == PLAN["steps"]
    with pytest.raises(DataError, match=r"step 1: KL.* over the limit of 1e-09, and no weights from before"):
        align(folders / "quantized", data, tmp_path / "at once", "dpo", valid_every=1, kl_limit=1e-9)
