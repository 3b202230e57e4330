"""Every family in every format, read by an engine that is not ours: it computes the logits that `compress` computes.

One's own reader hides one's own mistakes, so here each writer meets the format's owner. A family of `MODELS` without
an example, or a format of `FORMATS` without a reader, fails.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orbax.checkpoint as ocp
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from benchmarks.engines import llama_cpp, transformers
from compress.models import MODELS
from compress.quantize.nf4 import nf4
from export import FORMATS
from export.checkpoint import Checkpoint, read
from export.quantized import NF4Tensor
from tests.readers.examples import FAMILIES, LENGTH, checkpoint, expected

pytestmark = pytest.mark.filterwarnings("ignore:You passed .quantization_config")  # which is how zero points are read


def by_transformers(folder: Path, tokens: np.ndarray) -> np.ndarray:
    return transformers(folder)(tokens)


def by_bitsandbytes(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """Bitsandbytes' own dequantization; its kernels for CPUs compute in bfloat16."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).dequantize(dtype=torch.float32)
    with torch.no_grad():
        return model.eval()(torch.tensor(tokens[None])).logits[0].numpy()


def by_llama_cpp(folder: Path, tokens: np.ndarray) -> np.ndarray:
    return llama_cpp(folder / "model.gguf", LENGTH)(tokens)


def by_orbax(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """Restored by plain orbax-checkpoint, with nothing of ours; transformers then computes."""
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore(folder.resolve() / "orbax")
    config = json.loads((folder / "config.json").read_text())
    specs = json.loads((folder / "quantization.json").read_text()) if (folder / "quantization.json").exists() else {}
    state = {}
    for name, value in tree.items():
        if name in specs:
            bits, size = specs[name]["bits"], specs[name]["group_size"]
            packed = np.asarray(value["packed"])
            stream = np.unpackbits(packed, axis=-1, bitorder="little").reshape(len(packed), -1, bits)
            codes = stream @ (1 << np.arange(bits))
            zero = np.asarray(value.get("zero", np.full(value["scale"].shape, 2 ** (bits - 1))), np.float32)
            groups = codes.reshape(*zero.shape, size) - zero[..., None]
            value = (groups * np.asarray(value["scale"], np.float32)[..., None]).reshape(codes.shape)
        state[name] = torch.tensor(np.asarray(value, np.float32))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if config["tie_word_embeddings"] else set())
    with torch.no_grad():
        return model(torch.tensor(tokens[None])).logits[0].numpy()


class Row(NamedTuple):
    """What is written, by whom it is read, and how far its logits may be off, as a share of ours' spread.

    `limit` is the bound of the mean difference; that of the largest one is LARGEST times it.
    """

    format: str
    kind: str
    engine: Callable[[Path, np.ndarray], np.ndarray]
    limit: float
    options: dict[str, Any] = {}


LARGEST = 20
EXACT = 1e-4 / LARGEST
# llama.cpp looks GELU up in a float16 table, and rounds what a layer is given to the type of its weights.
GELU, HALF, BYTE = 1e-3, 3e-3, 0.08
ROWS = [
    Row("safetensors", "float", by_transformers, EXACT),
    Row("compressed-tensors", "int4", by_transformers, EXACT),
    Row("compressed-tensors", "int4 asymmetric", by_transformers, EXACT),
    Row("compressed-tensors", "int3 asymmetric", by_transformers, EXACT),
    Row("compressed-tensors", "int5 asymmetric", by_transformers, EXACT),
    Row("compressed-tensors", "int6 asymmetric", by_transformers, EXACT),
    Row("compressed-tensors", "several", by_transformers, EXACT),
    Row("compressed-tensors", "all bits", by_transformers, EXACT),
    Row("bitsandbytes", "nf4", by_bitsandbytes, EXACT, {"dtype": "float32"}),
    Row("gguf", "float", by_llama_cpp, EXACT, {"float_type": "F32"}),
    Row("gguf", "float", by_llama_cpp, HALF, {"float_type": "F16"}),
    Row("gguf", "float", by_llama_cpp, BYTE, {"float_type": "Q8_0"}),
    Row("gguf", "int4", by_llama_cpp, BYTE),
    Row("gguf", "int4 asymmetric", by_llama_cpp, BYTE),
    Row("gguf", "int5", by_llama_cpp, BYTE),
    Row("gguf", "int5 asymmetric", by_llama_cpp, BYTE),
    Row("gguf", "several", by_llama_cpp, BYTE),
    Row("gguf", "blocks", by_llama_cpp, BYTE),
    Row("orbax", "float", by_orbax, EXACT),
    Row("orbax", "int4 asymmetric", by_orbax, EXACT),
    Row("orbax", "all bits", by_orbax, EXACT),
]


