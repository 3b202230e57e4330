"""Rows that carry a stranger's logits: the cache of them against the teacher's own, and what is refused."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress import cli
from compress.data.examples import example, marked
from compress.data.rows import Row
from compress.distill import cache_stage, stage
from compress.distill.cache import TeacherCache
from compress.distill.foreign import ForeignRows
from compress.distill.settings import CacheTeacher
from compress.errors import DataError, RecipeError
from compress.models.folder import load
from compress.settings import Common
from export.safetensors import read_file, write_file
from tests import tiny_training as tiny
from tests.tiny_run import rows, write_model

N, T = 24, 20
COMMAND = "cache-teacher --teacher student --sequence-length 32 --device cpu --json"


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    with tiny.unoptimized():
        yield


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A student, a teacher of the same tokenizer, and the tensors of rows that the teacher has read."""
    folder = tmp_path_factory.mktemp("foreign")
    write_model(folder / "student", seed=3)
    model = load(write_model(folder / "teacher"))
    ids, mask = np.zeros((N, T), np.int32), np.zeros((N, T), np.int32)
    for row, text in enumerate(rows(N, 1)):
        tokens = model.tokenizer.encode(text)[: T - row % 5]
        ids[row, : len(tokens)] = tokens
        mask[row, row % 3 : len(tokens)] = 1
    batch = tiny.Batch(
        ids, np.ones_like(ids), np.broadcast_to(np.arange(T, dtype=np.int32), ids.shape), np.float32(mask)
    )
    logits = tiny.logits_of(model.config, tiny.decoder.stack(model.config, model.weights), batch)
    return folder, {"input_ids": ids, "mask": mask, "logits": np.asarray(logits)}


@pytest.fixture
def world(shared, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for module in (cache_stage, stage):
        monkeypatch.setattr(module, "mesh_of_devices", lambda shape: None)
    for name in ("student", "teacher"):
        (tmp_path / name).symlink_to(shared[0] / name)
    return {name: array.copy() for name, array in shared[1].items()}


def top(tensors, k, temperature=1.0):
    """The same rows with the k likeliest tokens alone, by NumPy."""
    logs = tiny.numpy_log_softmax(tensors["logits"] / temperature)
    ids = np.argsort(-logs, axis=-1)[..., :k]
    left = {name: array for name, array in tensors.items() if name != "logits"}
    found = {"top_ids": ids, "top_log_probs": np.take_along_axis(logs, ids, -1).astype(np.float32)}
    return left | found | ({} if temperature == 1 else {"temperature": np.float32([temperature])})


def write(path, tensors, *cuts):
    """A file, or a folder with a file for each part between the cuts."""
    if not cuts:
        write_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, path)
        return
    path.mkdir()
    for number, (start, end) in enumerate(zip((0, *cuts), (*cuts, N))):
        part = {name: array if name == "temperature" else array[start:end] for name, array in tensors.items()}
        write_file({name: np.ascontiguousarray(array) for name, array in part.items()}, path / f"{number}.safetensors")


def run(command, code=0):
    assert cli.main(command.split()) == code


def tensors_of(folder):
    return dict(read_file(Path(folder), "00000.safetensors"))


