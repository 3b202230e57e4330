"""The quantize stage part by part: what is in memory, and what a killed run leaves for the next one."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from compress import cli
from compress.models import read_config
from compress.models.decoder import EMBEDDING, linears, shapes
from compress.models.folder import load, open_stream
from compress.quantize import calibrate, rtn, shards
from compress.quantize.calibrate import States, quantize_parts
from compress.quantize.shards import Shards
from export.errors import ArtifactError
from export.quantized import QuantizedTensor, QuantSpec
from export.safetensors import SINGLE, read_file, write_file
from tests.tiny_run import CONFIG, rows, write_jsonl, write_model

GPTQ = "quantize --model teacher --group-size 32 --calibration train.jsonl --calibration-tokens 256"
RTN = "quantize --model teacher --method rtn --group-size 32 --embedding-bits 8"
NF4 = "quantize --model teacher --method nf4"
PARTS = CONFIG["num_hidden_layers"] + 2


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """A model and text, and what unbroken runs make of them."""
    folder = tmp_path_factory.mktemp("stream")
    write_model(folder / "teacher", CONFIG | {"intermediate_size": 128})
    write_rows(folder / "train.jsonl", 60, seed=0)
    return folder


@pytest.fixture
def world(shared, tmp_path, monkeypatch) -> Path:
    for name in ("teacher", "train.jsonl"):
        (tmp_path / name).symlink_to(shared / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_rows(path: Path, count: int, *, seed: int) -> None:
    write_jsonl(path, [{"text": text} for text in rows(count, seed)])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stop_at(monkeypatch, part: int) -> None:
    """Let writing that part fail as a kill would: in the middle, with no chance to tidy."""
    put = Shards.put

    def stopped(self, number, *given):
        if number == part:
            (self.folder / f".{self.files[number]}.0123abcd.tmp").write_bytes(b"half")
            raise KeyboardInterrupt
        put(self, number, *given)

    monkeypatch.setattr(Shards, "put", stopped)


@pytest.mark.parametrize(("command", "part"), [(GPTQ, 3), (GPTQ, PARTS - 1), (RTN, 0), (RTN, 2), (NF4, 3)])
def test_an_interrupted_run_goes_on_with_the_part_that_is_missing_and_writes_the_same(
    command, part, world, monkeypatch, capsys
):
    assert cli.main([*command.split(), "--out", "whole"]) == 0
    with monkeypatch.context() as patch:
        stop_at(patch, part)
        assert cli.main([*command.split(), "--out", "small"]) == 130
    assert len(list((world / "small.partial").glob("model-*.safetensors"))) == part
    assert not (world / "small").exists()
    made, put = [], Shards.put
    monkeypatch.setattr(Shards, "put", lambda self, number, *given: (made.append(number), put(self, number, *given)))
    assert cli.main([*command.split(), "--out", "small"]) == 0
    assert made == list(range(part, PARTS))
    assert contents(world / "small") == contents(world / "whole")
    assert sorted(path.name for path in world.iterdir()) == ["small", "teacher", "train.jsonl", "whole"]
    assert "goes on with small.partial" in capsys.readouterr().err


KILLED = """
import os, signal, sys
from compress import cli
from compress.quantize.shards import Shards
put = Shards.put
def killed(self, number, *given):
    put(self, number, *given)
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
Shards.put = killed
cli.main(sys.argv[1:])
"""


def test_a_killed_process_leaves_whole_parts(world):
    command = [*GPTQ.split(), "--out", "small"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    ended = subprocess.run([sys.executable, "-c", KILLED, *command], env=environment, capture_output=True, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert cli.main([*GPTQ.split(), "--out", "whole"]) == 0
    assert cli.main(command) == 0
    assert contents(world / "small") == contents(world / "whole")


@pytest.mark.parametrize(
    ("change", "named"), [("data", "calibration"), ("--damp 0.02", "damp"), ("--seed 1", "seed"), ("model", "model")]
)
def test_what_was_begun_with_something_else_is_not_gone_on_with(change, named, world, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        stop_at(patch, 2)
        assert cli.main([*GPTQ.split(), "--out", "small"]) == 130
    command = [*GPTQ.split(), "--out", "small"]
    if change == "data":
        (world / "train.jsonl").unlink()
        write_rows(world / "train.jsonl", 60, seed=1)
    elif change == "model":
        (world / "teacher").unlink()
        write_model(world / "teacher", CONFIG | {"intermediate_size": 128})
    else:
        command += change.split()
    assert cli.main(command) == 2
    assert f"small.partial: begun with another {named}; --force" in capsys.readouterr().err
    assert cli.main([*command, "--force"]) == 0
    assert cli.main([*command[:-1], "again"] if change in ("data", "model") else [*command, "--out", "again"]) == 0
    assert contents(world / "small") == contents(world / "again")


def test_large_models_keep_their_shards(world, monkeypatch):
    assert cli.main([*RTN.split(), "--out", "one"]) == 0
    monkeypatch.setattr(shards, "SINGLE_LIMIT", 1000)
    assert cli.main([*RTN.split(), "--out", "many"]) == 0
    assert len(list((world / "many").glob("model-*.safetensors"))) == PARTS
    one, many = load("one").weights, load("many").weights
    assert one.keys() == many.keys()
    for name, value in one.items():
        if isinstance(value, QuantizedTensor):
            assert value.spec == many[name].spec
            np.testing.assert_array_equal(value.packed, many[name].packed)
            np.testing.assert_array_equal(value.scale, many[name].scale)
        else:
            np.testing.assert_array_equal(value, many[name])


def test_no_tensor_is_read_before_its_turn(world, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # parts that are made side by side
    source, read = open_stream("teacher"), []

    class Watched(dict):
        def __getitem__(self, name):
            read.append(name)
            return source.weights[name]

    config = source.model.config
    watched = Watched.fromkeys(source.weights)
    for part in quantize_parts(config, watched, [], QuantSpec(4, 32), "rtn"):
        assert set(read) == set(part.weights)
        read.clear()


def test_a_stream_is_the_merged_float_model_that_load_gives(world):
    config = read_config(CONFIG | {"intermediate_size": 128})
    assert cli.main(["quantize", "--model", "teacher", "--method", "rtn", "--group-size", "32", "--out", "base"]) == 0
    rng = np.random.default_rng(0)
    adapters = {}
    for name, (outputs, inputs) in linears(config).items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        adapters[f"{module}.lora_A.weight"] = rng.normal(size=(4, inputs)).astype(np.float32)
        adapters[f"{module}.lora_B.weight"] = rng.normal(size=(outputs, 4)).astype(np.float32)
    write_file(adapters, world / "base/adapter_model.safetensors")
    facts = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (world / "base/adapter_config.json").write_text(json.dumps(facts))
    expected, stream = load("base").merged().dequantized().weights, open_stream("base")
    assert stream.packed == 0
    assert expected.keys() == set(stream.weights) == set(shapes(config))
    for name, value in expected.items():
        np.testing.assert_array_equal(np.asarray(stream.weights[name], np.float32), value)


def test_a_number_that_is_none_is_named_when_its_tensor_is_read(world, capsys):
    write_model(world / "broken", CONFIG)
    tensors = {name: np.array(value) for name, value in read_file(world / "broken", SINGLE).items()}
    name = "model.layers.2.mlp.up_proj.weight"
    tensors[name][3, 4] = np.nan
    write_file(tensors, world / "broken" / SINGLE)
    assert cli.main("quantize --model broken --method rtn --group-size 32 --out out".split()) == 4
    assert f"broken: NaN or Inf in {name} (1 of " in capsys.readouterr().err
    assert not (world / "out").exists()
    with pytest.raises(ArtifactError, match=name):
        open_stream("broken").weights[name]
    assert np.isfinite(np.asarray(open_stream("broken").weights[EMBEDDING], np.float32)).all()


@pytest.mark.parametrize("room", [0, 1 << 20])
def test_states_are_the_same_in_memory_and_in_a_file(room, tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "ROOM", room)
    states = States(tmp_path)
    arrays = [np.random.default_rng(k).normal(size=(2, 3 + k, 4)).astype(np.float32) for k in range(5)]
    for array in arrays:
        states.append(array)
    states[1] = -arrays[1]
    assert len(states) == 5
    for k, (found, array) in enumerate(zip(states, arrays, strict=True)):
        np.testing.assert_array_equal(found, -array if k == 1 else array)
    assert not list(tmp_path.iterdir())  # a file without a name


def test_activations_in_a_file_give_the_same_model(world, monkeypatch):
    assert cli.main([*GPTQ.split(), "--out", "memory"]) == 0
    monkeypatch.setattr(calibrate, "ROOM", 1)
    assert cli.main([*GPTQ.split(), "--out", "file"]) == 0
    assert contents(world / "file") == contents(world / "memory")


@pytest.mark.parametrize("symmetric", [True, False])
def test_blocks_and_chunks_of_any_size_round_alike(symmetric, monkeypatch):
    w = np.random.default_rng(0).normal(size=(13, 64)).astype(np.float32)
    spec = QuantSpec(4, 32, symmetric)
    expected = rtn.rtn(w, spec)
    for block, chunk in ((64, 64), (256, 128), (300, 64)):
        monkeypatch.setattr(rtn, "BLOCK", block)
        monkeypatch.setattr(rtn, "CHUNK", chunk)
        rtn.round_to_nearest.clear_cache()
        found = rtn.rtn(w, spec)
        for field in dataclasses.fields(QuantizedTensor)[:3]:
            ours, theirs = getattr(found, field.name), getattr(expected, field.name)
            assert (ours is None) == (theirs is None)
            if ours is not None:
                np.testing.assert_array_equal(ours, theirs)
    rtn.round_to_nearest.clear_cache()
