"""What is wrong with a user's files and flags: one line, the right exit code, nothing half-written, nothing lost."""

import errno
import json
import os
import pickle
import re
import signal
import struct
from pathlib import Path

import numpy as np
import pytest

from compress import cli
from eval.report import Measurement, Report, to_json
from export import atomic
from export.checkpoint import Checkpoint
from export.gguf import write as write_gguf
from tests.tiny_run import CONFIG, rows, tokenizer_files, weights, write_jsonl, write_model

NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
SMALL = CONFIG | {"num_hidden_layers": 2}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Models and text that are fine; not to be changed."""
    folder = tmp_path_factory.mktemp("shared")
    write_model(folder / "good", SMALL)
    write_model(folder / "other", SMALL, marker="<end>")
    (folder / "gguf").mkdir()
    write_gguf(Checkpoint(SMALL, weights(SMALL), tokenizer_files()), folder / "gguf")
    write_jsonl(folder / "text.jsonl", [{"text": text} for text in rows(8, 1)])
    return folder


@pytest.fixture
def fails(shared, tmp_path, monkeypatch, capsys):
    """Runs a command that must fail: its exit code, one line that says what is asked for, and not a file more.

    What it leaves to go on from does not count.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("good", "other", "text.jsonl"):
        (tmp_path / name).symlink_to(shared / name)

    def check(line: str | list[str], code: int, *said: str) -> None:
        before = snapshot(tmp_path)
        words = line.split() if isinstance(line, str) else line
        capsys.readouterr()
        assert cli.main([*words, *([] if words[0] == "gate" else ["--device", "cpu"])]) == code
        shown = capsys.readouterr()
        assert shown.out == ""
        lines = [text for text in shown.err.splitlines() if not re.match(r"(\w+ \d+/\d+|quantize: |$)", text)]
        assert "Traceback" not in shown.err
        assert len(lines) == 1, lines
        for word in said:
            assert word in lines[0]
        assert snapshot(tmp_path) == before

    return check


def snapshot(folder: Path) -> dict[str, bytes]:
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return {str(path): (folder / path).read_bytes() for path in files if path.parts[0] != "out.partial"}


def raw_safetensors(path: Path, entries: list[tuple[str, np.ndarray]]) -> None:
    """A file with these float32 tensors, a name twice if it is given twice."""
    parts, place = [], 0
    entries = [(name, np.ascontiguousarray(array, np.float32)) for name, array in entries]
    for name, array in entries:
        facts = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [place, place + array.nbytes]}
        parts.append(f"{json.dumps(name)}: {json.dumps(facts)}")
        place += array.nbytes
    header = ("{" + ", ".join(parts) + "}").encode()
    body = b"".join(array.tobytes() for _, array in entries)
    path.write_bytes(struct.pack("<Q", len(header)) + header + body)


