"""llama.cpp loads what `export.gguf` writes: same logits as transformers on the same weights, same token ids.

One's own reader hides one's own mistakes, so here the writer meets the format's owner. A tiny random model of each
architecture is written, and llama.cpp's logits are held to transformers' on the very numbers that were stored.
"""

import json

import llama_cpp
import ml_dtypes
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM

from export.checkpoint import Checkpoint, to_numpy
from export.gguf import read, write
from export.gguf_names import MODEL_TYPES, shapes
from export.gguf_pretokenizers import PRE_TOKENIZERS, to_json
from export.gguf_vocabulary import merges_from_scores
from export.quantized import QuantizedTensor, QuantSpec, pack

LENGTH = 24
SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GEMMA = {"sliding_window": 8, "query_pre_attn_scalar": 32, "tie_word_embeddings": True}
FAMILIES = {
    "llama": {"tie_word_embeddings": False},
    "llama-3": {"rope_scaling": LLAMA_3, "tie_word_embeddings": True},
    "llama-linear-biased": {
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
    },
    "mistral": {"sliding_window": None, "tie_word_embeddings": False},
    "qwen2": {"head_dim": 16, "tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False},
    "gemma2": {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0, **GEMMA},
    "gemma3_text": {"rope_local_base_freq": 100.0, **GEMMA},
}
TEXTS = (
    "My fellow citizens, we've 1234 reasons to be  glad.\n\n\tThe state of the union's strong!\n",
    "naïve café, Ünïcödé, 日本語, ½ ² 😀   \r\n  x",
    "<s>literal</s> and [PAD3] <0x0A>",
    "   ",
)


def config_of(case: str) -> dict:
    kind = case.split("-")[0]
    return {"model_type": kind, **SIZES, **FAMILIES[case]}


def draw(case: str) -> dict[str, np.ndarray]:
    """Random weights, biases and norms, large enough for logits with a standard deviation near 1 or above."""
    rng = np.random.default_rng(7)
    config = config_of(case)
    weights = {}
    for name, shape in shapes(MODEL_TYPES[config["model_type"]], config).items():
        spread = 0.3 if len(shape) == 1 else 2 / np.sqrt(shape[1])
        center = 1.0 if name.endswith("norm.weight") and "gemma" not in case else 0.0
        weights[name] = (center + spread * rng.standard_normal(shape)).astype(np.float32)
    weights["model.embed_tokens.weight"] *= 0.5 if "gemma" in case else 4
    return weights


def quantize(weights: dict[str, np.ndarray], spec: QuantSpec) -> dict:
    """Every matrix on random codes; scales keep the weights' size."""
    rng = np.random.default_rng(3)
    found = {}
    for name, value in weights.items():
        if value.ndim == 1:
            found[name] = value
            continue
        codes = rng.integers(0, spec.levels, value.shape, dtype=np.uint8)
        groups = (value.shape[0], value.shape[1] // spec.group_size)
        size = value.std() / (spec.levels / np.sqrt(12))
        scale = (size * rng.uniform(0.5, 1.5, groups)).astype(ml_dtypes.bfloat16)
        zero = None if spec.symmetric else rng.integers(spec.levels // 3, spec.levels, groups, dtype=np.uint8)
        found[name] = QuantizedTensor(pack(codes, spec.bits), scale, zero, spec)
    return found


def theirs(case: str, weights: dict, tokens: list[int]) -> np.ndarray:
    """Logits [T, V] by transformers, of the float32 values of the weights."""
    config = AutoConfig.for_model(**config_of(case))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    state = {name: torch.tensor(np.array(to_numpy(name, value, "float32"))) for name, value in weights.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


def llama(path, **options) -> llama_cpp.Llama:
    return llama_cpp.Llama(str(path), n_ctx=64, verbose=False, n_threads=2, logits_all=True, **options)


def engine(path, tokens: list[int]) -> np.ndarray:
    """Logits [T, V] by llama.cpp, with keys and values kept in float32."""
    model = llama(path, type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32)
    model.eval(tokens)
    return np.array(model.scores[: len(tokens)], np.float32)


def tokenizer_files(name: str = "gpt-2", size: int = 300, template: str = "") -> dict[str, bytes]:
    """A byte-level tokenizer trained on `TEXTS` that cuts words as `name` does."""
    rule = PRE_TOKENIZERS[name]
    backend = Tokenizer(models.BPE(ignore_merges=rule.ignore_merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    tokenizer = json.loads(backend.to_str())
    tokenizer["pre_tokenizer"] = to_json(rule)
    tokenizer["normalizer"] = None if rule.normalizer is None else {"type": rule.normalizer}
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    if template:
        settings["chat_template"] = template
    return {"tokenizer.json": json.dumps(tokenizer).encode(), "tokenizer_config.json": json.dumps(settings).encode()}


def errors(case: str, weights: dict, path, **options) -> tuple[np.ndarray, float]:
    """Absolute differences of logits, and the standard deviation of transformers' logits."""
    write(Checkpoint(config_of(case), weights, tokenizer_files()), path, **options)
    tokens = np.random.default_rng(1).integers(0, SIZES["vocab_size"], LENGTH).tolist()
    want = theirs(case, weights, tokens)
    assert want.std() > 0.5
    return np.abs(engine(path, tokens) - want), float(want.std())


@pytest.mark.parametrize("case", FAMILIES)
def test_llama_cpp_computes_the_logits_that_transformers_computes(case, tmp_path):
    difference, spread = errors(case, draw(case), tmp_path / "model.gguf", float_type="F32")
    # llama.cpp looks GELU up in a float16 table.
    limit = 1e-3 if "gemma" in case else 1e-4
    assert difference.mean() < limit * spread
    assert difference.max() < 20 * limit * spread


# llama.cpp rounds activations to 8 bits where weights are quantized: that, not the weights, is the difference.
QUANTIZED = {
    "Q4_0": QuantSpec(4, 32),
    "Q4_0 in groups of 64": QuantSpec(4, 64),
    "Q4_1": QuantSpec(4, 32, symmetric=False),
    "Q8_0": QuantSpec(8, 32),
}


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text"])
def test_llama_cpp_computes_with_the_integers_and_scales_that_were_quantized(case, kind, tmp_path):
    spec = QUANTIZED[kind]
    weights = draw(case)
    if spec.group_size == 64:
        weights = {name: value for name, value in weights.items() if "down_proj" not in name}
        weights = quantize(weights, spec) | {n: v for n, v in draw(case).items() if "down_proj" in n}
    else:
        weights = quantize(weights, spec)
    difference, spread = errors(case, weights, tmp_path / "model.gguf", float_type="F32")
    assert difference.mean() < 0.1 * spread


def test_unpermuted_rows_would_be_seen(tmp_path):
    case = "llama"
    weights = draw(case)
    right, spread = errors(case, weights, tmp_path / "model.gguf", float_type="F32")
    rows = np.arange(128).reshape(4, 2, 16).swapaxes(1, 2).reshape(-1)
    wrong = {n: v[rows] if "q_proj" in n else v for n, v in weights.items()}
    write(Checkpoint(config_of(case), wrong, tokenizer_files()), tmp_path / "wrong.gguf", float_type="F32")
    tokens = np.random.default_rng(1).integers(0, SIZES["vocab_size"], LENGTH).tolist()
    assert np.abs(engine(tmp_path / "wrong.gguf", tokens) - theirs(case, weights, tokens)).mean() > 0.05 * spread
    assert right.mean() < 1e-4 * spread


def assert_same_ids(files: dict[str, bytes], path) -> None:
    """llama.cpp's ids of the file written, the tokenizer's, and those of the tokenizer that is read back."""
    write(Checkpoint(config_of("llama"), draw("llama"), files), path)
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    for source in (files["tokenizer.json"], read(path).files["tokenizer.json"]):
        backend = Tokenizer.from_str(source.decode())
        backend.encode_special_tokens = True
        for text in TEXTS:
            got = model.tokenize(text.encode(), add_bos=False, special=False)
            assert got == backend.encode(text, add_special_tokens=False).ids


RULES = {rule: name for name, rule in reversed(PRE_TOKENIZERS.items())}  # one name a rule


@pytest.mark.parametrize("name", RULES.values())
def test_llama_cpp_cuts_and_merges_text_as_the_tokenizer_does(name, tmp_path):
    assert_same_ids(tokenizer_files(name), tmp_path / "model.gguf")


@pytest.mark.parametrize("prefix", [False, True])
def test_llama_cpp_gives_a_sentencepiece_tokenizers_ids(prefix, tmp_path):
    pieces = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *"▁etaoinsrhldu'"]
    pieces += ["th", "▁t", "▁th", "▁the", "he", "re", "in", "▁s", "st", "▁▁", "on", "▁re", "ate", "at", "te"]
    ids = {piece: i for i, piece in enumerate(pieces)}
    scores = -np.arange(len(pieces), dtype=np.float64)
    mark = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prepend = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, mark]}
    model = {"type": "BPE", "vocab": ids, "merges": merges_from_scores(ids, scores), "unk_token": "<unk>"}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": piece, "special": True, "normalized": False}
            | {"single_word": False, "lstrip": False, "rstrip": False}
            for i, piece in enumerate(pieces[:3])
        ],
        "normalizer": prepend if prefix else mark,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": model | {"byte_fallback": True, "fuse_unk": True},
    }
    assert_same_ids({"tokenizer.json": json.dumps(tokenizer).encode()}, tmp_path / "model.gguf")


def test_llama_cpp_puts_the_bos_and_reads_special_tokens_and_the_chat_template(tmp_path):
    template = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"
    files = tokenizer_files(template=template)
    write(Checkpoint(config_of("llama"), draw("llama"), files), tmp_path / "model.gguf")
    model = llama(tmp_path / "model.gguf")
    assert model.tokenize(b"<s>x</s>", add_bos=True, special=True)[:2] == [0, 0]
    assert model.token_eos() == 1
    assert model.metadata["tokenizer.chat_template"] == template
