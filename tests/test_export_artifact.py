"""What lies beside the weights: adapters, the manifest, the model card."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from export import peft
from export.card import model_card
from export.errors import ArtifactError
from export.manifest import read_manifest, verify_files, write_manifest
from export.peft import Adapters
from export.safetensors import read_header, write_file

LINEARS = {"model.layers.0.self_attn.q_proj": (6, 8), "model.layers.1.mlp.down_proj": (8, 12)}


def adapters(rank: int = 4, seed: int = 0) -> Adapters:
    rng = np.random.default_rng(seed)
    weights = {}
    for linear, (outputs, inputs) in LINEARS.items():
        weights[f"{linear}.lora_A"] = rng.normal(size=(rank, inputs)).astype(np.float32)
        weights[f"{linear}.lora_B"] = rng.normal(size=(outputs, rank)).astype(np.float32)
    return Adapters(weights, rank, alpha=2.0 * rank, dropout=0.05, base="org/base")


@settings(max_examples=10, deadline=None)
@given(rank=st.integers(1, 9), seed=st.integers(0, 2**32 - 1))
def test_adapters_come_back_as_they_went(tmp_path_factory, rank, seed):
    folder = tmp_path_factory.mktemp("peft")
    given_ = adapters(rank, seed)
    peft.write(given_, folder)
    again = peft.read(folder)
    assert (again.rank, again.alpha, again.dropout, again.base, again.scale) == (rank, 2.0 * rank, 0.05, "org/base", 2)
    assert again.weights.keys() == given_.weights.keys()
    assert all(np.array_equal(again.weights[name], value) for name, value in given_.weights.items())


def test_adapters_have_pefts_names(tmp_path):
    peft.write(adapters(), tmp_path)
    names = set(read_header(tmp_path / "adapter_model.safetensors"))
    assert names == {f"base_model.model.{linear}.lora_{half}.weight" for linear in LINEARS for half in "AB"}
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8)
    assert config["target_modules"] == sorted(LINEARS)


@pytest.mark.parametrize("scaling", peft.SCALINGS)
def test_a_scaling_is_written_as_peft_names_it_and_read_again(scaling, tmp_path):
    peft.write(dataclasses.replace(adapters(), alpha=3.0, scaling=scaling), tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["use_rslora"] is (scaling == "rslora")
    again = peft.read(tmp_path)
    assert (again.scaling, again.scale) == (scaling, {"lora": 3 / 4, "rslora": 3 / 2}[scaling])


def test_magnitudes_come_back_as_they_went_and_are_all_or_none(tmp_path):
    lengths = {f"{linear}.lora_magnitude_vector": np.ones(size, np.float32) for linear, (size, _) in LINEARS.items()}
    whole = dataclasses.replace(adapters(), weights=dict(adapters().weights) | lengths)
    peft.write(whole, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["use_dora"] is True
    again = peft.read(tmp_path)
    assert again.dora and again.weights.keys() == whole.weights.keys()
    first, _ = lengths
    lacking = {name: value for name, value in whole.weights.items() if name != first}
    with pytest.raises(ArtifactError, match=f"{first} missing"):
        peft.write(dataclasses.replace(whole, weights=lacking), tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"use_dora": False}))
    with pytest.raises(ArtifactError, match=r"use_dora = False, but .* has magnitudes"):
        peft.read(tmp_path)


def test_an_index_keeps_the_adapters_out_of_their_base(tmp_path):
    """Engines that read every .safetensors of a folder leave out what its index does not name."""
    write_file({"w": np.zeros((2, 3), np.float32)}, tmp_path / "model.safetensors")
    peft.write(adapters(), tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index == {"metadata": {"total_size": 24}, "weight_map": {"w": "model.safetensors"}}


def test_every_missing_or_misshaped_half_is_named(tmp_path):
    weights = dict(adapters().weights)
    first, second = LINEARS
    del weights[f"{first}.lora_B"]
    weights[f"{second}.lora_A"] = np.zeros((3, 12), np.float32)
    weights["stray"] = np.zeros((4, 4), np.float32)
    weights[f"{second}.lora_B"] = weights[f"{second}.lora_B"].astype(np.int8)
    with pytest.raises(ArtifactError) as caught:
        peft.write(Adapters(weights, 4, 8.0), tmp_path / "out")
    for part in (
        f"{first}.lora_B missing",
        f"{second}.lora_A (3, 12) must have rank 4",
        "stray is not",
        "lora_B must be floats, not int8",
    ):
        assert part in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"use_dora": True}, "use_dora"),
        ({"use_rslora": "yes"}, "use_rslora = yes must be true or false"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias = all"),
        ({"r": 0}, "r must be a positive integer"),
        ({"r": True}, "r must be a positive integer"),
        ({"r": 3}, "must have rank 3"),
        ({"lora_alpha": "8"}, "numbers"),
    ],
)
def test_adapters_that_would_compute_something_else_are_refused(change, message, tmp_path):
    peft.write(adapters(), tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ArtifactError, match=message):
        peft.read(tmp_path)


def test_strange_tensors_and_pickles_among_adapters_are_refused(tmp_path):
    peft.write(adapters(), tmp_path)
    write_file({"base_model.model.embed_tokens.lora_embedding_A": np.zeros((2, 2))}, tmp_path / peft.WEIGHTS)
    with pytest.raises(ArtifactError, match="lora_embedding_A"):
        peft.read(tmp_path)
    (tmp_path / peft.WEIGHTS).rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ArtifactError, match=r"adapter_model\.bin is a pickle"):
        peft.read(tmp_path)


def artifact(folder) -> None:
    (folder / "orbax").mkdir()
    for name in ("config.json", "model.safetensors", "orbax/data"):
        (folder / name).write_text(name)
    write_manifest(folder, {"source": "abc"})


def test_a_manifest_lists_what_is_there(tmp_path):
    artifact(tmp_path)
    manifest = read_manifest(tmp_path)
    assert manifest["facts"] == {"source": "abc"}
    assert manifest["files"].keys() == {"config.json", "model.safetensors", "orbax/data"}
    # printf config.json | sha256sum
    digest = "587cb980af76fdc7e52369fd0b9d926dff266976b6f8ac631e358fecc49ff8cf"
    assert manifest["files"]["config.json"] == {"sha256": digest, "size": 11}
    (tmp_path / "stage.json").write_text("{}")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x").write_text("")
    assert verify_files(tmp_path) == []


def test_whatever_changes_shows_and_all_of_it(tmp_path):
    artifact(tmp_path)
    (tmp_path / "config.json").write_text("CONFIG.JSON")
    (tmp_path / "orbax" / "data").write_text("longer than it was")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "extra.py").write_text("")
    assert verify_files(tmp_path) == [
        "model.safetensors: missing",
        "extra.py: not in manifest.json",
        "config.json: contents changed",
        "orbax/data: 18 bytes, 10 in manifest.json",
    ]


def test_a_manifest_cannot_point_outside_its_folder(tmp_path):
    folder = tmp_path / "artifact"
    folder.mkdir()
    (tmp_path / "secret").write_text("")
    (folder / "manifest.json").write_text(json.dumps({"files": {"../secret": {"size": 0, "sha256": ""}}}))
    assert verify_files(folder) == ["../secret: missing"]


@pytest.mark.parametrize("text", ["[]", "{}", '{"files": []}', '{"files": {"a": 1}}'])
def test_a_broken_manifest_is_refused(text, tmp_path):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ArtifactError, match=r"manifest\.json"):
        verify_files(tmp_path)


def test_a_card_says_what_was_measured():
    metrics = {"perplexity": {"value": 12.345678, "parent": 11.9}, "size": "71 MB", "top-1": {"value": 0.93}}
    card = model_card(
        "tiny", {"bits": 4, "group size": 64}, metrics, format="gguf", base_model="org/base", tags=["llama"]
    )
    assert card.startswith(
        '---\npipeline_tag: text-generation\ntags: ["gguf", "llama"]\nbase_model: "org/base"\n---\n\n# tiny\n'
    )
    for line in (
        "- bits: 4",
        "| metric | value | parent |",
        "|---|---:|---:|",
        "| perplexity | 12.346 | 11.9 |",
        "| size | 71 MB |  |",
        "| top-1 | 0.93 |  |",
        "llama-cli -m PATH/model.gguf",
    ):
        assert line in card.splitlines()


@given(st.text(), st.text())
def test_a_strangers_text_stays_in_its_cell(name, value):
    plain = model_card("t", {"a": "b"}, {"c": {"v": "d"}}, format="safetensors")
    card = model_card("t", {name: value}, {name: {"v": value}}, format="safetensors", base_model=None)
    assert len(card.split("\n")) == len(plain.split("\n"))
    assert "<script" not in model_card(value + "<script>", {}, {}, format="orbax")
