"""`compress run`, from a teacher of random weights to a released artifact; and what must not be released."""

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from compress import cli
from compress.align import stage as align
from compress.distill import cache_stage
from compress.distill import stage as distill
from compress.distill.cache import TeacherCache
from compress.progress import Progress
from compress.quantize.shards import Shards
from export.manifest import describe
from tests.tiny_run import RECIPE, write_jsonl, write_world

STAGES = ("distill", "align", "quantize", "export", "eval")


@pytest.fixture(scope="module", autouse=True)
def _one_device():
    """Training over a mesh has tests of its own; to compile for one device is quicker."""
    with pytest.MonkeyPatch.context() as patch:
        for stage in (distill, align):
            patch.setattr(stage, "mesh_of_devices", lambda shape: None)
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a recipe whose run has passed, with what the run printed; not to be changed."""
    folder = tmp_path_factory.mktemp("finished")
    recipe = write_world(folder)
    assert cli.main(["run", str(recipe), "--out", str(folder / "run")]) == 0
    return folder


@pytest.fixture
def world(finished, tmp_path, monkeypatch):
    """A copy of the finished run, to be changed, in the current folder."""
    shutil.copytree(finished, tmp_path / "world")
    monkeypatch.chdir(tmp_path / "world")
    return tmp_path / "world"


def run(*flags: str, recipe: str = "recipe.toml") -> int:
    return cli.main(["run", recipe, "--out", "run", *flags])


def last_run(folder: Path) -> dict[str, list[str]]:
    """What happened to each stage in the last run."""
    events: dict[str, list[str]] = {}
    for line in (folder / "run/events.jsonl").read_text().splitlines():
        row = json.loads(line, parse_constant=pytest.fail)
        if row["stage"] == "distill" and row["event"] in ("started", "skipped"):
            events = {}
        if row["stage"] in STAGES and row["event"] not in ("step", "validated"):
            events.setdefault(row["stage"], []).append(row["event"])
    return events


def ran(folder: Path) -> set[str]:
    return {stage for stage, events in last_run(folder).items() if "started" in events}


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file but the log, with its time and bytes."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "events.jsonl")
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def tensor(path: Path, name: str) -> tuple[int, int]:
    """Where the bytes of a tensor begin and end in its file."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    begin, end = json.loads(data[8 : 8 + length])[name]["data_offsets"]
    return 8 + length + begin, 8 + length + end


