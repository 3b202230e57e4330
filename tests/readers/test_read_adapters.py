"""PEFT loads the adapters that a stage leaves beside their base, float or packed, and computes our logits with them."""

import dataclasses

import jax
import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from compress.models import read_config
from compress.models.folder import Model, save
from compress.models.lora import init_adapters
from export.peft import Adapters
from tests.readers.examples import FAMILIES, checkpoint, expected, ours

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # PEFT asks transformers


def adapted(case: str, kind: str) -> Model:
    """An example with adapters at all linears, large enough to move its logits."""
    base = checkpoint(case, kind)
    config = read_config(base.config)
    keys = jax.random.split(jax.random.key(0))
    weights = {
        name: np.asarray(value if name.endswith("A") else 0.3 * jax.random.normal(keys[1], value.shape))
        for name, value in init_adapters(config, keys[0], rank=4).items()
    }
    return Model(base.config, config, dict(base.weights), base.files, Adapters(weights, rank=4, alpha=8.0))


def run(model, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model.eval()(torch.tensor(tokens[None])).logits[0].numpy()


@pytest.mark.parametrize("case", FAMILIES)
@pytest.mark.parametrize("kind", ["float", "int4 layers"])
def test_peft_computes_our_logits(case, kind, tmp_path):
    model = adapted(case, kind)
    save(model, tmp_path / "both")
    save(dataclasses.replace(model, adapters=None), tmp_path / "base")
    tokens, without = expected(case, kind)
    want = ours(model.merged().checkpoint, tokens)
    assert np.abs(want - without).mean() > 0.1 * want.std()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    assert np.abs(run(base, tokens) - without).max() < 1e-4 * without.std()
    assert np.abs(run(PeftModel.from_pretrained(base, tmp_path / "both"), tokens) - want).max() < 1e-4 * want.std()


def test_transformers_finds_the_adapters_beside_their_base(tmp_path):
    model = adapted("llama", "float")
    save(model, tmp_path)
    tokens, _ = expected("llama")
    want = ours(model.merged().checkpoint, tokens)
    got = run(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), tokens)
    assert np.abs(got - want).max() < 1e-4 * want.std()