@pytest.mark.parametrize("top_k", [0, 16])
def test_a_teacher_s_logits_from_elsewhere_are_cached_as_those_it_gives_here(world, capsys, top_k):
    write(Path("given"), world, 7)
    run(f"{COMMAND} --logits given --top-k {top_k} --out there")
    result = json.loads(capsys.readouterr().out)
    run(f"{COMMAND.replace('student', 'teacher')} --data {result['data']} --top-k {top_k} --out here")
    there, here = tensors_of("there"), tensors_of("here")
    assert there.keys() == here.keys()
    order, wanted = (np.lexsort(found["keys"].T) for found in (there, here))
    np.testing.assert_array_equal(there["keys"][order], here["keys"][wanted])
    np.testing.assert_array_equal(there["counts"][order], here["counts"][wanted])
    ends = {
        name: np.split(found["log_probs"], np.cumsum(found["counts"])[:-1])
        for name, found in (("there", there), ("here", here))
    }
    for one, two in zip(order, wanted):
        np.testing.assert_allclose(np.float32(ends["there"][one]), np.float32(ends["here"][two]), rtol=3e-3, atol=3e-3)
    assert (result["examples"], result["tokens"]) == (N, sum(int(row[1:].sum()) for row in world["mask"]))
    written = [json.loads(line) for line in Path(result["data"]).read_text().splitlines()]
    for row, line in enumerate(written):
        length = len(line["tokens"])
        assert line["tokens"] == world["input_ids"][row, :length].tolist()
        assert line["mask"] == [0, *world["mask"][row, 1:length]]
        assert not world["mask"][row, length:].any()


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_likeliest_tokens_from_elsewhere_are_the_buckets_of_their_logits(world, temperature):
    write(Path("whole.safetensors"), world)
    write(Path("named.safetensors"), top(world, 16, temperature))
    run(f"{COMMAND} --logits whole.safetensors --top-k 16 --temperature {temperature} --out whole")
    run(f"{COMMAND} --logits named.safetensors --out named")
    whole, named = tensors_of("whole"), tensors_of("named")
    np.testing.assert_array_equal(whole["ids"], named["ids"])
    np.testing.assert_allclose(np.float32(whole["log_probs"]), np.float32(named["log_probs"]), rtol=2e-3, atol=2e-3)
    one, two = (TeacherCache(Path(name)) for name in ("whole", "named"))
    assert (one.top_k, one.identity["temperature"]) == (two.top_k, two.identity["temperature"]) == (16, temperature)


def test_a_student_learns_from_a_stranger_s_logits(world, capsys):
    write(Path("given.safetensors"), top(world, 16))
    run(f"{COMMAND} --logits given.safetensors --out cache")
    train = (
        "distill --teacher student --student student --teacher-cache cache --data cache/rows.jsonl "
        "--sequence-length 32 --global-batch 4 --steps 12 --valid-every 6 --warmup 1 --learning-rate 3e-3 "
        "--device cpu --json"
    )
    run(f"{train} --temperature 2 --out cold", 2)
    assert "the 16 likeliest tokens at temperature 1.0" in capsys.readouterr().err
    run(f"{train} --out out")
    before, *_, after = json.loads(Path("out/training.json").read_text())["validations"]
    assert after["divergence"] < 0.9 * before["divergence"]


@settings(max_examples=40, deadline=None)
@given(mask=st.lists(st.sampled_from([0, 1]), min_size=1, max_size=12))
def test_what_is_marked_is_learned_and_the_last_answer_begins_where_its_targets_do(mask):
    sample = marked(np.arange(len(mask)), mask)
    assert sample.mask.tolist() == [False, *map(bool, mask[1:])]
    if sample.mask.any():
        end = int(np.flatnonzero(sample.mask)[-1])
        assert sample.mask[sample.start : end + 1].all()
        assert not sample.mask[sample.start - 1]
    else:
        assert sample.start == 0


def test_a_row_of_tokens_with_a_mask_is_taken_as_it_is(world):
    tokenizer = load("student").tokenizer
    assert tokenizer.wants_bos
    row = Row("targets", {"tokens": [5, 6, 7], "mask": [1, 0, 1]}, "d:1", (0, 0, 2))
    sample = example(row, tokenizer)
    assert (sample.tokens.tolist(), sample.mask.tolist(), sample.start) == ([5, 6, 7], [False, False, True], 2)