def swap_scales(path: Path) -> None:
    """Give two layers each other's scales."""
    data = bytearray(path.read_bytes())
    for linear in ("self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
        (a, b), (c, d) = (tensor(path, f"model.layers.{i}.{linear}.weight_scale") for i in (0, 1))
        data[a:b], data[c:d] = data[c:d], data[a:b]
    path.write_bytes(data)


def list_anew(folder: Path) -> None:
    """Make the manifest agree with the files again."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = {name: describe(folder / name) for name in manifest["files"]}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_a_run_ends_with_reports_and_an_artifact(finished):
    folder = finished / "run"
    report = json.loads((folder / "report.json").read_text(), parse_constant=pytest.fail)
    assert report["stages"] == list(STAGES)
    measured = {(m["name"], m["model"], m["baseline"]) for m in report["metrics"]}
    assert {
        ("perplexity_increase", "candidate", "parent"),
        ("kl_mean", "candidate", "teacher"),
        ("kl_mean", "gguf", "parent"),
        ("kl_gain", "distilled", "teacher"),
        ("adapter_retained", "candidate", None),
    } <= measured
    assert report["generations"][0]["prompt"] == "the union"
    assert set(report["generations"][0]["outputs"]) == {"teacher", "parent", "candidate"}
    assert {(c["stage"], c["name"]) for c in report["curves"]} >= {("distill", "loss"), ("align", "validation loss")}
    assert len(report["layers"]) == 2
    assert "<html" in (folder / "report.html").read_text()
    assert "pass" in (folder / "report.md").read_text().splitlines()[0]
    assert {path.name for path in (folder / "artifact").iterdir()} == {"compressed-tensors", "gguf", "stage.json"}


def test_the_model_card_tells_the_verdict_and_what_was_measured(finished):
    report = json.loads((finished / "run/report.json").read_text())
    perplexity = next(m for m in report["metrics"] if (m["name"], m["model"]) == ("perplexity", "candidate"))
    for name in ("compressed-tensors", "gguf"):
        card = (finished / f"run/artifact/{name}/README.md").read_text()
        assert f"| perplexity | {perplexity['value']:.4g} |" in card
        assert "Gate: pass" in card
        assert "perplexity" not in (finished / f"run/export/{name}/README.md").read_text()


def test_events_tell_every_stage_step_and_validation(finished):
    rows = [json.loads(line) for line in (finished / "run/events.jsonl").read_text().splitlines()]
    for stage in ("distill", "align"):
        steps = [row["step"] for row in rows if row["stage"].startswith(stage) and row["event"] == "step"]
        assert steps == list(range(1, 17))
        validations = [row for row in rows if (row["stage"], row["event"]) == (stage, "validated")]
        assert [row["step"] for row in validations] == [0, 8, 16]
        assert validations[-1]["loss"] < validations[0]["loss"]
    assert last_run(finished) == {stage: ["started", "finished"] for stage in STAGES}
    assert (rows[-1]["stage"], rows[-1]["event"]) == ("gate", "pass")


def test_a_second_run_skips_every_stage_and_touches_nothing(world, capsys):
    assert run() == 0
    assert ran(world) == set()  # though the folder has moved
    before = contents(world)
    capsys.readouterr()
    assert run("--json") == 0
    shown = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert shown["status"] == "pass"
    assert shown["artifact"] == "run/artifact"
    assert last_run(world) == {stage: ["skipped"] for stage in STAGES}
    assert contents(world) == before


def test_a_changed_setting_runs_its_stage_and_those_behind_it_again(world):
    assert run("--set", "quantize.symmetric=false") == 0
    assert ran(world) == {"quantize", "export", "eval"}
    assert run("--set", "quantize.symmetric=false", "--set", "eval.max_tokens=600") == 0
    assert ran(world) == {"eval"}


def test_a_stage_without_its_record_runs_again_and_what_reads_the_same_files_does_not(world):
    (world / "run/quantize/stage.json").unlink()
    assert run() == 0
    assert ran(world) == {"quantize"}


def test_changed_data_run_again_what_reads_it(world):
    write_jsonl(world / "valid.jsonl", [{"text": line} for line in ("the people rests upon the union.",) * 30])
    run()
    assert ran(world) >= {"distill", "eval"}


def test_ctrl_c_leaves_nothing_half_written_and_the_next_run_goes_on_from_there(world, monkeypatch, capsys):
    quantized, shown = world / "run/quantize", capsys.readouterr
    before = contents(quantized)
    rightful = Shards.finish

    def interrupted(shards, folder):
        rightful(shards, folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(Shards, "finish", interrupted)
    assert run("--set", "quantize.symmetric=false") == 130
    assert shown().err.splitlines()[-1] == "interrupted"
    assert contents(quantized) == before
    assert not list(world.rglob(".*"))
    assert last_run(world)["quantize"] == ["started", "stopped"]
    monkeypatch.setattr(Shards, "finish", rightful)
    assert run("--set", "quantize.symmetric=false") == 0
    assert last_run(world)["align"] == ["skipped"]
    assert last_run(world)["quantize"] == ["started", "finished"]


@pytest.mark.parametrize(("limit", "code"), [("limit = 1e-9", 1), ("limit = 1.0\nmin_documents = 1000", 3)])
def test_what_the_gate_does_not_pass_is_not_released(world, limit, code, capsys):
    (world / "gate.toml").write_text(f'[[rule]]\nmetric = "kl_mean"\nbaseline = "parent"\nbound = "max"\n{limit}\n')
    assert run("--set", "gate.policy=gate.toml", "--json") == code
    shown = json.loads(capsys.readouterr().out)
    assert shown["artifact"].startswith("none")
    assert not (world / "run/artifact").exists()
    assert (world / "run/export/gguf/model.gguf").exists()
    assert {path.suffix for path in (world / "run").glob("report.*")} == {".json", ".html", ".md"}
    assert not list(world.rglob(".*"))
    assert ran(world) == set()


def test_a_rule_that_requires_a_stage_that_did_not_run_is_skipped_and_alone_proves_nothing(world):
    rule = '[[rule]]\nmetric = "kl_mean"\nbaseline = "parent"\nbound = "max"\nlimit = 1.0\nrequires = "prune"\n'
    (world / "gate.toml").write_text(rule)
    assert cli.main(["gate", "run/report.json", "--policy", "gate.toml"]) == 3
    (world / "gate.toml").write_text(rule.replace("prune", "quantize"))
    assert cli.main(["gate", "run/report.json", "--policy", "gate.toml"]) == 0


def test_two_layers_scales_swapped_fail_the_gate(world):
    shutil.copytree("run/artifact/compressed-tensors", "swapped")
    command = "eval --baseline run/align --data valid.jsonl --window 32 --teacher teacher".split()
    assert cli.main([*command, "--model", "swapped", "--out", "whole.json"]) == 0
    assert cli.main(["gate", "whole.json"]) == 0
    swap_scales(world / "swapped/model.safetensors")
    assert cli.main([*command, "--model", "swapped", "--out", "swapped.json"]) == 0
    assert cli.main(["gate", "swapped.json"]) == 1


def swap_and_list_anew(exported: Path) -> None:
    swap_scales(exported / "compressed-tensors/model.safetensors")
    list_anew(exported / "compressed-tensors")


def append_to_gguf(exported: Path) -> None:
    """To a format that is not the candidate: its check alone can tell."""
    with (exported / "gguf/model.gguf").open("ab") as file:
        file.write(bytes(32))


@pytest.mark.parametrize("touch", [swap_and_list_anew, append_to_gguf])
def test_a_run_whose_exported_files_were_touched_is_judged_anew_and_fails(touch, world):
    touch(world / "run/export")
    assert run() == 1
    assert ran(world) == {"eval"}
    assert not (world / "run/artifact").exists()


def test_an_artifact_without_its_adapters_fails_the_gate(world):
    shutil.copytree("run/align", "bare", ignore=lambda _, names: [n for n in names if n.startswith("adapter_")])
    assert cli.main("quantize --model bare --method rtn --group-size 32 --out dropped".split()) == 0
    command = "eval --model dropped --baseline run/align --data valid.jsonl --window 32 --out dropped.json"
    assert cli.main(command.split()) == 0
    assert cli.main(["gate", "dropped.json"]) == 1


def test_adapters_count_when_their_base_is_measured(world):
    command = "eval --model run/align --baseline run/align --data valid.jsonl --window 32 --out own.json"
    assert cli.main(command.split()) == 0
    report = json.loads((world / "own.json").read_text())
    found = {(m["name"], m["model"]): m["value"] for m in report["metrics"]}
    assert found["kl_mean", "candidate"] < 1e-6
    adapters = next(part for part in report["size"]["parts"] if part["name"] == "adapters")
    assert adapters["bytes"] == 2 * adapters["weights"] > 0


def test_verify_passes_on_what_was_released(world, capsys):
    assert cli.main("verify run/artifact --json".split()) == 0
    assert set(json.loads(capsys.readouterr().out)["verified"]) == {"compressed-tensors", "gguf"}
    assert cli.main("verify run/artifact/gguf --reference run/quantize".split()) == 0


def flip(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (flip, "model.safetensors: contents changed"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json: missing"),
        (lambda folder: (folder / "pytorch_model.bin").write_bytes(b"x"), "pytorch_model.bin: not in manifest.json"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json: not valid JSON"),
        (lambda folder: (folder / "manifest.json").unlink(), "no manifest.json"),
    ],
    ids=["flipped", "missing", "extra", "broken manifest", "no manifest"],
)
def test_verify_names_what_is_not_as_it_was(finished, tmp_path, capsys, damage, said):
    shutil.copytree(finished / "run/artifact/compressed-tensors", tmp_path / "artifact")
    damage(tmp_path / "artifact")
    assert cli.main(["verify", str(tmp_path / "artifact")]) == 4
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 2, shown
    assert said in shown[1]


def test_verify_knows_another_model_by_its_logits(finished, tmp_path, capsys):
    shutil.copytree(finished / "run/artifact/compressed-tensors", tmp_path / "artifact")
    swap_scales(tmp_path / "artifact/model.safetensors")
    list_anew(tmp_path / "artifact")
    assert cli.main(["verify", str(tmp_path / "artifact")]) == 4
    assert "logits differ by" in capsys.readouterr().err.splitlines()[-1]


def test_every_command_prints_json_that_any_reader_takes(world, capsys):
    commands = (
        "cache-teacher --teacher teacher --data train.jsonl --sequence-length 32 --top-k 8 --out cache",
        "distill --out a",
        "align --model a --out b",
        "quantize --model b --out c",
        "eval --model c --baseline b",
        "gate run/report.json",
        "export --model c --format safetensors --format orbax --out d",
        "verify run/artifact",
        "generate --model c --prompt citizens --prompt people",
    )
    assert [line.split()[0] for line in commands] == list(cli.STAGES)
    for line in commands:
        assert cli.main([*line.split(), "--recipe", "recipe.toml", "--json"]) == 0, line
        shown = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
        assert isinstance(shown, dict)
        assert shown


@pytest.mark.parametrize("kind", ["auto", "F16", "Q8_0", "Q4_0"])
def test_every_gguf_type_is_verified_when_it_is_written_and_later(kind, world):
    assert cli.main(f"export --model run/quantize --format gguf --gguf-type {kind} --out gguf".split()) == 0
    assert cli.main(["verify", "gguf"]) == 0


def test_floats_may_round_as_far_as_their_logits_are_large(world, capsys):
    for name in ("safetensors", "orbax", "gguf"):
        assert cli.main(f"export --model teacher --format {name} --out {name} --json".split()) == 0
        found = json.loads(capsys.readouterr().out)["formats"][name]["logit_difference"]
        assert 0 < found < 0.5
        assert cli.main(["verify", name]) == 0
        capsys.readouterr()


def test_a_recipe_does_what_its_flags_do(world):
    assert cli.main("quantize --model teacher --method rtn --group-size 32 --asymmetric --out flags".split()) == 0
    (world / "q.toml").write_text('[quantize]\nmodel = "teacher"\nmethod = "rtn"\ngroup_size = 32\nsymmetric = false\n')
    assert cli.main("quantize --recipe q.toml --out recipe".split()) == 0
    assert {name: data for name, (_, data) in contents(world / "flags").items()} == {
        name: data for name, (_, data) in contents(world / "recipe").items()
    }


def test_rows_that_were_skipped_are_listed_and_counted(world, capsys):
    with (world / "valid.jsonl").open("a") as file:
        file.write('{"text": "broken\n{"words": "no such column"}\n')
    assert run("--json") == 4
    assert "valid.jsonl:25: broken JSON" in capsys.readouterr().err
    run("--json", "--set", "data.bad_rows=skip")
    capsys.readouterr()
    listed = [json.loads(line) for line in (world / "run/quarantine.jsonl").read_text().splitlines()]
    assert {(Path(row["row"]).name, row["stage"]) for row in listed} == {
        (f"valid.jsonl:{line}", stage) for line in (25, 26) for stage in ("distill", "align", "eval")
    }
    assert "lacks column" in listed[-1]["reason"] or "no column" in listed[-1]["reason"]
    counted = json.loads((world / "run/eval/stage.json").read_text())["result"]["rows"]
    assert (counted["read"], counted["kept"], counted["skipped"]) == (26, 24, 2)
    assert sum(counted["reasons"].values()) == 2


def test_a_run_of_preference_pairs_reports_what_the_pairs_say(world):
    pair = {"prompt": "the union", "chosen": " rests upon the people.", "rejected": " asks for the treasury."}
    write_jsonl(world / "pairs.jsonl", [pair] * 40)
    (world / "dpo.toml").write_text(
        '[align]\nmodel = "run/distill"\nmethod = "dpo"\ndata = ["pairs.jsonl"]\nvalid = ["pairs.jsonl"]\nsteps = 4\n'
        "sequence_length = 24\ngroup_size = 32\nlearning_rate = 1e-3\nvalid_every = 4\nkl_limit = 0\n"
        '[quantize]\nmethod = "rtn"\ngroup_size = 32\n[eval]\ndata = ["valid.jsonl"]\nwindow = 32\n'
    )
    assert run("--device", "cpu", recipe="dpo.toml") in (0, 1, 3)
    report = json.loads((world / "run/report.json").read_text())
    found = {m["name"]: m["value"] for m in report["metrics"] if m["model"] == "aligned"}
    assert found["preference_accuracy"] in (0, 1)
    assert {c["name"] for c in report["curves"]} >= {"accuracy", "margin", "kl_to_reference"}
    assert not (world / "run/artifact").exists()


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (("group_size = 32\ncalibration", "group_size = 64\ncalibration"), 2, "mlp.down_proj.weight (I = 96)"),
        (("group_size = 32\n\n[quantize]", "group_size = 64\n\n[quantize]"), 2, "group_size = 64 does not divide"),
        (('method = "rtn"', 'method = "gptq"\n#'), 2, "calibration is missing"),
        (
            ('format = ["compressed-tensors"', 'format = ["bitsandbytes"'),
            2,
            "not in NF4: compress quantize --method nf4",
        ),
        (
            ("group_size = 32\ncalibration", "group_size = 32\nbits = 3\ncalibration"),
            2,
            "3 bits without zero points have",
        ),
        (
            ("group_size = 32\ncalibration", "group_size = 32\nsymmetric = false\nembedding_bits = 8\ncalibration"),
            2,
            "[quantize]: 8 bits with zero points have no GGUF form",
        ),
        (('data = ["valid.jsonl"]\nwindow', 'data = ["none.jsonl"]\nwindow'), 4, "none.jsonl: no such file"),
        (("[generate]", '[gate]\npolicy = "none.toml"\n[generate]'), 4, "none.toml: no such file"),
        (('teacher = "teacher"', 'teacher = "nowhere"'), 2, "nowhere: no such model"),
        (("[distill]", "[distil]"), 2, "no key 'distil'; did you mean 'distill'?"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_would_fail_late_is_refused_before_the_first_stage(finished, tmp_path, capsys, change, code, said):
    text = RECIPE.replace(*change)
    if "#" in text:
        text = text.replace('calibration = ["train.jsonl"]\n', "")
    (tmp_path / "recipe.toml").write_text(text)
    for name in ("teacher", "train.jsonl", "valid.jsonl"):
        (tmp_path / name).symlink_to(finished / name)
    assert cli.main(["run", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "run")]) == code
    assert said in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_only_what_takes_longer_than_two_seconds_says_how_much_is_left(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr("compress.progress.time.monotonic", lambda: clock[0])
    slow = Progress(every=0.0)
    for step in range(1, 12):
        slow("distill", step, 11)
        clock[0] += 9 if step == 1 else 30.0
    shown = capsys.readouterr().err.splitlines()
    assert shown[0] == "distill 1/11"
    assert shown[2] == "distill 3/11  2:36 left"
    assert shown[-1] == "distill 11/11"
    slow("eval", 1, 4)
    clock[0] += 0.1
    slow("eval", 2, 4)
    assert "left" not in capsys.readouterr().err


CACHED = (
    RECIPE[: RECIPE.index("[align]")].replace("steps = 16", "steps = 4").replace("valid_every = 8", "valid_every = 4")
)


def test_a_run_makes_the_teacher_s_cache_once_and_distills_from_it(world, monkeypatch, capsys):
    (world / "cached.toml").write_text(f"{CACHED}\n[cache_teacher]\ntop_k = 16\n")
    shutil.rmtree(world / "run")
    write_shard, killed = cache_stage.write_file, []

    def stop_once(tensors, path):
        if not killed:
            killed.append(path)
            raise KeyboardInterrupt
        write_shard(tensors, path)

    monkeypatch.setattr(cache_stage, "write_file", stop_once)
    assert run(recipe="cached.toml") == 130
    assert (world / "run/cache_teacher.partial").is_dir()
    assert run(recipe="cached.toml") == 0
    assert not (world / "run/cache_teacher.partial").exists()
    cache = TeacherCache(world / "run/cache_teacher")
    assert (cache.top_k, cache.temperature, cache.identity["sequence_length"]) == (16, 1.0, 32)
    before = contents(world / "run/cache_teacher")
    assert run("--set", "distill.steps=5", "--set", "seed=3", recipe="cached.toml") == 0
    assert contents(world / "run/cache_teacher") == before
    assert len(json.loads((world / "run/distill/training.json").read_text())["steps"]) == 5
    assert run("--set", "distill.temperature=2", recipe="cached.toml") == 0
    assert TeacherCache(world / "run/cache_teacher").temperature == 2.0
    capsys.readouterr()
    assert cli.main(["plan", "cached.toml", "--json", "--device", "cpu"]) == 0
    planned = json.loads(capsys.readouterr().out)["stages"]
    assert list(planned) == ["cache_teacher", "distill"]
    assert planned["cache_teacher"]["disk_gb"] > 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (CACHED + "[cache_teacher]\nsequence_length = 64", "sequence_length: in a run it is that of [distill], 32"),
        (CACHED + '[cache_teacher]\ndata = ["valid.jsonl"]', "train.jsonl; leave it out"),
        ("[cache_teacher]\n", "[cache_teacher] makes a cache for [distill], and there is no [distill]; leave it out"),
        (CACHED + 'teacher_cache = "old"\n[cache_teacher]', "teacher_cache in [distill] names one; leave it out"),
        (CACHED + "[cache_teacher]\ntop_k = 500", "top_k = 500: the teacher has 320 tokens"),
        (CACHED + "temperature_end = 4.0\n[cache_teacher]", "likeliest tokens at temperature 1.0"),
        (CACHED + "[mesh]\nfsdp = 3", "does not fit"),
        (CACHED + "hidden = 1.0\n[cache_teacher]", "teacher_cache holds logits alone"),
    ],
)
def test_tables_that_do_not_go_together_are_refused(finished, tmp_path, capsys, text, said):
    (tmp_path / "recipe.toml").write_text(text)
    for name in ("teacher", "train.jsonl", "valid.jsonl"):
        (tmp_path / name).symlink_to(finished / name)
    assert cli.main(["run", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "run")]) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_a_stage_that_fails_keeps_the_one_that_stood(world, monkeypatch, capsys):
    before = contents(world / "run/distill")

    def broken(*_, **__):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(distill, "fit", broken)
    assert run("--set", "distill.steps=3") == cli.BUG
    assert "Traceback" in capsys.readouterr().err
    assert contents(world / "run/distill") == before
    assert np.all([not path.name.endswith(".tmp") for path in world.rglob("*")])
