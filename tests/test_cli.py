"""The command line: flags into settings, messages and exit codes, and what is printed where."""

import errno
import json
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import click
import pytest

from compress import cli
from compress.errors import DataError, RecipeError
from compress.keys import keys
from compress.locate import cache, locate
from compress.quantize.settings import Quantize
from compress.schema import Recipe
from compress.settings import Data, MeshShape
from eval.errors import EvidenceError
from eval.report import Measurement, Report, to_json
from export.errors import ArtifactError, OutputExists

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    """Each test has a folder of its own, an empty model cache and none of the caller's overrides."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("COMPRESS_SEED", "COMPRESS_DTYPE", "COMPRESS_DEVICE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def stage(monkeypatch):
    """In place of any stage: keeps what it was called with, and returns or raises what the test says."""

    class Stage:
        result: dict | BaseException = {}

        def __call__(self, settings, common):
            self.settings, self.common = settings, common
            if isinstance(self.result, BaseException):
                raise self.result
            return dict(self.result)

    spy = Stage()
    monkeypatch.setattr(cli, "_function", lambda name: spy)
    return spy


def test_listing_the_commands_imports_nothing_heavy():
    code = """
import sys
from compress.cli import main
assert main(["--help"]) == 0
heavy = {"jax", "numpy", "flax", "rich", "tokenizers", "compress.schema"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in cli.STAGES)


