"""Where training figures go beside their files: event files that TensorBoard reads, and Weights & Biases' calls."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from compress import cli, log
from compress.errors import RecipeError
from compress.keys import keys
from compress.progress import Progress
from compress.settings import Log
from compress.train.course import tellers
from tests import tiny_run


def test_a_step_and_a_validation_reach_every_sink_under_the_stage_s_name(capsys):
    told = []
    progress = Progress(quiet=True)
    progress.sinks = [lambda *said: told.append(said)] * 2
    tell = tellers(progress, "align (dpo)", 9)
    tell["on_step"](3, {"step": 3.0, "loss": 0.5, "margin": 0.1, "count": 8.0, "seconds": 2.0})
    tell["on_validation"]({"step": 4.0, "loss": 0.4})
    step = ("align", 3, {"loss": 0.5, "margin": 0.1, "count": 8.0, "seconds": 2.0})
    assert told == [step] * 2 + [("align", 4, {"validation/loss": 0.4})] * 2
    assert not any(capsys.readouterr())


def test_every_key_of_the_table_is_a_sink():
    assert list(keys(Log)) == list(log.SINKS)
    assert log.open_sinks(Log()) == []


@pytest.mark.parametrize(("flag", "module"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_sink_that_is_not_installed_is_named_with_what_to_install(tmp_path, monkeypatch, capsys, flag, module):
    monkeypatch.setitem(sys.modules, module, None)
    tiny_run.write_world(tmp_path)
    command = ["distill", "--teacher", tmp_path / "teacher", "--data", tmp_path / "train.jsonl", "--steps", 1]
    assert cli.main([*map(str, command), "--out", str(tmp_path / "out"), f"--{flag}", "here"]) == 2
    assert (
        f"--{flag} needs {module}, which is not installed: pip install 'compress-lm[{flag}]'" in capsys.readouterr().err
    )


def test_weights_and_biases_gets_figures_with_each_stage_s_own_steps(monkeypatch):
    calls = []
    run = SimpleNamespace(define_metric=lambda name, step_metric: calls.append((name, step_metric)), log=calls.append)
    fake = SimpleNamespace(init=lambda project: calls.append(project) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    (sink,) = log.open_sinks(Log(wandb="small"))
    for step in (7, 8):
        sink("distill", step, {"loss": 0.5})
    logged = [{"distill/loss": 0.5, "distill/step": step} for step in (7, 8)]
    assert calls == ["small", ("distill/*", "distill/step"), *logged]


def test_a_project_that_weights_and_biases_refuses_is_a_line(monkeypatch):
    class Refused(Exception):
        pass

    def init(project):
        raise Refused("api_key not configured")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, errors=SimpleNamespace(Error=Refused)))
    with pytest.raises(RecipeError, match="--wandb small: api_key not configured; WANDB_MODE=offline"):
        log.open_sinks(Log(wandb="small"))


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/none"])
def test_a_place_that_can_be_no_folder_is_a_line(tmp_path, monkeypatch, place):
    pytest.importorskip("tensorboardX")
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(RecipeError, match=r"no folder can be there .*; name another place"):
        log.open_sinks(Log(tensorboard=Path(place)))


def test_a_distillation_s_event_files_hold_what_its_trace_does(tmp_path, monkeypatch):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    monkeypatch.setattr("compress.distill.stage.mesh_of_devices", lambda shape: None)
    tiny_run.write_world(tmp_path)
    files = ["--teacher", tmp_path / "teacher", "--data", tmp_path / "train.jsonl", "--out", tmp_path / "out"]
    flags = "--student half --steps 2 --sequence-length 32 --global-batch 4 --valid-every 1 --device cpu"
    assert cli.main(["distill", *map(str, files), *flags.split(), "--tensorboard", str(tmp_path / "events")]) == 0
    found = {}
    (path,) = (tmp_path / "events").iterdir()
    record = path.read_bytes()
    while record:  # its length in 8 bytes, 4 of a checksum, the event, 4 more
        size = int.from_bytes(record[:8], "little")
        event, record = Event.FromString(record[12 : 12 + size]), record[16 + size :]
        found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
    trace = json.loads((tmp_path / "out" / "training.json").read_text())
    for prefix, rows in (("distill", trace["steps"]), ("distill/validation", trace["validations"])):
        for row in rows:
            assert found[f"{prefix}/loss", row["step"]] == pytest.approx(row["loss"], rel=1e-6)
    assert len(trace["validations"]) == 3
