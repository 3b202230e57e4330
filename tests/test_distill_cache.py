"""A cached teacher: what is kept against its definition, training from it against training beside the teacher."""

import dataclasses
import json
import os
import signal
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from compress import cli, plan
from compress.data.batches import Batches
from compress.data.rows import Rows
from compress.distill import cache_stage, stage
from compress.distill.buckets import log_buckets, top_buckets
from compress.distill.cache import Cached, CachedBatches, TeacherCache, key_of, segments_of
from compress.distill.loss import cached_loss, distillation_loss, top_k_loss
from compress.distill.temperature import Tempered
from compress.errors import DataError, RecipeError
from compress.models.attention import MASKED
from compress.models.folder import load
from compress.train.divergences import DIVERGENCES
from compress.train.fit import Resumable
from export.checkpoint import Checkpoint
from export.errors import ArtifactError
from export.manifest import write_manifest
from export.safetensors import read_file, write, write_file
from tests import tiny_training as tiny
from tests.tiny_run import CONFIG, RECIPE, rows, tokenizer_files, weights, write_jsonl, write_model

V, K = 9, 3
logits = arrays.arrays(np.float32, V, elements=st.floats(-20, 20, width=32))
spread = arrays.arrays(np.float32, V, elements=st.floats(-4, 4, width=32))
names = pytest.mark.parametrize("name", DIVERGENCES)


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    with tiny.unoptimized():
        yield


# Buckets.

COMPILED = {k: jax.jit(lambda x, k=k: top_buckets(x, k, 2.0)) for k in (1, K, V)}
BUCKETS = jax.jit(log_buckets)
DIVERGE = {name: jax.jit(entry.at()) for name, entry in DIVERGENCES.items()}