def test_the_module_is_the_command():
    done = subprocess.run([sys.executable, "-m", "compress", "quantise"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "No such command 'quantise'" in done.stderr


@pytest.mark.parametrize("name", cli.STAGES)
def test_every_key_of_a_stage_is_a_flag_with_its_help_and_an_example(name, capsys):
    assert cli.main([name, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for key in keys(keys(Recipe)[cli.table_of(name)].table).values():
        assert (key.name.upper() if key.metadata.get("argument") else f"--{key.name.replace('_', '-')}") in shown
        assert key.metadata.get("argument") or key.help.split()[0] in shown
    assert f"Examples: compress {name}" in shown
    assert {"--recipe", "--seed", "--dtype", "--device", "--json", "--set"} <= set(shown.split())


@pytest.mark.parametrize("name", cli.STAGES)
def test_the_examples_of_a_stage_parse(name):
    for line in cli.STAGES[name].examples:
        words = line.replace("'Fellow citizens'", "citizens").split()
        command = cli.commands.commands[name]
        assert words[:2] == ["compress", name]
        command.make_context(name, words[2:])


def test_flags_reach_the_stage(tmp_path, stage):
    (tmp_path / "model").mkdir()
    flags = "--bits 8 --group-size 128 --asymmetric --calibration a.txt --calibration b.txt --embedding-bits 8"
    rest = "--out small --seed 7 --dtype bfloat16 --device cpu --bad-rows skip --columns text=body"
    assert cli.main(["quantize", "--model", "model", *flags.split(), *rest.split()]) == 0
    assert stage.settings == Quantize(
        model=str(tmp_path / "model"),
        bits=8,
        group_size=128,
        symmetric=False,
        calibration=(tmp_path / "a.txt", tmp_path / "b.txt"),
        embedding_bits=8,
    )
    common = stage.common
    assert (common.seed, common.dtype, common.device, common.out) == (7, "bfloat16", "cpu", Path("small"))
    assert common.data == Data(columns={"text": "body"}, bad_rows="skip")


def test_a_key_in_a_recipe_is_the_same_as_its_flag(tmp_path, stage):
    (tmp_path / "model").mkdir()
    (tmp_path / "recipe.toml").write_text('seed = 3\n[quantize]\nmodel = "model"\nbits = 8\nsymmetric = false\n')
    assert cli.main(["quantize", "--recipe", "recipe.toml", "--out", "a"]) == 0
    from_recipe = stage.settings, stage.common.seed
    assert cli.main("quantize --model model --bits 8 --asymmetric --seed 3 --out a".split()) == 0
    assert (stage.settings, stage.common.seed) == from_recipe
    assert cli.main("quantize --recipe recipe.toml --bits 4 --set quantize.symmetric=true --out a".split()) == 0
    assert (stage.settings.bits, stage.settings.symmetric, stage.common.seed) == (4, True, 3)


def test_the_mesh_of_a_recipe_is_the_same_as_its_flags(tmp_path, stage):
    (tmp_path / "model").mkdir()
    (tmp_path / "recipe.toml").write_text("[mesh]\nfsdp = 4\ntensor = 2\n")
    line = "distill --teacher model --data a.txt --out a"
    assert cli.main(f"{line} --fsdp 4 --tensor 2".split()) == 0
    assert stage.common.mesh == MeshShape(fsdp=4, tensor=2)
    assert cli.main(f"{line} --recipe recipe.toml --tensor 1".split()) == 0
    assert stage.common.mesh == MeshShape(fsdp=4)
    assert cli.main(f"{line} --fsdp 0".split()) == 2


def test_a_process_that_does_not_know_the_others_is_refused(tmp_path, monkeypatch, stage, capsys):
    (tmp_path / "model").mkdir()
    monkeypatch.setenv("COMPRESS_PROCESS", "1")
    assert cli.main("distill --teacher model --data a.txt --out a".split()) == 2
    said = capsys.readouterr().err
    assert "COMPRESS_PROCESS without COMPRESS_COORDINATOR, COMPRESS_PROCESSES; set all or none" in said


def test_auto_says_which_device_it_took(tmp_path, stage, capsys):
    (tmp_path / "model").mkdir()
    assert cli.main("quantize --model model --out a".split()) == 0
    assert (stage.common.device, stage.common.dtype) == ("cpu", "float32")
    assert "device: 8 x cpu" in capsys.readouterr().err


def test_run_takes_the_name_and_the_folder_of_the_run_from_the_recipe(tmp_path, stage):
    (tmp_path / "small.toml").write_text("[quantize]\nbits = 8\n")
    assert cli.main(["run", "small.toml", "--set", "quantize.damp=0.1"]) == 0
    assert (stage.settings.name, stage.common.out) == ("small", Path("runs/small"))
    assert stage.settings.quantize == Quantize(bits=8, damp=0.1)
    assert stage.settings.distill is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("quantize --out a", "--model is missing"),
        ("quantize --model model", "--out is missing"),
        ("quantize --model model --out model", "model: exists already"),
        ("quantize --model model --out a --bit 4", "No such option '--bit'"),
        ("quantize --model model --out a --bits 2", "'2' is not one of '3', '4', '5', '6', '8'"),
        ("quantize --model model --out a --group-size 16", "--group-size 16: must be at least 32"),
        ("quantize --model model --out a --bits 4 --set quantize.bits=4", "given both by --bits and by --set"),
        ("quantize --model model --out a --set quantize.bit=4", "no key 'bit'; did you mean 'bits'?"),
        ("quantize --model model --out a --recipe none.toml", "none.toml: no such recipe"),
        ("quantize --model model --out a --columns text", "--columns text: expected COLUMN=NAME"),
        ("quantize --model ./none --out a", "./none: no such model folder or GGUF file"),
        ("quantize --model org/name --out a", "hf download org/name"),
        ("quantize --model model --out a --device tpu", "device tpu: jax cannot use it here"),
        ("distill --data a --out b", "[distill]: teacher is missing"),
        ("run none.toml", "none.toml: no such recipe"),
        ("run", "Missing argument 'RECIPE'"),
        ("verify", "MODEL is missing"),
    ],
)
def test_a_mistake_of_usage_is_explained_and_exits_2(tmp_path, stage, capsys, line, message):
    (tmp_path / "model").mkdir()
    assert cli.main(line.split()) == 2
    shown = capsys.readouterr()
    assert message in " ".join(shown.err.split())
    assert "Traceback" not in shown.err
    assert not shown.out
    assert not hasattr(stage, "settings"), "the stage ran all the same"


def test_force_allows_an_output_that_exists(tmp_path, stage):
    (tmp_path / "model").mkdir()
    (tmp_path / "a").mkdir()
    assert cli.main("quantize --model model --out a --force".split()) == 0
    assert stage.common.force


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RecipeError("wrong\nkey"), 2),
        (OutputExists("there"), 2),
        (ArtifactError("bad \x1b]0; \x07 \x9b file"), 4),
        (DataError("a.jsonl:3: bad row"), 4),
        (EvidenceError("bad report"), 4),
        (PermissionError(errno.EACCES, "Permission denied", "out"), 4),
        (OSError(errno.ENOSPC, "No space left on device", "out"), 5),
        (MemoryError("9 GB"), 5),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_an_error_is_one_line_with_its_exit_code(tmp_path, stage, capsys, error, code):
    (tmp_path / "model").mkdir()
    stage.result = error
    assert cli.main("quantize --model model --out a --device cpu".split()) == code
    shown = capsys.readouterr().err
    assert len(shown.strip().splitlines()) == 1
    assert shown.strip().isprintable()
    said = (
        (error.strerror, error.filename) if isinstance(error, OSError) else filter(str.isprintable, str(error).split())
    )
    assert all(word in shown for word in said) or code == 130


def test_a_bug_keeps_its_traceback_and_is_no_verdict(tmp_path, stage, capsys):
    (tmp_path / "model").mkdir()
    stage.result = ZeroDivisionError("no mistake of the user's")
    assert cli.main("quantize --model model --out a".split()) == cli.BUG
    assert "Traceback" in capsys.readouterr().err


def test_json_goes_to_standard_output_and_is_strict(tmp_path, stage, capsys):
    (tmp_path / "model").mkdir()
    stage.result = {"loss": float("nan"), "out": Path("a"), "rows": [{"x": 1.5}]}
    assert cli.main("quantize --model model --out a --json".split()) == 0
    shown = capsys.readouterr().out
    assert json.loads(shown, parse_constant=pytest.fail) == {"loss": None, "out": "a", "rows": [{"x": 1.5}]}


def test_a_table_shows_every_value(tmp_path, stage, capsys):
    (tmp_path / "model").mkdir()
    stage.result = {"text": "[bold] stays", "rows": [{"name": "q_proj", "mse": 0.25}, {"name": "k_proj", "sqnr": 19}]}
    assert cli.main("quantize --model model --out a".split()) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("[bold] stays", "q_proj", "k_proj", "0.25", "19", "sqnr"))