def test_padding_of_rows_and_of_the_vocabulary_says_nothing(world):
    options = {"length": 32, "top_k": 0, "temperature": 1.0}
    model = load("student")
    write(Path("plain.safetensors"), world)
    noisy = {name: array.copy() for name, array in world.items()}
    for row, mask in enumerate(world["mask"]):
        last = np.flatnonzero(mask)[-1]
        noisy["input_ids"][row, last + 1 :] = -100
        noisy["logits"][row, last:] = np.nan
    wide = np.pad(noisy["logits"], ((0, 0), (0, 0), (0, 9)), constant_values=-30)
    write(Path("wide.safetensors"), noisy | {"logits": wide})
    known = model.tokenizer.vocab_size
    write(Path("narrow.safetensors"), noisy | {"logits": np.ascontiguousarray(noisy["logits"][..., :known])})
    plain, padded, cut = (
        list(ForeignRows(Path(f"{name}.safetensors"), model, **options)) for name in ("plain", "wide", "narrow")
    )
    for a, b, c in zip(plain, padded, cut, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.said[0], b.said[0])
        wanted = tiny.numpy_log_softmax(np.float64(a.said[0])[:, :known])
        np.testing.assert_allclose(np.float64(c.said[0])[:, :known], wanted, rtol=3e-3, atol=3e-3)
        assert (np.exp(np.float64(c.said[0])[:, known:]) == 0).all()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_taken_and_without_a_mask_all_but_the_first_token_is_a_target(world, dtype):
    logs = tiny.numpy_log_softmax(world["logits"]).astype(dtype)
    write(Path("given.safetensors"), {"input_ids": world["input_ids"].astype(np.int64), "log_probs": logs})
    found = list(ForeignRows(Path("given.safetensors"), load("student"), length=T, top_k=0, temperature=1.0))
    for row, sample in enumerate(found):
        assert sample.mask.tolist() == [False] + [True] * (T - 1)
        wanted = tiny.numpy_log_softmax(np.float32(logs[row, :-1]))
        np.testing.assert_allclose(np.float32(sample.said[0]), wanted, rtol=2e-3, atol=2e-3)


def changed(name, at, value):
    return lambda tensors: tensors[name].__setitem__(at, value)


def put(**arrays):
    return lambda tensors: tensors.update(arrays)


def without(*names):
    return lambda tensors: [tensors.pop(name) for name in names]


@pytest.mark.parametrize(
    ("k", "change", "said"),
    [
        (0, changed("input_ids", (2, 1), 320), "row 2: input_ids: token id 320: the model has 320"),
        (0, changed("input_ids", (2, 1), -1), "row 2: input_ids: token id -1"),
        (0, changed("mask", 3, 0), "row 3: no target"),
        (0, changed("mask", (3, 2), 5), "row 3: mask holds other values"),
        (0, changed("logits", (1, 4, 0), np.nan), "row 1: NaN or Inf among the logits"),
        (0, changed("logits", (1, 4, 0), np.inf), "row 1: NaN or Inf among the logits"),
        (0, changed("logits", (1, 4), -np.inf), "row 1: logits of a token leave no token possible"),
        (0, lambda t: t.update(log_probs=t.pop("logits")), "row 0: log_probs of a token sum to a probability of"),
        (
            0,
            lambda t: t.update(logits=t["logits"][..., :300]),
            "logits of 300 tokens, and the tokenizer has 310",
        ),
        (0, lambda t: t.update(logits=t["logits"][:, 1:]), f"logits is float32 [{N}, {T - 1}, 320]"),
        (0, lambda t: t.update(logits=t["logits"].astype(np.int32)), "logits is int32"),
        (0, lambda t: t.update(input_ids=np.float32(t["input_ids"])), "input_ids is float32"),
        (0, lambda t: t.update(mask=t["mask"][:, 1:]), f"mask is int32 [{N}, {T - 1}]"),
        (0, without("logits"), "has input_ids, mask; it needs input_ids, and logits, log_probs or"),
        (0, without("input_ids"), "has logits, mask; it needs"),
        (0, put(attention_mask=np.ones((N, T), np.int32)), "has attention_mask, input_ids, logits, mask; it needs"),
        (0, put(temperature=np.float32([2])), "has input_ids, logits, mask, temperature; it needs"),
        (0, put(**{f"layer.{n}": np.zeros(3) for n in range(99)}), "layer.13, layer.14; it needs"),
        (0, lambda t: t.update(logits=np.full((N, T, 320), 1e300)), "row 0: NaN or Inf among the logits"),
        (
            0,
            lambda t: t.update(log_probs=t.pop("logits") + 1e4),
            "row 0: log_probs of a token sum to a probability of inf",
        ),
        (
            0,
            lambda t: t.update(log_probs=tiny.numpy_log_softmax(t.pop("logits")) - 3),
            "row 0: log_probs of a token sum to a probability of 0.04979 over the model's vocabulary, below 1",
        ),
        (0, put(log_probs=np.zeros((N, T, 320), np.float32)), "it needs input_ids, and logits, log_probs or"),
        (0, lambda t: [t.update({n: a[:0]}) for n, a in list(t.items())], "not empty"),
        (
            4,
            changed("top_log_probs", (1, 4), 0.0),
            "row 1: top_log_probs of a token sum to a probability of 4, above 1",
        ),
        (4, changed("top_log_probs", (1, 4), np.nan), "row 1: NaN or Inf among the top_log_probs"),
        (4, changed("top_ids", (1, 4), 7), "row 1: top_ids name a token twice"),
        (4, changed("top_ids", (1, 4, 0), 999), "row 1: top_ids: token id 999"),
        (4, without("top_ids"), "top_log_probs and top_ids"),
        (4, put(temperature=np.float32([0])), "temperature = 0.0: must be above 0"),
    ],
)
def test_rows_that_will_not_do_are_refused_by_name(world, capsys, k, change, said):
    tensors = top(world, k) if k else world
    change(tensors)
    write(Path("given.safetensors"), tensors)
    run(f"{COMMAND} --logits given.safetensors --out out", 4)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert said in error.partition("given.safetensors: ")[2]
    assert not Path("out").exists()