@pytest.mark.parametrize("k", COMPILED)
@settings(max_examples=40, deadline=None)
@given(teacher=logits)
def test_what_is_kept_are_the_likeliest_tokens_and_all_others_together(k, teacher):
    log_probs, ids = COMPILED[k](teacher)
    probs = np.exp(tiny.numpy_log_softmax(teacher / 2))
    assert len(set(ids.tolist())) == k
    np.testing.assert_allclose(np.exp(np.float64(log_probs[:-1])), probs[np.asarray(ids)], rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(np.sort(probs[np.asarray(ids)])[::-1], np.sort(probs)[::-1][:k], rtol=1e-6)
    assert np.exp(np.float64(log_probs[-1])) == pytest.approx(1 - probs[np.asarray(ids)].sum(), rel=1e-4, abs=1e-6)


@names
@settings(max_examples=40, deadline=None)
@given(student=spread, teacher=spread)
def test_a_divergence_of_buckets_is_never_above_the_whole_one_and_of_all_tokens_equal_to_it(name, student, teacher):
    whole = float(DIVERGE[name](student, teacher))
    for k, top in COMPILED.items():
        theirs, ids = top(2 * teacher)
        found = float(DIVERGE[name](BUCKETS(student, ids), theirs))
        assert -1e-5 <= found <= whole + 1e-5
        assert k < V or found == pytest.approx(whole, rel=1e-4, abs=1e-5)


def definition(student, teacher, ids, temperature):
    """Forward KL between both distributions' buckets, of `ids` and of the rest, in float64."""
    common = student[..., : teacher.shape[-1]]
    p, q = (np.exp(tiny.numpy_log_softmax(x / temperature)) for x in (teacher, common))
    values, others = p[ids], q[ids]
    rest, others_rest = 1 - values.sum(), 1 - others.sum()
    total = (values * np.log(values / others)).sum() + rest * np.log(rest / others_rest)
    return temperature**2 * total


@cache
def step_of(rows):
    """The loss of a token, what it logs, and its gradient, of a teacher of so many tokens."""

    def loss(student, teacher, target):
        theirs, ids = top_buckets(teacher, K, 2.0)
        options = {"vocabulary": rows, "divergence": DIVERGENCES["forward_kl"].at(), "alpha": 0.7}
        value, logged = top_k_loss(student, theirs, ids, target, jnp.float32(2.0), **options)
        return value, logged | {"ids": ids}

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@pytest.mark.parametrize("rows", [K + 2, V])
@settings(max_examples=30, deadline=None)
@given(student=spread, teacher=spread, target=st.integers(0, V - 1))
def test_the_loss_of_a_token_is_its_definition_and_its_gradient_finite(rows, student, teacher, target):
    (value, logged), slope = step_of(rows)(student, teacher[:rows], np.int32(target))
    wanted = definition(np.float64(student), np.float64(teacher[:rows]), np.asarray(logged["ids"]), 2.0)
    nll = -tiny.numpy_log_softmax(student)[target]
    assert logged["divergence"] == pytest.approx(wanted, rel=1e-3, abs=1e-4)
    assert value == pytest.approx(0.7 * wanted + 0.3 * nll, rel=1e-3, abs=1e-4)
    assert np.isfinite(slope).all()


@names
def test_a_token_that_the_student_lacks_is_compared_on_neither_side(name):
    rng = np.random.default_rng(0)
    student, teacher = rng.normal(size=V - 2).astype(np.float32), rng.normal(size=V).astype(np.float32)
    teacher[V - 1] = 5  # the teacher's favourite
    theirs, ids = top_buckets(jnp.asarray(teacher), K, 1.0)
    options = {"divergence": DIVERGENCES[name].at(), "alpha": 1.0}
    value, _ = top_k_loss(jnp.asarray(student), theirs, ids, jnp.int32(0), jnp.float32(1.0), vocabulary=V, **options)
    known = np.asarray(ids) < V - 2
    kept = np.append(np.asarray(theirs)[:-1][known], theirs[-1])
    wanted = DIVERGENCES[name].at()(log_buckets(jnp.asarray(student), ids[known]), jnp.asarray(kept))
    assert value == pytest.approx(float(wanted), rel=1e-4)
    assert np.asarray(log_buckets(jnp.asarray(student), ids))[:-1][~known].tolist() == [MASKED]


# The loss of a pair of models.


def cached_batch(batch, k):
    """A batch with the teacher's log-probabilities, those of token t at t, float32 so that nothing is rounded."""
    said = np.asarray(tiny.logits_of(tiny.TEACHER, tiny.teacher(), batch))
    shift = lambda x: np.roll(np.asarray(x), 1, axis=1)  # noqa: E731
    if not k:
        return Cached(batch, shift(jax.nn.log_softmax(said)), None)
    log_probs, ids = jax.jit(jax.vmap(jax.vmap(lambda x: top_buckets(x, k, 2.0))))(said)
    return Cached(batch, shift(log_probs), shift(ids).astype(np.uint16))


def test_all_tokens_cached_give_the_loss_and_the_gradient_of_the_teacher_itself():
    batch = tiny.batch(5, rows=4)
    cached = cached_batch(batch, 0)
    options = {"temperature": 3.0, "alpha": 0.7, "chunk": 8}
    online = distillation_loss(tiny.STUDENT, tiny.TEACHER, **options)
    offline = cached_loss(tiny.STUDENT, tiny.TEACHER.vocab_size, **options)
    step = lambda loss: jax.jit(jax.value_and_grad(lambda s, f, b: loss(s, f, b, None)[0]))  # noqa: E731
    one = step(online)(tiny.student(), tiny.teacher(), batch)
    two = step(offline)(tiny.student(), None, cached)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), one, two)
    tempered = cached._replace(batch=Tempered(batch, np.full(4, 3, np.float32)))
    again = step(cached_loss(tiny.STUDENT, tiny.TEACHER.vocab_size, alpha=0.7, chunk=8))(tiny.student(), None, tempered)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), again, two)


def test_the_likeliest_tokens_cached_give_the_loss_of_their_buckets():
    batch = tiny.batch(5, rows=4)
    loss = cached_loss(tiny.STUDENT, tiny.TEACHER.vocab_size, temperature=2.0, chunk=8)
    _, count, metrics = jax.jit(loss)(tiny.student(), None, cached_batch(batch, 8), None)
    teacher = np.asarray(tiny.logits_of(tiny.TEACHER, tiny.teacher(), batch), np.float64)
    student = np.asarray(tiny.logits_of(tiny.STUDENT, tiny.student(), batch), np.float64)
    mask, total = batch.mask[:, 1:], 0.0
    for row, time in zip(*np.nonzero(mask), strict=True):
        p, q = (np.exp(tiny.numpy_log_softmax(x[row, time] / 2)) for x in (teacher, student))
        ids = np.argsort(-p)[:8]
        ours = ids[ids < tiny.VOCAB]
        values, others = np.append(p[ours], 1 - p[ids].sum()), np.append(q[ours], 1 - q[ours].sum())
        values, others = values / values.sum(), others / others.sum()
        total += 4 * (values * np.log(values / others)).sum()
    assert count == mask.sum()
    assert metrics["divergence"][0] == pytest.approx(total, rel=1e-3)