POLICY = '[[rule]]\nmetric = "kl_mean"\nbaseline = "parent"\nbound = "max"\nlimit = 0.1\nmin_documents = 4\n'


@pytest.mark.parametrize(
    ("value", "documents", "code"), [(0.05, 9, 0), (0.2, 9, 1), (0.05, 3, 3), (float("nan"), 9, 3)]
)
def test_the_gate_judges_a_report_file(tmp_path, capsys, value, documents, code):
    low, high = (value - 0.01, value + 0.01) if value == value else (None, None)
    number = value if value == value else None
    measured = Measurement("kl_mean", "candidate", "parent", number, low, high, 0.95, "nats", 4096, documents)
    (tmp_path / "report.json").write_text(to_json(Report("run", metrics=[measured])))
    (tmp_path / "gate.toml").write_text(POLICY)
    assert cli.main("gate report.json --policy gate.toml --json".split()) == code
    shown = json.loads(capsys.readouterr().out)
    assert shown["status"] == {0: "pass", 1: "fail", 3: "inconclusive"}[code]
    assert shown["rules"][0]["rule"] == "kl_mean of candidate against parent at most 0.1"


@pytest.mark.parametrize(
    ("report", "policy", "message"),
    [
        (None, POLICY, "report.json: no such file"),
        ("{", POLICY, "report.json"),
        (to_json(Report("run")), "[[rule]]\nmetric = 3\n", "gate.toml"),
        (to_json(Report("run")), None, "gate.toml: no such file"),
    ],
)
def test_bad_evidence_exits_4(tmp_path, capsys, report, policy, message):
    for name, text in (("report.json", report), ("gate.toml", policy)):
        if text is not None:
            (tmp_path / name).write_text(text)
    assert cli.main("gate report.json --policy gate.toml".split()) == 4
    assert message in capsys.readouterr().err


