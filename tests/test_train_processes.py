"""Two processes train as one does; stopped and killed, they go on, and one alone goes on from where they were."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from compress.device import LAUNCH, join_processes
from compress.errors import RecipeError
from tests import tiny_process, tiny_run

ROOT = Path(__file__).parent.parent


def launches() -> list[dict[str, str]]:
    """The environments of two processes with one device each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")
    launch = [dict(zip(LAUNCH, (address, "2", str(number)), strict=True)) for number in range(2)]
    return [os.environ | one | {"XLA_FLAGS": flags} for one in launch]


def start_two(*arguments) -> list[tuple[int, str]]:
    """Run two processes with one device each to their end: exit codes and what they said."""
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.tiny_process", *map(str, arguments)],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for environment in launches()
    ]
    try:
        said = [process.communicate(timeout=400)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, text) for process, text in zip(started, said, strict=True)]


@pytest.mark.parametrize("victim", [1, 0])
def test_a_process_that_loses_the_other_says_so_and_ends_soon(tmp_path, victim):
    tiny_run.write_world(tmp_path)
    flags = "--student half --steps 100000 --sequence-length 32 --global-batch 4 --fsdp 2 --device cpu"
    files = ["--teacher", tmp_path / "teacher", "--data", tmp_path / "train.jsonl", "--out", tmp_path / "out"]
    command = [sys.executable, "-m", "compress", "distill", *files, *flags.split()]
    told = [(tmp_path / f"{number}.txt") for number in range(2)]
    started = []
    for environment, path in zip(launches(), told, strict=True):
        environment |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        with path.open("w") as file:
            started.append(subprocess.Popen(list(map(str, command)), env=environment, stderr=file, cwd=ROOT))
    try:
        deadline = time.monotonic() + 300
        while "distill 1/" not in told[0].read_text():
            assert time.monotonic() < deadline, told[0].read_text()
            assert all(process.poll() is None for process in started), told[0].read_text()
            time.sleep(0.1)
        started[victim].kill()
        code = started[1 - victim].wait(timeout=60)
    finally:
        for process in started:
            process.kill()
    said = told[1 - victim].read_text()
    # Without process 0, which keeps JAX's account of them, JAX may be first to end the other, and aborts it.
    assert code == 75 or (code == -signal.SIGABRT and victim == 0), said
    if code == 75:
        assert "error: an exchange between the processes of this run failed (" in said
        assert "Traceback" not in said


def trace_of(out: Path) -> dict:
    trace = json.loads((out / "training.json").read_text())
    return {
        name: [{k: v for k, v in row.items() if k != "seconds"} for row in trace[name]]
        for name in trace
        if name != "best_step"
    }


def test_two_processes_are_stopped_and_killed_and_end_as_one_does(tmp_path, monkeypatch):
    monkeypatch.setattr("compress.distill.stage.mesh_of_devices", lambda shape: None)
    tiny_run.write_world(tmp_path)
    alone, two, then_alone = (tmp_path / name for name in ("alone", "two", "then_alone"))
    checkpoints = tmp_path / "two.checkpoints"
    saved = lambda: sorted(int(path.name) for path in (checkpoints / "steps").iterdir() if path.name.isdigit())  # noqa: E731

    # One is asked to stop: both save the same step.
    stopped = start_two(tmp_path, two, "SIGTERM", 2, 1)
    assert [code for code, _ in stopped] == [tiny_process.PREEMPTED] * 2, stopped
    assert saved()[-1] == 3
    # Both die before they save what they have just trained, and maybe while they write what came before.
    killed = start_two(tmp_path, two, "SIGKILL", 6, 0, "SIGKILL", 6, 1)
    assert [code for code, _ in killed] == [-signal.SIGKILL] * 2, killed
    assert saved()[-1] in (3, 4)
    shutil.copytree(checkpoints, tmp_path / "then_alone.checkpoints")
    assert not two.exists()

    ended = start_two(tmp_path, two)
    assert [code for code, _ in ended] == [0, 0], ended
    assert not checkpoints.exists()
    for out in (alone, then_alone):
        tiny_process.train(tmp_path, out, None)
    expected = trace_of(alone)
    assert len(expected["steps"]) == tiny_process.STEPS
    for out in (two, then_alone):
        for name, rows in trace_of(out).items():
            for ours, theirs in zip(rows, expected[name], strict=True):
                assert ours == pytest.approx(theirs, rel=2e-4, abs=2e-5), (out.name, name)
    assert {path.name for path in two.iterdir()} == {path.name for path in alone.iterdir()}


def test_processes_that_were_half_described_are_refused(monkeypatch):
    for name in LAUNCH:
        monkeypatch.delenv(name, raising=False)
    assert join_processes(distributed=False) == 0
    monkeypatch.setenv("COMPRESS_COORDINATOR", "127.0.0.1:1")
    with pytest.raises(RecipeError, match="COMPRESS_COORDINATOR without COMPRESS_PROCESSES, COMPRESS_PROCESS; set all"):
        join_processes(distributed=False)
    monkeypatch.setenv("COMPRESS_PROCESSES", "2")
    monkeypatch.setenv("COMPRESS_PROCESS", "one")
    with pytest.raises(RecipeError, match=r"cannot join the other processes: .*'one'"):
        join_processes(distributed=False)
