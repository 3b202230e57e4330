"""The quickstart's recipe on the embedded teacher, shortened: its artifact passes, and a damaged one does not."""

from pathlib import Path

import numpy as np
import pytest

from compress.cli import main
from export.checkpoint import read
from export.safetensors import read_file, write_file

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "recipes" / "quickstart.toml"
DATA = ROOT / "recipes" / "quickstart" / "data"
SHORT = ("distill.steps=16", "align.steps=32", "align.learning_rate=2e-3", "eval.max_tokens=10240")
SCORED = ["--data", str(DATA / "chats-valid.jsonl"), "--window", "256", "--max-tokens", "6144"]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart") / "run"
    sets = [word for setting in SHORT for word in ("--set", setting)]
    with pytest.MonkeyPatch.context() as patch:
        # The mesh has tests of its own; to compile for one device is quicker.
        for stage in ("distill", "align"):
            patch.setattr(f"compress.{stage}.stage.mesh_of_devices", lambda shape: None)
        assert main(["run", str(RECIPE), "--out", str(folder), "--device", "cpu", *sets]) == 0
    return folder


def judged(run_folder, model, tmp_path):
    """The gate's exit code for `model` against the run's parent."""
    report = str(tmp_path / "report.json")
    parent = str(run_folder / "align")
    assert main(["eval", "--model", str(model), "--baseline", parent, "--out", report, *SCORED]) == 0
    return main(["gate", report])


def copy(folder, to, *, without=()):
    to.mkdir()
    for file in folder.iterdir():
        if file.name not in without:
            (to / file.name).write_bytes(file.read_bytes())
    return to


def test_the_artifact_passes_on_its_own(run_folder, tmp_path):
    assert judged(run_folder, run_folder / "artifact" / "compressed-tensors", tmp_path) == 0


def test_two_layers_with_their_scales_swapped_fail_the_gate(run_folder, tmp_path):
    broken = copy(run_folder / "artifact" / "compressed-tensors", tmp_path / "broken")
    tensors = {name: np.array(value) for name, value in read_file(broken, "model.safetensors").items()}
    for name in [name for name in tensors if name.startswith("model.layers.0.") and name.endswith("weight_scale")]:
        other = name.replace("layers.0.", "layers.2.")
        tensors[name], tensors[other] = tensors[other], tensors[name]
    write_file(tensors, broken / "model.safetensors")
    assert judged(run_folder, broken, tmp_path) == 1


def test_the_base_without_its_adapters_fails_the_gate(run_folder, tmp_path):
    adapters = ("adapter_config.json", "adapter_model.safetensors", "manifest.json", "stage.json")
    bare = copy(run_folder / "align", tmp_path / "bare", without=adapters)
    assert judged(run_folder, bare, tmp_path) == 1


def test_the_gguf_file_holds_the_same_weights(run_folder):
    packed = read(run_folder / "artifact" / "compressed-tensors").weights
    file = read(run_folder / "artifact" / "gguf").weights
    name = "model.layers.1.mlp.down_proj.weight"
    np.testing.assert_array_equal(np.asarray(packed[name].dequantize(np.float32)), np.asarray(file[name]))