def test_an_empty_report_is_no_pass_under_the_built_in_policy(tmp_path):
    (tmp_path / "report.json").write_text(to_json(Report("run")))
    assert cli.main(["gate", "report.json"]) == 3


def test_a_cached_model_is_found_and_nothing_outside_the_cache(tmp_path):
    cached = tmp_path / "hub/models--org--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text("0123abcd")
    with pytest.raises(RecipeError, match="hf download org/name"):
        locate("org/name")
    (cached / "snapshots/0123abcd").mkdir(parents=True)
    assert locate("org/name") == cached / "snapshots/0123abcd"
    (cached / "refs/main").write_text("../..")
    with pytest.raises(RecipeError, match="hf download org/name"):
        locate("org/name")
    with pytest.raises(RecipeError, match="no such model folder"):
        locate("../hub")


def test_the_cache_is_where_hugging_face_keeps_it():
    assert cache({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}) == Path("/a")
    assert cache({"HF_HOME": "/b"}) == Path("/b/hub")
    assert cache({"XDG_CACHE_HOME": "/c"}) == Path("/c/huggingface/hub")
    assert cache({}) == Path.home() / ".cache/huggingface/hub"


def test_the_schema_command_prints_a_schema_of_all_tables(capsys):
    assert cli.main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert {cli.table_of(name) for name in cli.STAGES} <= set(schema["properties"])
    assert schema["properties"]["quantize"]["properties"]["bits"]["enum"] == [3, 4, 5, 6, 8]


def test_every_stage_is_a_table_of_the_recipe_and_every_table_a_command():
    tables = {name for name, key in keys(Recipe).items() if key.table} - {"data", "mesh", "log"}
    assert tables == {cli.table_of(name) for name in cli.STAGES}
    assert isinstance(cli.commands, click.Group)


def test_the_wheel_holds_the_three_packages_and_nothing_else(tmp_path):
    from hatchling.builders.wheel import WheelBuilder

    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    names = zipfile.ZipFile(wheel).namelist()
    packages = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert packages == {"compress", "eval", "export"}
    on_disk = {str(p.relative_to(ROOT)) for name in packages for p in (ROOT / name).rglob("*.py")}
    assert on_disk <= set(names)
    scripts = next(name for name in names if name.endswith("entry_points.txt"))
    assert "compress = compress.cli:main" in zipfile.ZipFile(wheel).read(scripts).decode()


def test_the_constraints_are_names_and_versions_and_cover_what_is_required():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["dev"], *extras["readers"]]
    names = {word.split(">")[0].split("=")[0].lower().replace("-", "_") for word in wanted}
    assert names <= {name.lower().replace("-", "_") for name in pinned}


def test_an_exchange_that_fails_is_told_as_a_lost_process_and_no_other_error_is():
    lost = ValueError("UNKNOWN: Gloo AllGather failed: Connection reset by peer\nat this place")
    assert cli.exit_code(lost) == 75
    assert cli._said(lost) == (
        "an exchange between the processes of this run failed (UNKNOWN: Gloo AllGather failed: Connection reset by "
        "peer); if one has died, start all again to go on from the last checkpoint"
    )
    assert cli.exit_code(ValueError("shapes do not agree")) == cli.BUG
    assert cli.exit_code(DataError("row 3: a barrier")) == 4