def test_files_of_unlike_form_and_places_without_any_are_refused(world, capsys):
    Path("mixed").mkdir()
    write(Path("mixed/a.safetensors"), world)
    write(Path("mixed/b.safetensors"), top(world, 4))
    Path("empty").mkdir()
    Path("broken.safetensors").write_bytes(b"no tensors")
    for name, said in (
        ("mixed", "b.safetensors: ('top_log_probs', 4, 1.0) is not ('logits', 320, 1.0) as in "),
        ("empty", "empty: no .safetensors in it"),
        ("broken.safetensors", "broken.safetensors: "),
        ("nowhere.safetensors", "nowhere.safetensors: "),
    ):
        run(f"{COMMAND} --logits {name} --out out", 4)
        assert said in capsys.readouterr().err


def test_a_row_longer_than_the_sequence_is_refused_and_more_tokens_than_there_are_too(world, capsys):
    write(Path("given.safetensors"), world)
    run(f"{COMMAND.replace('32', '9')} --logits given.safetensors --out out", 4)
    assert "but sequence_length = 9; raise it, and that of distill" in capsys.readouterr().err
    run(f"{COMMAND} --logits given.safetensors --top-k 321 --out out", 2)
    assert "top_k = 321: the teacher has 320 tokens" in capsys.readouterr().err


def test_a_row_that_is_there_twice_is_kept_once(world):
    twice = {name: np.concatenate([array[:2], array[:2]]) for name, array in world.items()}
    write(Path("given.safetensors"), twice)
    run(f"{COMMAND} --logits given.safetensors --out out")
    assert len(Path("out/rows.jsonl").read_text().splitlines()) == len(tensors_of("out")["keys"]) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"data": (Path("d"),), "logits": Path("r")}, "give either data"),
        ({"logits": Path("r"), "valid": (Path("v"),)}, "a twentieth of their rows is held out"),
    ],
)
def test_a_cache_is_of_data_or_of_logits(options, said):
    with pytest.raises(RecipeError, match=said):
        CacheTeacher(teacher="t", **options)


def test_a_cache_is_of_something(tmp_path):
    with pytest.raises(RecipeError, match="--data is missing"):
        cache_stage.run(CacheTeacher(teacher="t"), Common(out=tmp_path / "cache"))


def test_a_mask_in_the_data_has_a_flag_for_each_token(tmp_path):
    from compress.data.rows import Rows

    for mask in ([1], [1, 2, 0], "no"):
        path = tmp_path / "d.jsonl"
        path.write_text(json.dumps({"tokens": [1, 2, 3], "mask": mask}))
        with pytest.raises(DataError, match="column 'mask' must be a list of 3 times 0 or 1, one a token"):
            list(Rows(path))