# The command.

FLAGS = "--teacher teacher --data train.jsonl --device cpu --sequence-length 32 --json"
TRAIN = f"{FLAGS} --student half --steps 6 --global-batch 4 --valid-every 3 --warmup 1"


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    write_model(folder / "teacher")
    long = [{"text": " ".join(rows(8, seed))} for seed in (7, 8)]  # in pieces
    write_jsonl(folder / "train.jsonl", [{"text": text} for text in rows(60, 1)] + long)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(cache_stage, "mesh_of_devices", lambda shape: None)
        patch.setattr(stage, "mesh_of_devices", lambda shape: None)
        assert cli.main(f"cache-teacher {FLAGS} --top-k 0 --out full".split()) == 0
        assert cli.main(f"cache-teacher {FLAGS} --top-k 16 --temperature 2 --out top".split()) == 0
        assert cli.main(f"distill {TRAIN} --out online".split()) == 0
    return folder


@pytest.fixture
def world(shared, tmp_path, monkeypatch):
    """A folder with all that there is, of which the caches may be changed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cache_stage, "mesh_of_devices", lambda shape: None)
    monkeypatch.setattr(stage, "mesh_of_devices", lambda shape: None)
    for name in ("teacher", "train.jsonl"):
        (tmp_path / name).symlink_to(shared / name)
    for name in ("full", "top"):
        (tmp_path / name).mkdir()
        for path in (shared / name).iterdir():
            (tmp_path / name / path.name).write_bytes(path.read_bytes())
    return tmp_path


def trace_of(folder):
    found = json.loads((folder / "training.json").read_text())
    return [row["divergence"] for row in (*found["validations"], *found["steps"])]


def test_training_from_a_whole_cache_is_training_beside_the_teacher(world, shared, capsys):
    assert cli.main(f"distill {TRAIN} --teacher-cache full --out offline".split()) == 0
    assert trace_of(world / "offline") == pytest.approx(trace_of(shared / "online"), rel=2e-3)
    result = json.loads(capsys.readouterr().out)
    assert result["parameters"] == {
        "teacher": sum(value.size for value in load(world / "teacher").weights.values()),
        "student": sum(value.size for value in load(world / "offline").weights.values()),
    }


def test_the_loss_through_the_likeliest_tokens_is_not_above_the_whole_one_and_falls(world, shared):
    assert cli.main(f"distill {TRAIN} --teacher-cache top --out offline".split()) == 0
    found = trace_of(world / "offline")
    assert 0 < found[0] <= trace_of(shared / "online")[0] * 1.001  # both of the student before its first step
    assert found[2] < found[0]  # its last validation


def test_a_student_that_is_no_cut_needs_none_of_the_teacher_s_weights(world, shared, monkeypatch):
    monkeypatch.setattr(stage, "load", lambda path: pytest.fail(f"{path} was loaded"))
    train = TRAIN.replace("half", str(shared / "online"))
    assert cli.main(f"distill {train} --teacher-cache full --out offline".split()) == 0


def test_a_cache_holds_every_example_once_and_what_the_teacher_says_of_it(world):
    cached = TeacherCache(world / "full")
    teacher = load(world / "teacher")
    source = Batches(Rows(world / "train.jsonl"), teacher.tokenizer, size=4, length=32, seed=3, epochs=2)
    stacked = tiny.decoder.stack(teacher.config, teacher.weights)
    for batch in source:
        said = cached.attach(batch)
        whole = tiny.numpy_log_softmax(tiny.logits_of(teacher.config, stacked, batch))[:, :-1]
        known = batch.mask[:, 1:] > 0
        np.testing.assert_allclose(said.log_probs[:, 1:][known], whole[known], rtol=2e-3, atol=2e-3)
        assert not said.log_probs[batch.mask == 0].any()
    shards = [read_file(world / "full", path.name) for path in (world / "full").glob("*.safetensors")]
    keys = [key.tobytes() for shard in shards for key in shard["keys"]]
    wanted = {key_of(sample.tokens, sample.mask) for sample in source.examples() if sample.mask.any()}
    assert len(keys) == len(set(keys))
    assert set(keys) == wanted


def test_what_is_cached_does_not_depend_on_how_it_was_batched_nor_on_the_seed(world):
    options = "--top-k 16 --temperature 2 --per-device-batch 3 --seed 9"
    assert cli.main(f"cache-teacher {FLAGS} {options} --out other".split()) == 0
    one, two = ({**read_file(world / name, "00000.safetensors")} for name in ("top", "other"))
    np.testing.assert_array_equal(one["keys"], two["keys"])
    np.testing.assert_allclose(np.float32(one["log_probs"]), np.float32(two["log_probs"]), rtol=2e-3, atol=2e-3)


def test_the_result_counts_what_is_kept(world, capsys):
    assert cli.main(f"cache-teacher {FLAGS} --top-k 16 --out again".split()) == 0
    result = json.loads(capsys.readouterr().out)
    tensors = read_file(world / "again", "00000.safetensors")
    assert (result["examples"], result["tokens"]) == (len(tensors["keys"]), tensors["counts"].sum())
    assert result["bytes"] == (world / "again/00000.safetensors").stat().st_size
    assert result["bits_per_token"] == pytest.approx(8 * result["bytes"] / result["tokens"])
    assert tensors["log_probs"].dtype == np.float16
    assert tensors["ids"].dtype == np.uint16


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_command_that_was_killed_goes_on_and_writes_the_same(world, monkeypatch, capsys):
    monkeypatch.setattr(cache_stage, "SHARD_BYTES", 1 << 14)
    command = f"cache-teacher {FLAGS} --top-k 16 --out small".split()
    whole = f"cache-teacher {FLAGS} --top-k 16 --out whole".split()
    assert cli.main(whole) == 0
    assert len(contents(world / "whole")) > 4
    written, write_shard = [], cache_stage.write_file

    def stop_at_the_third(tensors, path):
        written.append(path)
        if len(written) == 3:
            path.write_bytes(b"half")
            signal.raise_signal(signal.SIGTERM)
        write_shard(tensors, path)

    monkeypatch.setattr(cache_stage, "write_file", stop_at_the_third)
    assert cli.main(command) == 130
    assert sorted(path.name for path in (world / "small.partial").glob("*.safetensors")) == [
        "00000.safetensors",
        "00001.safetensors",
    ]
    (world / "small.partial/.00002.safetensors.0123abcd.tmp").write_bytes(b"of one that was killed outright")
    assert not (world / "small").exists()
    assert cli.main([*command[:-2], "--out", "small", "--temperature", "3"]) == 2
    assert "begun with another temperature; --force" in capsys.readouterr().err
    written.clear()
    monkeypatch.setattr(cache_stage, "write_file", lambda *given: (written.append(given[1]), write_shard(*given)))
    assert cli.main(command) == 0
    assert len(written) == len(contents(world / "whole")) - 2 - 2
    assert contents(world / "small") == contents(world / "whole")
    assert not (world / "small.partial").exists()


def test_a_stream_with_a_cache_goes_on_where_it_was(world):
    cached, tokenizer = TeacherCache(world / "top"), load(world / "teacher").tokenizer
    stream = lambda: CachedBatches(  # noqa: E731
        Batches(Rows(world / "train.jsonl"), tokenizer, size=2, length=32, seed=1), cached
    )
    one, two = stream(), stream()
    assert isinstance(one, Resumable)
    for _ in range(9):
        next(one)
    two.restore(json.loads(json.dumps(one.state())))
    for _ in range(3):
        jax.tree.map(np.testing.assert_array_equal, next(one), next(two))


def test_training_from_a_cache_is_resumed(world, monkeypatch):
    command = f"distill {TRAIN} --teacher-cache top --save-every 2".split()
    assert cli.main([*command, "--out", "whole"]) == 0
    attach, count = CachedBatches.__next__, []

    def interrupted(stream):
        count.append(1)
        if len(count) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return attach(stream)

    monkeypatch.setattr(CachedBatches, "__next__", interrupted)
    assert cli.main([*command, "--out", "halves"]) == 75
    monkeypatch.setattr(CachedBatches, "__next__", attach)
    assert cli.main([*command, "--out", "halves"]) == 0
    assert trace_of(world / "halves") == trace_of(world / "whole")


def test_a_plan_counts_the_cache_in_the_teacher_s_place(world, monkeypatch, capsys):
    monkeypatch.setattr(plan, "mesh_of_devices", lambda shape: None)
    monkeypatch.setattr(plan, "matmul_rate", lambda *sizes: 1e6)
    table = RECIPE[RECIPE.index("[distill]") : RECIPE.index("[align]")]
    (world / "recipe.toml").write_text(table.replace('valid = ["valid.jsonl"]\n', ""))
    found = []
    for extra in ([], ["--set", "distill.teacher_cache=top"]):
        assert cli.main(["plan", "recipe.toml", "--device", "cpu", "--json", *extra]) == 0
        found.append(json.loads(capsys.readouterr().out)["stages"]["distill"])
    assert found[1]["memory_gb"] > 0
    assert found[1]["seconds"] < found[0]["seconds"]


# What is refused.


def fails(capsys, line, code, *said):
    capsys.readouterr()
    assert cli.main(line.split()) == code
    error = capsys.readouterr().err.strip().splitlines()
    assert error[-1].startswith("error: ")
    for word in said:
        assert word in error[-1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("--sequence-length 16", "sequence_length (32 there, 16 here)"),
        ("--data other.jsonl", "data ("),
        ("--valid other.jsonl", "valid ("),
        ("--teacher other", "teacher ("),
        ("--teacher marked", "tokenizer ("),
        ("--columns text=body", "columns"),
        ("--temperature 1", "the 16 likeliest tokens at temperature 2.0"),
        ("--temperature-end 1", "--top-k 0"),
        ("--hidden 1", "teacher_cache holds logits alone"),
        ("--attention 1", "teacher_cache holds logits alone"),
    ],
)
def test_a_cache_of_something_else_is_refused_with_what_differs(world, capsys, change, said):
    write_jsonl(world / "other.jsonl", [{"text": text} for text in rows(30, 3)])
    write_model(world / "other", seed=5)
    write_model(world / "marked", marker="<end>")
    words = TRAIN.split()
    flag, value = change.split()
    if (flag in words and flag != "--data") or flag == "--data":
        words[words.index(flag) + 1] = value
    else:
        words += [flag, value]
    fails(capsys, f"distill {' '.join(words)} --teacher-cache top --out out", 2, said)
    assert not (world / "out").exists()


def test_a_whole_cache_is_good_at_every_temperature(world):
    command = f"distill {TRAIN} --teacher-cache full --temperature 3 --temperature-end 1 --out out"
    assert cli.main(command.split()) == 0


def test_more_tokens_than_there_are_cannot_be_kept(world, capsys):
    fails(capsys, f"cache-teacher {FLAGS} --top-k 321 --out out", 2, "top_k = 321: the teacher has 320 tokens")


def truncated(folder):
    path = folder / "00000.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def flipped(folder):
    path = folder / "00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(bytes(data))


def other_identity(folder):
    found = json.loads((folder / "identity.json").read_text())
    (folder / "identity.json").write_text(json.dumps(found | {"top_k": 8}))


def resealed(change):
    """A change whose manifest has been made to fit."""

    def do(folder):
        tensors = {name: np.array(value) for name, value in read_file(folder, "00000.safetensors").items()}
        change(tensors, folder)
        write_file(tensors, folder / "00000.safetensors")
        write_manifest(folder)

    return do


def shorter(tensors, folder):
    tensors["log_probs"] = tensors["log_probs"][:-1]


def negative(tensors, folder):
    tensors["counts"][0] = -1


def wrong_type(tensors, folder):
    tensors["ids"] = tensors["ids"].astype(np.float32)


def nan(tensors, folder):
    tensors["log_probs"][:, 0] = np.nan


def no_sizes(tensors, folder):
    (folder / "identity.json").write_text('{"top_k": "many"}')


def hot(tensors, folder):
    found = json.loads((folder / "identity.json").read_text())
    (folder / "identity.json").write_text(json.dumps(found | {"temperature": "hot"}))


def switched_on(tensors, folder):
    found = json.loads((folder / "identity.json").read_text())
    (folder / "identity.json").write_text(json.dumps(found | {"temperature": True}))


def unlisted(folder):
    (folder / "manifest.json").unlink()


def missing(folder):
    (folder / "00000.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncated, "00000.safetensors"),
        (flipped, "contents changed"),
        (other_identity, "identity.json"),
        (missing, "00000.safetensors: missing"),
        (unlisted, "no finished cache"),
        (resealed(shorter), "do not fit each other"),
        (resealed(negative), "do not fit each other"),
        (resealed(wrong_type), "not a shard of a cache with top_k = 16"),
        (resealed(no_sizes), "top_k and vocabulary must be sizes"),
        (resealed(hot), "temperature must be a number above 0"),
        (resealed(switched_on), "temperature must be a number above 0"),
        (resealed(nan), "NaN or Inf"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_damaged_cache_is_refused_by_name(world, capsys, damage, said):
    damage(world / "top")
    fails(capsys, f"distill {TRAIN} --teacher-cache top --out out", 4, "top", said, "compress cache-teacher")
    assert not (world / "out").exists()


def test_an_example_that_is_not_there_is_an_error_that_says_so(world):
    cached = TeacherCache(world / "top")
    batch = tiny.batch(0, rows=2)
    assert list(segments_of(batch))
    with pytest.raises(DataError, match=r"nothing of an example whose first target ends the tokens \[.*\]; make the"):
        cached.attach(batch)
    blank = dataclasses.replace(batch, mask=np.zeros_like(batch.mask))
    assert not cached.attach(blank).log_probs.any()


def test_a_teacher_whose_logits_are_nan_is_refused(world, capsys):
    broken = weights()
    broken["model.layers.3.mlp.down_proj.weight"] *= np.float32(1e38)
    broken["model.layers.3.mlp.up_proj.weight"] *= np.float32(1e38)
    (world / "broken").mkdir()
    write(Checkpoint(CONFIG, broken, tokenizer_files()), world / "broken", dtype="float32")
    line = f"cache-teacher {FLAGS.replace('teacher teacher', 'teacher broken')} --out out"
    fails(capsys, line, 4, "broken: NaN or Inf in its logits after the tokens [")
    assert not (world / "out").exists()


def test_a_full_disk_leaves_the_shards_so_far(world, monkeypatch, capsys):
    monkeypatch.setattr(cache_stage, "SHARD_BYTES", 1 << 14)
    write_shard = cache_stage.write_file

    def full(tensors, path):
        if "00001" in path.name:
            raise OSError(28, "No space left on device")
        write_shard(tensors, path)

    monkeypatch.setattr(cache_stage, "write_file", full)
    fails(capsys, f"cache-teacher {FLAGS} --top-k 16 --out out", 5, "No space left on device", "run it again")
    assert sorted(contents(world / "out.partial")) == ["00000.safetensors", "identity.json"]
    assert not (world / "out").exists()


def test_the_settings_of_a_cache_and_of_its_training_agree_by_default():
    from compress.distill.settings import CacheTeacher, Distill

    given = {"teacher": "t", "data": (Path("d"),)}
    one, two = CacheTeacher(**given), Distill(**given)
    for name in ("teacher", "data", "valid", "sequence_length"):
        assert getattr(one, name) == getattr(two, name)
    assert (two.temperature, two.tau) == (None, 2.0)


def test_training_from_a_cache_is_at_its_temperature_where_no_other_is_given(world):
    assert cli.main(f"distill {TRAIN} --teacher-cache top --out by-itself".split()) == 0
    assert cli.main(f"distill {TRAIN} --teacher-cache top --temperature 2 --out told".split()) == 0
    assert trace_of(world / "by-itself") == trace_of(world / "told")
    assert cli.main(f"cache-teacher {FLAGS} --top-k 16 --out cool".split()) == 0
    assert cli.main(f"distill {TRAIN} --teacher-cache cool --out at-one".split()) == 0
    assert trace_of(world / "at-one")[0] != trace_of(world / "told")[0]


@pytest.mark.parametrize("flag", ["--teacher teacher", "--data train.jsonl"])
def test_the_command_by_itself_is_given_teacher_and_data(world, capsys, flag):
    assert cli.main(f"cache-teacher {FLAGS.replace(flag, '')} --out out".split()) == 2
    assert f"{flag.split()[0]} is missing" in capsys.readouterr().err


def test_a_cache_may_not_be_combined_with_layers_to_copy():
    from compress.distill.settings import Distill

    with pytest.raises(RecipeError, match="teacher_cache holds logits alone"):
        Distill(teacher="t", data=(Path("d"),), teacher_cache=Path("c"), hidden=1.0)


def test_a_folder_that_is_no_cache_is_refused(world):
    with pytest.raises(ArtifactError, match="no finished cache of a teacher"):
        TeacherCache(world / "teacher")