def errors(row: Row, case: str, written: Checkpoint, folder: Path) -> np.ndarray:
    """Differences of what the engine computes of `written` to what we compute of the example."""
    FORMATS[row.format].write(written, folder, **row.options)
    tokens, want = expected(case, row.kind)
    assert want.std() > 0.5
    return np.abs(row.engine(folder, tokens) - want) / want.std()


def test_every_family_has_an_example_and_every_format_a_reader():
    assert {case.split("-")[0] for case in FAMILIES} == set(MODELS)
    assert {row.format for row in ROWS} == set(FORMATS)


@pytest.mark.parametrize("case", FAMILIES)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join((row.format, row.kind, *row.options.values())))
def test_an_independent_engine_computes_our_logits(row, case, tmp_path):
    found = errors(row, case, checkpoint(case, row.kind), tmp_path)
    limit = max(row.limit, GELU) if row.format == "gguf" and "gemma" in case else row.limit
    assert found.mean() < limit
    assert found.max() < LARGEST * limit


@pytest.mark.parametrize("row", [row for row in ROWS if row.kind == "int4"], ids=lambda row: row.format)
def test_two_heads_in_the_wrong_order_would_be_seen(row, tmp_path):
    right = checkpoint("qwen3", row.kind)
    name = "model.layers.3.self_attn.q_proj.weight"
    tensor = right.weights[name]
    rows = np.arange(tensor.shape[0]).reshape(4, 32)[[1, 0, 2, 3]].reshape(-1)
    wrong = dataclasses.replace(tensor, packed=tensor.packed[rows], scale=tensor.scale[rows])
    written = dataclasses.replace(right, weights={**right.weights, name: wrong})
    assert errors(row, "qwen3", written, tmp_path).mean() > row.limit


def test_what_bitsandbytes_has_quantized_is_read_as_it_dequantizes_it(tmp_path):
    FORMATS["safetensors"].write(checkpoint("qwen3"), tmp_path / "float")
    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        llm_int8_skip_modules=["down_proj", "lm_head"],  # whose rows are no whole blocks here
    )
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "float", dtype=torch.float32, quantization_config=how)
    theirs.save_pretrained(tmp_path / "theirs")
    found = read(tmp_path / "theirs").weights
    want = theirs.dequantize(dtype=torch.float32).state_dict()
    packed = [name for name in found if isinstance(found[name], NF4Tensor)]
    assert len(packed) == 7 * 6
    for name in packed:
        np.testing.assert_allclose(found[name].dequantize(np.float32), want[name].numpy(), rtol=2e-6, atol=1e-7)
        # We quantize to the same codes, but for what lies between two levels.
        again = nf4(np.asarray(checkpoint("qwen3").weights[name]))
        assert np.mean(np.asarray(again.codes()) != found[name].codes()) < 0.01
        assert np.mean(np.asarray(again.scale) != found[name].scale) < 0.05


def test_transformers_reads_a_folder_in_shards(tmp_path):
    FORMATS["safetensors"].write(checkpoint("qwen3"), tmp_path, shard_limit=50_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    tokens, want = expected("qwen3")
    assert np.abs(by_transformers(tmp_path, tokens) - want).max() < 1e-4 * want.std()
