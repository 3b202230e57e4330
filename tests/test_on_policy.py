"""On-policy distillation: what the student is asked, what it answers, what is learned from that, and its resumption."""

import dataclasses
import json
import os
import signal
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress import cli, plan
from compress.data.batch import Batch
from compress.data.batches import Batches
from compress.data.rows import Rows
from compress.distill import stage
from compress.distill.loss import distillation_loss
from compress.distill.on_policy import (
    OnPolicyBatches,
    PromptBatches,
    Prompts,
    answered,
    on_policy_batches,
    on_policy_loss,
)
from compress.distill.settings import Distill
from compress.distill.temperature import Tempered, TemperedBatches
from compress.errors import DataError, RecipeError
from compress.generate.sampling import Sampling
from compress.models.folder import load
from compress.train.fit import Resumable, fit
from compress.train.mesh import make_mesh
from compress.train.step import FitSettings, row_keys
from tests import tiny_training as tiny
from tests.tiny_run import rows, write_jsonl, write_model

ROOM, NEW, STOP = 5, 7, (3, 4, 5, 6, 7, 8, 9, 10)


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    with tiny.unoptimized():
        yield


def prompts(seed, size=8):
    """Random prompts; the last row has none."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, ROOM + 1, size).astype(np.int32)
    lengths[-1] = 0
    return Prompts(rng.integers(0, tiny.VOCAB, (size, ROOM)).astype(np.int32), lengths)


# What is asked and when.


class Counted:
    """Endless numbers with a name."""

    def __init__(self, name):
        self.name, self.number = name, 0

    def __iter__(self):
        return self

    def __next__(self):
        self.number += 1
        return self.name, self.number

    def state(self):
        return {"number": self.number}

    def restore(self, state):
        self.number = state["number"]


def mixed(share, seed=0):
    return OnPolicyBatches(Counted("data"), Counted("prompts"), share, seed)


@settings(max_examples=30, deadline=None)
@given(share=st.floats(0, 1), seed=st.integers(0, 2**31 - 1), taken=st.integers(0, 40))
def test_which_steps_are_on_policy_follows_from_the_seed_and_goes_on_where_it_was(share, seed, taken):
    stream = mixed(share, seed)
    whole = [next(stream) for _ in range(60)]
    draws = [np.random.default_rng([seed, number]).random() for number in range(60)]
    assert [name == "prompts" for name, _ in whole] == [draw < share for draw in draws]
    for name in ("data", "prompts"):
        numbers = [number for kind, number in whole if kind == name]
        assert numbers == list(range(1, len(numbers) + 1))
    one, two = mixed(share, seed), mixed(share, seed)
    assert isinstance(one, Resumable)
    assert [next(one) for _ in range(taken)] == whole[:taken]
    two.restore(json.loads(json.dumps(one.state())))
    assert [next(two) for _ in range(60 - taken)] == whole[taken:]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_share_of_steps_is_what_was_asked(share):
    stream = mixed(share)
    found = np.mean([next(stream)[0] == "prompts" for _ in range(2000)])
    assert found == pytest.approx(share, abs=0.0 if share in (0, 1) else 0.03)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "teacher")


def asked(path, teacher, length=16, **options):
    tokenizer = load(teacher).tokenizer
    stream = PromptBatches(Rows(path), tokenizer, size=4, length=length, epochs=1, shuffle=False, **options)
    found = [batch.tokens[row, :count].tolist() for batch in stream for row, count in enumerate(batch.lengths) if count]
    return found, tokenizer, stream


def test_the_prompt_of_a_completion_is_all_of_it_or_its_end(tmp_path, teacher):
    questions = ["the people", " ".join(rows(4, 5))]
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": text, "completion": " owe"} for text in questions])
    found, tokenizer, _ = asked(path, teacher)
    short, long = (tokenizer.with_bos(tokenizer.encode(text)) for text in questions)
    assert len(long) > 16
    assert found == [short, [long[0], *long[-15:]]]


def test_the_prompt_of_a_text_is_the_first_half_of_each_of_its_pieces(tmp_path, teacher):
    text = " ".join(rows(4, 5))
    found, tokenizer, stream = asked(write_jsonl(tmp_path / "d.jsonl", [{"text": text}]), teacher)
    ids = tokenizer.with_bos(tokenizer.encode(text))
    pieces = [ids[at : at + 16] for at in range(0, len(ids), 16)]
    assert len(pieces) > 2
    assert found == [piece[: len(piece) // 2] for piece in pieces if len(piece) > 1]
    assert stream.efficiency == sum(map(len, found)) / (-(-len(found) // 4) * 4 * 16)


def test_a_row_without_a_prompt_is_left_out_and_counted(tmp_path, teacher):
    folder = tmp_path / "teacher"
    folder.mkdir()
    for file in teacher.iterdir():
        (folder / file.name).write_bytes(file.read_bytes().replace(b'"add_bos_token": true', b'"add_bos_token": false'))
    values = [{"prompt": "", "completion": "x"}, {"prompt": "the", "completion": "x"}]
    found, tokenizer, stream = asked(write_jsonl(tmp_path / "d.jsonl", values), folder)
    assert found == [tokenizer.encode("the")]
    assert stream.rows.quarantine.reasons == {"no prompt in 16 tokens": 1}
    with pytest.raises(DataError, match=r"none of the 1 rows is of use; .*: no prompt in 16 tokens"):
        asked(write_jsonl(tmp_path / "e.jsonl", values[:1]), folder)


# What is answered.


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31 - 1))
def test_prompts_and_answers_are_joined_and_the_answers_are_the_targets(seed):
    rng = np.random.default_rng(seed)
    question = prompts(seed, 4)
    lengths = rng.integers(1, NEW + 1, 4)
    new = np.where(np.arange(NEW) < lengths[:, None], rng.integers(0, tiny.VOCAB, (4, NEW)), -1)
    batch = answered(question, jnp.asarray(new, jnp.int32))
    assert batch.tokens.shape == (4, ROOM + NEW)
    for row in range(4):
        before, after = question.lengths[row], lengths[row] if question.lengths[row] else 0
        end = before + after
        joined = [*question.tokens[row, :before], *new[row, :after]]
        assert batch.tokens[row, :end].tolist() == joined
        assert batch.segments[row].tolist() == [1] * end + [0] * (ROOM + NEW - end)
        assert batch.positions[row].tolist() == [*range(end), *[0] * (ROOM + NEW - end)]
        assert batch.mask[row].tolist() == [0] * before + [1] * after + [0] * (ROOM + NEW - end)


OWN = distillation_loss(tiny.STUDENT, tiny.TEACHER, temperature=1.0, alpha=1.0, chunk=16)


def loss_of(temperature=1.0, own=OWN, new=NEW, stop=STOP):
    data = distillation_loss(tiny.STUDENT, tiny.TEACHER, temperature=1.0, alpha=0.5, chunk=16)
    options = {"new": new, "stop": stop, "cast": lambda student: student}
    return on_policy_loss(data, own, tiny.STUDENT, sampling=Sampling(temperature), **options)


def shown(temperature=1.0):
    """A loss that hands on what the student has answered."""

    def show(trainable, frozen, batch, keys):
        return batch, batch.mask.sum(), {"cross_entropy": (0, 0)}

    return jax.jit(loss_of(temperature, show))


@pytest.fixture(scope="module")
def answers():
    """Batches, what the student has answered to them, with which keys, and what was logged."""
    show, found = shown(0.7), []
    for step in range(3):
        keys = row_keys(9, step, 8)
        found.append((prompts(step), keys, *show(tiny.student(), None, prompts(step), keys)))
    return found


def test_each_token_is_drawn_from_the_student_s_distribution_at_the_temperature(answers):
    """Teacher-forced: one whole forward pass over the answers says what must have been drawn at every place."""
    seen = ended = 0
    for question, keys, batch, count, metrics in answers:
        logits = np.asarray(tiny.logits_of(tiny.STUDENT, tiny.student(), batch))
        tokens, mask = np.asarray(batch.tokens), np.asarray(batch.mask)
        for row, length in enumerate(question.lengths):
            places = np.flatnonzero(mask[row])
            drawn = [
                int(jax.random.categorical(jax.random.fold_in(keys[row], n), logits[row, at - 1] / 0.7))
                for n, at in enumerate(places)
            ]
            assert tokens[row, places].tolist() == drawn
            # It goes on until a token ends it or there is no room, and does not begin without a prompt.
            ends = [token in STOP for token in drawn]
            assert not any(ends[:-1])
            assert len(drawn) == (NEW if length and not any(ends) else len(drawn) if length else 0)
            assert places.tolist() == [*range(length, length + len(drawn))]
            seen, ended = seen + len(drawn), ended + sum(ends)
        assert count == mask.sum()
        assert list(metrics) == ["ended"]
    assert seen > 50
    assert ended > 3
    assert sum(int(metrics["ended"][0]) for *_, metrics in answers) == ended
    assert {int(metrics["ended"][1]) for *_, metrics in answers} == {7}  # rows with a prompt


def test_an_answer_depends_on_its_prompt_and_key_and_not_on_the_other_rows(answers):
    question, keys, batch, *_ = answers[0]
    order = np.random.default_rng(0).permutation(8)
    moved, *_ = shown(0.7)(tiny.student(), None, Prompts(*(leaf[order] for leaf in question)), keys[order])
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, np.asarray(b)[order]), moved, batch)


def test_a_model_that_names_no_end_answers_to_the_last_token():
    show = jax.jit(loss_of(own=lambda t, f, batch, keys: (batch.mask.sum(1), 0, {}), stop=()))
    lengths, _, metrics = show(tiny.student(), None, prompts(1), row_keys(0, 1, 8))
    assert lengths.tolist() == [NEW] * 7 + [0]
    assert metrics["ended"][0] == 0


# What is learned from it.


def graded(loss):
    def run(trainable, frozen, batch, keys):
        total, count, metrics = loss(trainable, frozen, batch, keys)
        return total, (count, metrics)

    return jax.jit(jax.value_and_grad(run, has_aux=True))


def test_the_loss_is_the_divergence_on_the_sampled_tokens_with_no_gradient_through_the_sampling():
    question, keys = prompts(5), row_keys(1, 2, 8)
    batch, *_ = shown()(tiny.student(), None, question, keys)
    tau = 3.0
    theirs, ours = (
        tiny.numpy_log_softmax(np.asarray(tiny.logits_of(config, stacked, batch), np.float64)[..., : tiny.VOCAB] / tau)
        for config, stacked in ((tiny.TEACHER, tiny.teacher()), (tiny.STUDENT, tiny.student()))
    )
    kl = tau**2 * (np.exp(theirs) * (theirs - ours)).sum(-1)[:, :-1]
    wrap = lambda b: Tempered(b, np.full(8, tau, np.float32))  # noqa: E731
    (total, (count, metrics)), slope = graded(loss_of())(tiny.student(), tiny.teacher(), wrap(question), keys)
    mask = np.asarray(batch.mask)[:, 1:]
    assert count == mask.sum() > 0
    assert total == pytest.approx((kl * mask).sum(), rel=1e-4)
    assert set(metrics) == {"divergence", "ended"}
    # The gradient is that of the same loss on the same text, had it come from elsewhere.
    fixed = jax.tree.map(np.asarray, batch)
    (same, _), expected = graded(OWN)(tiny.student(), tiny.teacher(), wrap(fixed), None)
    assert total == pytest.approx(float(same), rel=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), slope, expected)


def test_batches_of_data_have_the_loss_of_the_data():
    data, batch = distillation_loss(tiny.STUDENT, tiny.TEACHER, temperature=1.0, alpha=0.5, chunk=16), tiny.batch(3)
    found, wanted = (jax.jit(loss)(tiny.student(), tiny.teacher(), batch, None) for loss in (loss_of(), data))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


PLAN = FitSettings(steps=40, learning_rate=1e-2, warmup_steps=2, global_batch=8, rebound=0.0)


def trained(plan=PLAN, mesh=None):
    """A run of prompts alone."""
    stream = (prompts(number) for number in range(plan.steps))
    return fit(loss_of(), tiny.student(), tiny.teacher(), stream, plan, mesh=mesh)


def test_on_policy_training_brings_the_student_s_own_text_nearer_to_its_teacher():
    weights, trace = trained()
    loss = jax.jit(loss_of())

    def held_out(student):
        found = [loss(student, tiny.teacher(), prompts(1000 + n), row_keys(8, n, 8)) for n in range(8)]
        return sum(float(total) for total, *_ in found) / sum(float(count) for _, count, _ in found)

    before, after = held_out(tiny.student()), held_out(weights)
    assert after < 0.8 * before
    assert all(0 <= row["ended"] <= 1 for row in trace.steps)


def test_a_mesh_that_takes_the_rows_in_parts_answers_the_same():
    plan = FitSettings(steps=2, learning_rate=1e-3, warmup_steps=1, global_batch=8, rebound=0.0)
    one, two = trained(plan), trained(dataclasses.replace(plan, per_device_batch=1), make_mesh(2, 2, 2))
    for ours, theirs in zip(one[1].steps, two[1].steps, strict=True):
        assert ours["count"] == theirs["count"]  # the same answers
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-4)
        assert ours["ended"] == theirs["ended"]


# The command.

TRAIN = (
    "--teacher teacher --data train.jsonl --device cpu --sequence-length 32 --json --student half --steps 8 "
    "--global-batch 4 --valid-every 4 --warmup 1 --on-policy-tokens 8"
)


@pytest.fixture
def world(tmp_path, monkeypatch, teacher):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stage, "mesh_of_devices", lambda shape: None)
    monkeypatch.setattr(plan, "mesh_of_devices", lambda shape: None)
    (tmp_path / "teacher").symlink_to(teacher)
    write_jsonl(tmp_path / "train.jsonl", [{"text": text} for text in rows(60, 1)])
    return tmp_path


def rows_of(folder):
    found = json.loads((folder / "training.json").read_text())
    return [{k: v for k, v in row.items() if k != "seconds"} for row in (*found["validations"], *found["steps"])]


def test_a_run_that_was_killed_ends_bit_for_bit_as_one_that_was_not(world, monkeypatch, capsys):
    command = f"distill {TRAIN} --on-policy 0.5 --save-every 2 --temperature-end 1 --hidden 1".split()
    assert cli.main([*command, "--out", "whole"]) == 0
    result = json.loads(capsys.readouterr().out)
    steps = [row for row in rows_of(world / "whole") if "gradient_norm" in row]
    sampled = [row for row in steps if "ended" in row]
    assert 0 < len(sampled) < len(steps) == 8
    assert result["on_policy"] == {"steps": len(sampled), "ended": np.mean([row["ended"] for row in sampled])}
    assert [("cross_entropy" in row) for row in steps] == [row not in sampled for row in steps]
    assert all(row["count"] <= 4 * 8 for row in sampled)
    take, count = TemperedBatches.__next__, []

    def interrupted(stream):
        count.append(1)
        if len(count) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return take(stream)

    monkeypatch.setattr(TemperedBatches, "__next__", interrupted)
    assert cli.main([*command, "--out", "halves"]) == 75
    monkeypatch.setattr(TemperedBatches, "__next__", take)
    assert cli.main([*command, "--out", "halves"]) == 0
    assert rows_of(world / "halves") == rows_of(world / "whole")
    name = "model.safetensors"
    assert (world / "halves" / name).read_bytes() == (world / "whole" / name).read_bytes()


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_what_is_skipped_is_counted_once(world, teacher, share):
    write_jsonl(world / "some.jsonl", [{"text": "the"}, {"body": 1}, *({"text": text} for text in rows(9, 1))])
    tokenizer = load(teacher).tokenizer
    data = Batches(Rows("some.jsonl", bad_rows="skip"), tokenizer, size=2, length=32)
    settings = Distill(teacher="t", data=(), on_policy=share, on_policy_tokens=8, sequence_length=32)
    stream = on_policy_batches(data, settings)
    kinds = {type(next(stream)) for _ in range(20)}
    assert kinds == ({Batch, Prompts} if share < 1 else {Prompts})
    assert (data.rows.quarantine.read, data.rows.quarantine.skipped) == (11, 1)


def test_a_plan_counts_the_program_that_samples(world, capsys, monkeypatch):
    table = '[distill]\nteacher = "teacher"\ndata = ["train.jsonl"]\nsequence_length = 32\non_policy_tokens = 8\n'
    (world / "recipe.toml").write_text(f'device = "cpu"\n{table}')
    batches = []
    monkeypatch.setattr(plan, "held", lambda function, *arguments: batches.append(arguments[2:]) or 1)
    assert cli.main(["plan", "recipe.toml", "--json", "--set", "distill.on_policy=0.5"]) == 0
    (_, asked, *_), (checks,) = batches
    assert jax.tree.map(lambda leaf: leaf.shape, asked) == Prompts((8, 24), (8,))
    assert checks.tokens.shape == (8, 32)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"teacher_cache": Path("c")}, "teacher_cache knows nothing of what the student will say"),
        ({"on_policy_tokens": 511}, "on_policy_tokens = 511 leaves no prompt in sequence_length = 512"),
    ],
)
def test_what_does_not_go_together_is_refused(options, said):
    with pytest.raises(RecipeError, match=said):
        Distill(teacher="t", data=(), on_policy=0.5, **options)
    Distill(teacher="t", data=(), **options)


def test_a_student_with_tokens_that_its_teacher_lacks_is_refused():
    from compress.distill import loss

    given = Distill(teacher="t", data=(), on_policy=0.5)
    with pytest.raises(RecipeError, match="the student may say 104 tokens and the teacher reads 96"):
        loss.loss_of(given, tiny.TEACHER, tiny.STUDENT, jnp.float32)
