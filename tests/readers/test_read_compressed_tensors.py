"""transformers with compressed-tensors loads what `export` writes, and computes with the very numbers that were meant.

One's own reader hides one's own mistakes, so here the writer meets the format's owner. A tiny random model is
exported quantized and, dequantized by us, as floats; both are loaded, and their logits must agree.
"""

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig

from export import FORMATS
from export.checkpoint import Checkpoint, read
from export.quantized import QuantizedTensor, QuantSpec, pack

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "gemma3_text": ("Gemma3ForCausalLM", {"tie_word_embeddings": True, "query_pre_attn_scalar": 16}),
}
SYMMETRIC = QuantSpec(4, 32)
ASYMMETRIC = QuantSpec(4, 32, symmetric=False)


def quantize(rng: np.random.Generator, shape: tuple[int, ...], spec: QuantSpec) -> QuantizedTensor:
    codes = rng.integers(0, spec.levels, shape, dtype=np.uint8)
    groups = (shape[0], shape[1] // spec.group_size)
    scale = (rng.uniform(0.5, 1.5, groups) / spec.levels).astype(ml_dtypes.bfloat16)
    zero = None if spec.symmetric else rng.integers(0, spec.levels, groups, dtype=np.uint8)
    return QuantizedTensor(pack(codes, spec.bits), scale, zero, spec)


def build(family: str, specs: dict[str, QuantSpec]) -> Checkpoint:
    """A random model; a linear or embedding is quantized by the first of `specs` whose key is part of its name."""
    architecture, changes = FAMILIES[family]
    config = {"model_type": family, "architectures": [architecture], **SIZES, **changes}
    rng = np.random.default_rng(0)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    tied = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    weights = {}
    for name in skeleton.state_dict().keys() - tied:
        shape = tuple(skeleton.state_dict()[name].shape)
        spec = next((spec for key, spec in specs.items() if key in name), None)
        if len(shape) == 2 and spec is not None:
            weights[name] = quantize(rng, shape, spec)
        else:
            weights[name] = rng.normal(0.3, 0.3, shape).astype(ml_dtypes.bfloat16)
    return Checkpoint(config, weights)


def logits(folder, **options) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    with torch.no_grad():
        return model(torch.arange(3, 35).reshape(2, 16)).logits


def compare(tmp_path, checkpoint: Checkpoint, dtype: str = "float32", **options) -> None:
    FORMATS["compressed-tensors"].write(checkpoint, tmp_path / "quantized")
    # Read back first, so that our reader is held to the same numbers.
    FORMATS["safetensors"].write(read(tmp_path / "quantized"), tmp_path / "float", dtype=dtype)
    want, got = logits(tmp_path / "float"), logits(tmp_path / "quantized", **options)
    assert want.std() > 0.1
    assert (want - got).abs().max() < 1e-4 * want.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_symmetric_weights(family, tmp_path):
    compare(tmp_path, build(family, {"layers": SYMMETRIC}))


@pytest.mark.filterwarnings("ignore:You passed .quantization_config")  # which is how one asks for dequantize
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_asymmetric_weights_dequantized(family, tmp_path):
    # When it dequantizes, it rounds each weight to the scales' dtype.
    option = CompressedTensorsConfig(dequantize=True)
    compare(tmp_path, build(family, {"layers": ASYMMETRIC}), "bfloat16", quantization_config=option)


def test_transformers_reads_eight_bits(tmp_path):
    compare(tmp_path, build("llama", {"layers": QuantSpec(8, 32)}))


def test_transformers_reads_groups_of_several_widths(tmp_path):
    specs = {"down_proj": QuantSpec(8, 128), "1.self_attn": QuantSpec(4, 64), "layers": SYMMETRIC}
    compare(tmp_path, build("qwen3", specs))


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_an_embedding_of_eight_bits_dequantized(family, tmp_path):
    compare(tmp_path, build(family, {"embed_tokens": QuantSpec(8, 64), "layers": SYMMETRIC}))


def test_transformers_reads_float_folders_in_shards(tmp_path):
    checkpoint = build("qwen3", {})
    FORMATS["safetensors"].write(checkpoint, tmp_path / "one", dtype="float32")
    FORMATS["safetensors"].write(checkpoint, tmp_path / "many", dtype="float32", shard_limit=50_000)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    assert torch.equal(logits(tmp_path / "one"), logits(tmp_path / "many"))
    assert transformers.AutoConfig.from_pretrained(tmp_path / "one").dtype == torch.float32