def bad_model(folder: Path, change) -> Path:
    """A model folder whose tensors `change` has had a hand in."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL))
    for name, data in tokenizer_files().items():
        (folder / name).write_bytes(data)
    entries = list(weights(SMALL).items())
    raw_safetensors(folder / "model.safetensors", change(entries))
    return folder


def replaced(name: str, make):
    return lambda entries: [(n, make(value.copy()) if n == name else value) for n, value in entries]


def put(value: np.ndarray, number: float) -> np.ndarray:
    value.reshape(-1)[3] = number
    return value


TENSORS = {
    "missing": (
        lambda entries: [item for item in entries if item[0] not in (NORM, Q_PROJ)],
        (f"{NORM} is missing", f"{Q_PROJ} is missing"),
    ),
    "doubled": (lambda entries: [*entries, (NORM, np.ones(64))], (NORM, "stands there twice")),
    "misshaped": (replaced(Q_PROJ, lambda w: w[:-1]), (Q_PROJ, "(63, 64)", "(64, 64)")),
    "left over": (lambda entries: [*entries, ("model.extra", np.ones(3))], ("model.extra", "not part of")),
    "NaN": (replaced(Q_PROJ, lambda w: put(w, np.nan)), (f"{Q_PROJ} (1 of 4096)", "NaN or Inf")),
    "Inf": (replaced(EMBEDDING, lambda w: put(w, np.inf)), (f"{EMBEDDING} (1 of", "NaN or Inf")),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_are_not_what_they_must_be(case, tmp_path, fails):
    change, said = TENSORS[case]
    bad_model(tmp_path / "bad", change)
    fails("quantize --model bad --method rtn --group-size 32 --out out", 4, "bad", *said)


@pytest.mark.parametrize("command", ["align --method sft --data text.jsonl", "export", "generate --prompt x"])
def test_every_command_refuses_a_model_with_a_nan(command, tmp_path, fails):
    bad_model(tmp_path / "bad", TENSORS["NaN"][0])
    out = [] if command.startswith("generate") else ["--out", "out"]
    fails([*command.split(), "--model", "bad", *out], 4, "NaN or Inf")


@pytest.mark.parametrize("keep", [0, 5, 700, -1])
def test_truncated_safetensors(keep, shared, tmp_path, fails):
    bad = bad_model(tmp_path / "bad", lambda entries: entries) / "model.safetensors"
    bad.write_bytes(bad.read_bytes()[:keep])
    fails("eval --model bad --data text.jsonl --out report.json", 4, "model.safetensors", "truncated")


@pytest.mark.parametrize("keep", [0, 3, 40, 3000, -1])
def test_truncated_gguf(keep, shared, tmp_path, fails):
    data = (shared / "gguf/model.gguf").read_bytes()
    (tmp_path / "bad.gguf").write_bytes(data[:keep])
    fails("distill --teacher bad.gguf --data text.jsonl --out out", 4, "bad.gguf")


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "..", "a/b.safetensors"])
def test_an_index_that_names_a_file_outside_its_folder(name, tmp_path, fails):
    folder = bad_model(tmp_path / "bad", lambda entries: entries)
    (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    index = {"weight_map": dict.fromkeys(weights(SMALL), name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    fails("export --model bad --out out", 4, "not the name of a file in this folder")


def test_a_link_out_of_the_folder(tmp_path, fails):
    folder = bad_model(tmp_path / "bad", lambda entries: entries)
    (folder / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (folder / "model.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    fails("export --model bad --out out", 4, "a link out of its folder")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_what_is_no_file_is_not_opened(make, name, tmp_path, fails):
    (bad_model(tmp_path / "bad", lambda entries: entries) / name).unlink()
    make(tmp_path / "bad" / name)
    fails("generate --model bad --prompt x", 4, f"bad/{name}: not a regular file")
    os.mkfifo(tmp_path / "bad.gguf")
    fails("generate --model bad.gguf --prompt x", 4, "bad.gguf: not a regular file")


def test_verify_opens_no_device_and_follows_no_dead_link(tmp_path, fails):
    assert cli.main(["export", "--model", "good", "--format", "safetensors", "--out", "out"]) == 0
    manifest = json.loads(Path("out/manifest.json").read_text())
    for place in ("/dev/zero", "nowhere"):
        Path("out/extra").unlink(missing_ok=True)
        Path("out/extra").symlink_to(place)
        manifest["files"]["extra"] = {"size": 0, "sha256": ""}
        Path("out/manifest.json").write_text(json.dumps(manifest))
        fails("verify out", 4, "extra: not a regular file")


def test_half_a_surrogate_pair_in_a_config_is_kept(tmp_path, fails):
    folder = bad_model(tmp_path / "odd", lambda entries: entries)
    (folder / "config.json").write_text(json.dumps(SMALL | {"note": "\ud800"}))
    assert cli.main(["export", "--model", "odd", "--format", "safetensors", "--out", "out"]) == 0
    assert json.loads(Path("out/config.json").read_text())["note"] == "\ud800"


class Bomb:
    """A pickle that leaves a file where it is opened."""

    def __reduce__(self):
        return (os.system, ("touch exploded",))


@pytest.mark.parametrize("where", ["bad", "bad/pytorch_model.bin", "adapters"])
def test_a_pickle_is_refused_and_never_opened(where, tmp_path, fails):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/config.json").write_text(json.dumps(SMALL))
    (tmp_path / "bad/pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    if where == "adapters":
        folder = bad_model(tmp_path / "adapters", lambda entries: entries)
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        (folder / "adapter_model.bin").write_bytes(pickle.dumps(Bomb()))
    fails(f"quantize --model {where} --method rtn --group-size 32 --out out", 4, "a pickle, which is never opened")
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported; llama, "),
        ({"model_type": None}, "model_type None is not supported"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
    ],
    ids=str,
)
def test_an_architecture_that_is_not_known(change, said, tmp_path, fails):
    folder = bad_model(tmp_path / "bad", lambda entries: entries)
    (folder / "config.json").write_text(json.dumps(SMALL | change))
    fails("export --model bad --out out", 4, "bad", said)


@pytest.mark.parametrize("config", ["{", "[]", '{"a": 1, "a": 2}', "\xff"])
def test_a_config_that_is_no_json_object(config, tmp_path, fails):
    folder = bad_model(tmp_path / "bad", lambda entries: entries)
    (folder / "config.json").write_bytes(config.encode("latin-1"))
    fails("export --model bad --out out", 4, "config.json")


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_model_folder_that_lacks_a_file(missing, tmp_path, fails):
    (bad_model(tmp_path / "bad", lambda entries: entries) / missing).unlink()
    said = {"tokenizer.json": "no tokenizer.json", "config.json": "no config.json"}.get(missing, "no weights")
    fails(["generate", "--model", "bad", "--prompt", "x"], 4, said)


def test_a_group_size_that_does_not_divide_is_named_before_any_work(monkeypatch, fails):
    monkeypatch.setattr("compress.quantize.stage.open_stream", lambda *_: pytest.fail("work has begun"))
    last = "model.layers.0.mlp.down_proj.weight (I = 96)"
    fails("quantize --model good --method rtn --group-size 64 --out out", 2, last, "--group-size 32 fits")
    both = "quantize --model good --method rtn --group-size 128 --fallback-group-size 64 --out out"
    fails(both, 2, last, "--group-size 32 fits")
    fails("quantize --model good --method rtn --group-size 48 --out out", 2, "must be 32, 64, 128 or 256")
    fails("quantize --model good --method rtn --group-size 128 --embedding-bits 8 --out out", 2, EMBEDDING)


def test_align_names_a_group_size_that_does_not_divide(fails):
    fails("align --model good --method sft --data text.jsonl --out out", 2, "mlp.down_proj.weight (I = 96)")


@pytest.mark.parametrize("content", ["", "\n\n"])
@pytest.mark.parametrize(
    "command",
    [
        "distill --teacher good --data empty.jsonl",
        "align --model good --method sft --group-size 32 --data empty.jsonl",
        "quantize --model good --group-size 32 --calibration empty.jsonl",
        "eval --model good --data empty.jsonl",
    ],
)
def test_an_empty_data_set(content, command, tmp_path, fails):
    (tmp_path / "empty.jsonl").write_text(content)
    fails(f"{command} --out out", 4, "empty.jsonl: no rows: the data set is empty")


BROKEN = '{"text": "fine"}\n{"text": "brok\n{"words": "no text"}\n{"text": 7}\n[1]\n{"text": "fine too, and longer"}\n'


@pytest.mark.parametrize(
    ("line", "said"), [(2, "broken JSON"), (3, "'words'"), (4, "text"), (5, "a row must be a JSON object")]
)
def test_a_row_that_is_broken_or_lacks_a_column_is_named(line, said, tmp_path, fails):
    lines = BROKEN.splitlines(keepends=True)
    (tmp_path / "bad.jsonl").write_text(lines[0] + lines[line - 1] + lines[5])
    fails("eval --model good --data bad.jsonl --out report.json", 4, "bad.jsonl:2", said, "--bad-rows skip")


def test_skipped_rows_are_listed_and_the_counts_add_up(shared, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text(BROKEN)
    command = ["eval", "--model", str(shared / "good"), "--data", "bad.jsonl", "--window", "8", "--bad-rows", "skip"]
    assert cli.main([*command, "--out", "report.json", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    counts = shown["rows"]
    assert (counts["read"], counts["kept"], counts["skipped"]) == (6, 2, 4)
    assert sum(counts["reasons"].values()) == counts["skipped"] == len(shown["skipped_rows"])
    assert [row["row"].rpartition(":")[2] for row in shown["skipped_rows"]] == ["2", "3", "4", "5"]
    assert json.loads(Path("report.json").read_text())["notes"] == ["4 of 6 held-out rows skipped"]


def test_rows_that_are_all_skipped_are_no_data(tmp_path, fails):
    (tmp_path / "bad.jsonl").write_text('{"words": 1}\n' * 3)
    fails("eval --model good --data bad.jsonl --bad-rows skip --out r.json", 4, "none of the 3 rows is of use")


def test_teacher_and_student_of_different_tokenizers(fails):
    command = "distill --teacher good --student other --data text.jsonl --out out"
    fails(command, 2, "different tokenizers", "compares token by token")
    fails("eval --model good --baseline other --data text.jsonl --out r.json", 2, "parent has another tokenizer")


@pytest.mark.parametrize("taken", ["file", "folder"])
def test_an_output_that_exists_is_left_alone(taken, tmp_path, fails):
    (tmp_path / "out").mkdir() if taken == "folder" else (tmp_path / "out").write_text("precious")
    fails("quantize --model good --method rtn --group-size 32 --out out", 2, "out: exists already", "--force")


def test_an_output_below_a_file(tmp_path, fails):
    (tmp_path / "file").write_text("precious")
    fails("quantize --model good --method rtn --group-size 32 --out file/out", 2, "file")
    (tmp_path / "recipe.toml").write_text('[quantize]\nmodel = "good"\nmethod = "rtn"\ngroup_size = 32\n')
    fails("run recipe.toml --out file", 2, "file")


def test_an_output_behind_a_link_to_itself(tmp_path, fails):
    (tmp_path / "loop").symlink_to("loop")
    fails("quantize --model good --method rtn --group-size 32 --out loop/out", 2, "loop")


def test_an_evaluation_that_does_not_fit_into_memory(fails):
    fails("eval --model good --data text.jsonl --window 1000000 --out r.json", 5, "emory")


def test_a_run_takes_no_folder_with_files_of_somebody_else(tmp_path, fails):
    recipe = '[quantize]\nmodel = "../good"\nmethod = "rtn"\ngroup_size = 32\n'
    (tmp_path / "mine/quantize").mkdir(parents=True)
    (tmp_path / "mine/quantize/precious").write_text("stays")
    (tmp_path / "mine/recipe.toml").write_text(recipe)
    fails("run mine/recipe.toml --out mine --force", 2, "mine: holds quantize, recipe.toml, and no run's events")


def test_an_output_that_would_replace_what_is_read(tmp_path, fails):
    bad_model(tmp_path / "models", lambda entries: entries).rename(tmp_path / "a")
    (tmp_path / "models").mkdir()
    (tmp_path / "a").rename(tmp_path / "models/a")
    (tmp_path / "r.toml").write_text("[quantize]\n")
    quantize = "quantize --method rtn --group-size 32 --force --model models/a"
    fails(f"{quantize} --out models/a", 2, "models/a, which is read; give another --out")
    fails(f"{quantize} --out models", 2, "models: holds", "models/a, which is read")
    fails(f"{quantize} --recipe r.toml --out r.toml", 2, "r.toml, which is read")
    fails("eval --model good --data text.jsonl --out text.jsonl --force", 2, "text.jsonl, which is read")


def test_gptq_without_calibration(fails):
    fails("quantize --model good --group-size 32 --out out", 2, "--calibration is missing", "--method rtn")


def test_a_number_that_is_out_of_all_bounds(fails):
    many = "9" * 30
    fails(f"generate --model good --prompt x --max-tokens {many}", 2, f"--max-tokens {many}: must be at most")
    fails(f"generate --model good --prompt x --seed {many}", 2, f"--seed {many}: must be at most")
    long = "distill --teacher good --data text.jsonl --out out --sequence-length 1000000000"
    fails(long, 2, "--sequence-length 1000000000: must be at most 1048576")
    fails("generate --model good --prompt x --temperature inf", 2, "--temperature Infinity: must be finite")


def test_the_home_of_a_user_who_is_not_known(monkeypatch, fails):
    fails("generate --model ~nobody-of-that-name/x --prompt x", 2, "~nobody-of-that-name/x: no such model folder")
    monkeypatch.setenv("HF_HUB_CACHE", "~nobody-of-that-name")
    fails("generate --model a/b --prompt x", 2, "a/b: no such folder, and not in the Hugging Face cache")


def test_a_model_without_a_name(fails):
    fails(["generate", "--model", "", "--prompt", "x"], 2, "the name of a model is empty")


def test_a_model_that_is_not_in_the_cache(fails):
    said = "hf download HuggingFaceTB/SmolLM2-135M"
    fails(
        "quantize --model HuggingFaceTB/SmolLM2-135M --method rtn --out out", 2, "not in the Hugging Face cache", said
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[quantize]\nbit = 8\n", "recipe.toml [quantize]: no key 'bit'; did you mean 'bits'?"),
        ("[quantise]\nbits = 8\n", "no key 'quantise'; did you mean 'quantize'?"),
        ("[quantize]\nbits = 7\n", "expected 3, 4, 5, 6 or 8"),
        ("[quantize\n", "not valid TOML"),
        ("", "no stage"),
        ('[eval]\ndata = ["x"]\n', "no stage before it makes one"),
        ("[eval]\ndata = []\n", "data = []: expected at least one item"),
        ('name = "../elsewhere"\n[quantize]\nbits = 8\n', "the name of a folder in runs/, not a path"),
    ],
)
def test_a_recipe_that_is_wrong(text, said, tmp_path, fails):
    (tmp_path / "recipe.toml").write_text(text)
    fails("run recipe.toml --out run", 2, said)


def test_an_empty_prompt(shared, tmp_path, fails):
    folder = bad_model(tmp_path / "no-bos", lambda entries: entries)
    config = {"eos_token": "</s>", "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    fails(["generate", "--model", "no-bos", "--prompt", "x", "--prompt", ""], 2, "prompt '' has no token")


def test_adapters_are_not_exported_to_gguf(shared, tmp_path, fails):
    folder = bad_model(tmp_path / "adapted", lambda entries: entries)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    name = f"base_model.model.{Q_PROJ.removesuffix('.weight')}"
    halves = [(f"{name}.lora_A.weight", np.ones((2, 64))), (f"{name}.lora_B.weight", np.ones((64, 2)))]
    raw_safetensors(folder / "adapter_model.safetensors", halves)
    fails("export --model adapted --format gguf --out out", 4, "has adapters; quantize it first")
    fails("export --model adapted --adapters keep --format gguf --out out", 2, "PEFT reads no gguf")
    for alpha in ("NaN", "Infinity", "9" * 400, '"4"'):
        (folder / "adapter_config.json").write_text(f'{{"peft_type": "LORA", "r": 2, "lora_alpha": {alpha}}}')
        fails("generate --model adapted --prompt x", 4, "lora_alpha and lora_dropout finite numbers")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    halves[1][1][5, 1] = np.nan
    raw_safetensors(folder / "adapter_model.safetensors", halves)
    fails("export --model adapted --format safetensors --out out", 4, "adapted", "NaN or Inf in")
    raw_safetensors(folder / "adapter_model.safetensors", [halves[0], (halves[1][0], np.ones((60, 2)))])
    fails("export --model adapted --format safetensors --out out", 4, "(60, 2)")


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ('metric = "kl_men"\nbound = "max"\nlimit = 1', "no metric 'kl_men'; did you mean 'kl_mean'"),
        ('metric = "kl_mean"\nbound = "max"\nlimit = nan', "limit = nan: expected a finite number"),
        ('metric = "kl_mean"\nbound = "max"\nlimit = 1', "needs a baseline"),
        (f'metric = "kl_mean"\nbound = "max"\nlimit = {"9" * 400}', "expected a finite number"),
        ("limit = " + "[" * 5000, "maximum recursion depth"),
        ("limit = " + "9" * 5000, "Exceeds the limit"),
    ],
)
def test_a_policy_that_is_wrong(policy, said, tmp_path, fails):
    (tmp_path / "gate.toml").write_text(f"[[rule]]\n{policy}\n")
    (tmp_path / "report.json").write_text(to_json(Report("run")))
    fails("gate report.json --policy gate.toml", 4, "gate.toml", said)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_a_report_with_a_number_that_is_none(number, tmp_path, fails):
    text = to_json(Report("run", metrics=[Measurement("kl_mean", "candidate", "parent", 0.125, 0.0625, 0.25, 0.95)]))
    (tmp_path / "report.json").write_text(text.replace("0.125", number))
    fails("gate report.json", 4, "report.json")


@pytest.mark.parametrize(
    ("kind", "flags"), [("Q4_0", "4 --symmetric"), ("Q4_1", "4 --asymmetric"), ("Q5_0", "5 --symmetric")]
)
def test_a_gguf_type_that_the_weights_are_not_in(kind, flags, fails):
    fails(f"export --model good --format gguf --gguf-type {kind} --out out", 2, kind, f"--bits {flags} first")


def test_a_tokenizer_with_more_tokens_than_the_embedding_has_rows(tmp_path, fails):
    write_model(tmp_path / "narrow", SMALL | {"vocab_size": 128})
    fails("generate --model narrow --prompt union", 4, "tokens and the embedding 128 rows")
    fails("eval --model narrow --data text.jsonl --out r.json", 4, "tokens and the embedding 128 rows")


def test_a_token_that_the_model_has_no_embedding_for(tmp_path, fails):
    folder = bad_model(tmp_path / "odd", lambda entries: entries)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    facts = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    size = len(tokenizer["model"]["vocab"])
    tokenizer["added_tokens"] += [{"id": id, "content": f"[{id}]", **facts} for id in range(size, 331)]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    fails(["generate", "--model", "odd", "--prompt", "our [325]"], 4, "token id 325: the model has 320")
    (tmp_path / "ids.jsonl").write_text('{"tokens": [5, 6, 320]}')
    fails("eval --model odd --data ids.jsonl --out r.json", 4, "ids.jsonl:1: token id 320: the model has 320")
    (folder / "generation_config.json").write_text(json.dumps({"pad_token_id": 5001, "eos_token_id": [1, 10**30]}))
    fails("generate --model odd --prompt union", 4, "has the id 5001 and the embedding 320 rows")


def test_a_prompt_that_is_no_unicode(fails):
    fails(["generate", "--model", "good", "--prompt", "a\udcff"], 4, "lone surrogate")


def test_a_reader_that_has_gone_does_not_change_the_exit_code(tmp_path, monkeypatch):
    (tmp_path / "report.json").write_text(to_json(Report("run")))
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone:
        monkeypatch.setattr("sys.stdout", gone)
        assert cli.main(["gate", str(tmp_path / "report.json"), "--json"]) == 3


def test_an_artifact_that_is_none(fails):
    fails("verify good", 4, "no manifest.json; only what compress exported can be verified")
    fails("verify text.jsonl", 4, "not a folder")
    fails("verify nowhere", 2, "no such model folder")


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def no_room(*_, **__):
    raise FULL


def no_folder(path, *_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))  # as the system says it


@pytest.mark.parametrize(
    ("owner", "name", "failing"),
    [(atomic, "_sync_tree", no_room), (Path, "write_text", no_room), (os, "mkdir", no_folder)],
    ids=["while flushing", "while writing", "at once"],
)
def test_a_full_disk_leaves_what_stood_there(owner, name, failing, tmp_path, monkeypatch, fails):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/precious").write_text("stays")
    monkeypatch.setattr(owner, name, failing)
    command = "quantize --model good --method rtn --group-size 32 --out out --force"
    fails(command, 5, "out", "No space left on device", "make room")


def test_a_full_disk_while_a_report_is_written(tmp_path, monkeypatch, fails):
    monkeypatch.setattr(atomic, "_sync", no_room)
    fails("eval --model good --data text.jsonl --window 16 --out report.json", 5, "report.json", "No space left")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_what_stood_there(how, tmp_path, monkeypatch, fails):
    def interrupted(*_, **__):
        signal.raise_signal(how)

    (tmp_path / "out").mkdir()
    (tmp_path / "out/precious").write_text("stays")
    monkeypatch.setattr("compress.quantize.stage.Shards.finish", interrupted)
    # A job in the background of a script is started with Ctrl-C ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        fails("quantize --model good --method rtn --group-size 32 --out out --force", 130, "interrupted")
    finally:
        signal.signal(signal.SIGINT, before)
