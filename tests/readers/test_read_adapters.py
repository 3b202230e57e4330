"""PEFT loads the adapters that a stage leaves beside their base, float or packed, and computes our logits with them."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest
import torch
from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM

from compress.artifact import run_probe, verify_folder, write_artifact
from compress.models import read_config
from compress.models.folder import Model, load, save
from compress.models.lora import init_adapters, magnitudes
from compress.settings import Export
from export.peft import Adapters
from tests.readers.examples import FAMILIES, checkpoint, expected, ours

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # PEFT asks transformers


def adapted(case: str, kind: str, *, dora: bool = False) -> Model:
    """An example with adapters at all linears, large enough to move its logits."""
    base = checkpoint(case, kind)
    config = read_config(base.config)
    keys = jax.random.split(jax.random.key(0))
    weights = {
        name: np.asarray(value if name.endswith("A") else 0.3 * jax.random.normal(keys[1], value.shape))
        for name, value in init_adapters(config, keys[0], rank=4).items()
    }
    if dora:
        lengths = magnitudes(base.weights, weights)
        weights |= {name: np.asarray(value * np.linspace(0.5, 2, len(value))) for name, value in lengths.items()}
    return Model(base.config, config, dict(base.weights), base.files, Adapters(weights, rank=4, alpha=8.0))


def run(model, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model.eval()(torch.tensor(tokens[None])).logits[0].numpy()


@pytest.mark.parametrize("case", FAMILIES)
@pytest.mark.parametrize(("kind", "dora"), [("float", False), ("int4 layers", False), ("float", True)])
def test_peft_computes_our_logits(case, kind, dora, tmp_path):
    model = adapted(case, kind, dora=dora)
    save(model, tmp_path / "both")
    save(dataclasses.replace(model, adapters=None), tmp_path / "base")
    tokens, without = expected(case, kind)
    want = ours(model.merged().checkpoint, tokens)
    assert np.abs(want - without).mean() > 0.1 * want.std()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    assert np.abs(run(base, tokens) - without).max() < 1e-4 * without.std()
    assert np.abs(run(PeftModel.from_pretrained(base, tmp_path / "both"), tokens) - want).max() < 1e-4 * want.std()


@pytest.mark.parametrize(("kind", "format"), [("float", "safetensors"), ("int4 layers", "compressed-tensors")])
def test_engines_load_what_is_exported_with_its_adapters(kind, format, tmp_path):
    model = adapted("llama", kind)
    model = dataclasses.replace(model, adapters=dataclasses.replace(model.adapters, scaling="rslora"))
    write_artifact(model, format, tmp_path / "out", Export(adapters="keep"), "model")
    tokens, _ = expected("llama", kind)
    want = run_probe(load(tmp_path / "out"), tokens, np.arange(model.config.vocab_size))
    if format == "safetensors":
        read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    else:  # transformers puts adapters on no weights that are packed; they are unpacked once the model has run
        shutil.copytree(tmp_path / "out", tmp_path / "bare", ignore=shutil.ignore_patterns("adapter_*"))
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "bare", dtype=torch.float32)
        run(base, tokens)
        read = PeftModel.from_pretrained(base, tmp_path / "out")
    got = run(read, tokens)
    assert np.abs(got - want).max() < 1e-4 * want.std()
    assert PeftConfig.from_pretrained(tmp_path / "out").use_rslora
    assert verify_folder(tmp_path / "out", None)["files"] == "unchanged"


def test_transformers_finds_the_adapters_beside_their_base(tmp_path):
    model = adapted("llama", "float")
    save(model, tmp_path)
    tokens, _ = expected("llama")
    want = ours(model.merged().checkpoint, tokens)
    got = run(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), tokens)
    assert np.abs(got - want).max() < 1e-4 * want.std()
