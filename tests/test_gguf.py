"""GGUF files there and back, what a file's owner defines about them, and what a stranger may do to one."""

import dataclasses
import json
import re
import struct
from pathlib import Path

import jaxtyping
import ml_dtypes
import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from export.checkpoint import Checkpoint
from export.errors import ArtifactError
from export.gguf import read, write
from export.gguf_config import llama3_factors
from export.gguf_names import ARCHITECTURES, MODEL_TYPES, names, row_order, shapes
from export.quantized import QuantizedTensor, QuantSpec, pack

SIZES = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GEMMA = {"sliding_window": 8, "query_pre_attn_scalar": 32, "hidden_activation": "gelu_pytorch_tanh"}
FAMILIES = {
    "llama": {"tie_word_embeddings": False},
    "llama with everything": {
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA_3,
    },
    "qwen2": {"head_dim": 16, "tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "tie_word_embeddings": True, **GEMMA},
    "gemma3_text": {"rope_local_base_freq": 10000.0, "tie_word_embeddings": True, **GEMMA},
}


def tokenizer_files() -> dict[str, bytes]:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["the state of the union of the states"], trainer)
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    return {"tokenizer.json": backend.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}


TOKENIZER = tokenizer_files()


def config_of(case: str) -> dict:
    return {"model_type": case.split()[0], **SIZES, **FAMILIES[case]}


def draw(case: str, dtype=np.float32) -> Checkpoint:
    rng = np.random.default_rng(5)
    config = config_of(case)
    wanted = shapes(MODEL_TYPES[config["model_type"]], config)
    weights = {name: rng.standard_normal(shape).astype(dtype) for name, shape in wanted.items()}
    return Checkpoint(config, weights, TOKENIZER)


@pytest.mark.parametrize("case", FAMILIES)
def test_a_model_there_and_back_is_the_same(case, tmp_path):
    given_model = draw(case)
    write(given_model, tmp_path, float_type="F32")
    found = read(tmp_path / "model.gguf")
    assert set(found.weights) == set(given_model.weights)
    for name, value in given_model.weights.items():
        # A Gemma norm is stored as w + 1, which rounds.
        tolerance = 3e-7 if "gemma" in case and name.endswith("norm.weight") else 0
        np.testing.assert_allclose(found.weights[name], value, rtol=0, atol=tolerance)
    for name, value in config_of(case).items():
        assert found.config[name] == value, name
    ids = Tokenizer.from_str(found.files["tokenizer.json"].decode()).encode("the states", add_special_tokens=False).ids
    assert ids == Tokenizer.from_str(TOKENIZER["tokenizer.json"].decode()).encode("the states").ids


@pytest.mark.parametrize("case", FAMILIES)
def test_a_second_round_changes_nothing(case, tmp_path):
    write(draw(case), tmp_path / "first.gguf", float_type="F32")
    first = read(tmp_path / "first.gguf")
    write(first, tmp_path / "second.gguf", float_type="F32")
    second = read(tmp_path / "second.gguf")
    assert first.config == second.config
    for name in first.weights:
        np.testing.assert_allclose(first.weights[name], second.weights[name], rtol=0, atol=3e-7)


def test_gguf_py_reads_the_names_shapes_and_keys_that_llama_cpp_wants(tmp_path):
    write(draw("gemma3_text"), tmp_path / "model.gguf", float_type="F16")
    reader = GGUFReader(tmp_path / "model.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert set(tensors) == set(names(ARCHITECTURES["gemma3"], 7)) - {"output.weight"}
    assert list(tensors["blk.0.attn_q.weight"].shape) == [64, 128]  # reversed
    assert tensors["blk.0.attn_q.weight"].tensor_type.name == "F16"
    assert tensors["blk.3.attn_q_norm.weight"].tensor_type.name == "F32"
    value = draw("gemma3_text").weights["model.layers.3.self_attn.q_norm.weight"]
    np.testing.assert_array_equal(tensors["blk.3.attn_q_norm.weight"].data, value + np.float32(1))
    keys = {key: field.contents() for key, field in reader.fields.items()}
    assert keys["general.architecture"] == "gemma3"
    assert keys["general.file_type"] == 1
    assert keys["general.quantization_version"] == 2
    assert keys["gemma3.attention.key_length"] == keys["gemma3.attention.value_length"] == 32
    assert keys["gemma3.attention.sliding_window"] == 8
    assert len(keys["tokenizer.ggml.tokens"]) == 288


def test_rows_of_a_llama_head_are_stored_as_neighbours():
    # Hugging Face rotates row i with row i + 2 in a head of 4; llama.cpp row 2i with row 2i + 1.
    np.testing.assert_array_equal(row_order(8, 2), [0, 2, 1, 3, 4, 6, 5, 7])


@pytest.mark.parametrize("case", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("spec", "kind", "file_type"),
    [
        (QuantSpec(4, 32), "Q4_0", 2),
        (QuantSpec(4, 32, symmetric=False), "Q4_1", 3),
        (QuantSpec(5, 32), "Q5_0", 8),
        (QuantSpec(5, 32, symmetric=False), "Q5_1", 9),
        (QuantSpec(8, 32), "Q8_0", 7),
    ],
    ids=str,
)
def test_quantized_tensors_keep_their_numbers(case, spec, kind, file_type, tmp_path):
    rng = np.random.default_rng(0)
    model = draw(case)
    weights = dict(model.weights)
    for name, value in model.weights.items():
        if "proj" in name:
            groups = (value.shape[0], value.shape[1] // 32)
            zero = None if spec.symmetric else rng.integers(0, 16, groups, dtype=np.uint8)
            # Scales of at most 7 bits make even -z * s exact in float16.
            scale = (rng.integers(1, 128, groups) / 1024).astype(ml_dtypes.bfloat16)
            codes = rng.integers(0, spec.levels, value.shape, dtype=np.uint8)
            weights[name] = QuantizedTensor(pack(codes, spec.bits), scale, zero, spec)
    write(dataclasses.replace(model, weights=weights), tmp_path / "model.gguf", float_type="F32")
    reader = GGUFReader(tmp_path / "model.gguf")
    assert reader.fields["general.file_type"].contents() == file_type
    assert {tensor.tensor_type.name for tensor in reader.tensors} == {"F32", kind}
    found = read(tmp_path / "model.gguf")
    for name, value in weights.items():
        want = np.asarray(value.dequantize(np.float32)) if isinstance(value, QuantizedTensor) else value
        np.testing.assert_array_equal(found.weights[name], want)


def test_float16_and_bfloat16_weights_are_kept_exactly(tmp_path):
    for float_type, dtype in (("F16", np.float16), ("BF16", ml_dtypes.bfloat16)):
        model = draw("qwen2", dtype)
        write(model, tmp_path / f"{float_type}.gguf", float_type=float_type)
        found = read(tmp_path / f"{float_type}.gguf")
        for name, value in model.weights.items():
            np.testing.assert_array_equal(found.weights[name], value.astype(np.float32))


@given(
    st.sampled_from([32, 64, 128]),
    st.sampled_from([1e4, 5e5]),
    st.floats(2, 64),
    st.sampled_from([(1.0, 4.0), (0.5, 8.0), (2.0, 3.0)]),
)
def test_rope_factors_are_one_for_fast_frequencies_and_the_factor_for_slow_ones(head, theta, factor, ends):
    low, high = ends
    scaling = LLAMA_3 | {"factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    found = llama3_factors(scaling, theta, head)
    for i, value in enumerate(found):
        wavelength = 2 * np.pi * theta ** (2 * i / head)
        if wavelength < 8192 / high:
            assert value == 1
        elif wavelength > 8192 / low:
            assert value == pytest.approx(factor)
        else:
            part = (8192 / wavelength - low) / (high - low)
            assert value == pytest.approx(1 / ((1 - part) / factor + part), rel=1e-5)


@pytest.mark.parametrize("ends", [(1.0, 4.0), (0.5, 8.0)])
def test_rope_scaling_is_recovered_from_the_factors(ends, tmp_path):
    model = draw("llama with everything")
    scaling = LLAMA_3 | {"low_freq_factor": ends[0], "high_freq_factor": ends[1]}
    config = model.config | {"rope_scaling": scaling}
    write(dataclasses.replace(model, config=config), tmp_path / "model.gguf")
    found = read(tmp_path / "model.gguf").config["rope_scaling"]
    np.testing.assert_allclose(llama3_factors(found, 5e5, 32), llama3_factors(scaling, 5e5, 32), rtol=1e-3)


def test_rope_parameters_in_the_new_style_are_understood(tmp_path):
    model = draw("gemma3_text")
    config = {k: v for k, v in model.config.items() if not k.startswith("rope")}
    full, local = ({"rope_type": "default", "rope_theta": theta} for theta in (7e5, 3e4))
    config["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
    write(dataclasses.replace(model, config=config), tmp_path / "model.gguf")
    found = read(tmp_path / "model.gguf").config
    assert (found["rope_theta"], found["rope_local_base_freq"]) == (7e5, 3e4)


def refused(case: str, tmp_path: Path, reason: str, *, config=None, weights=None, **options) -> None:
    model = draw(case)
    bad = Checkpoint(model.config | (config or {}), dict(model.weights) | (weights or {}), TOKENIZER)
    with pytest.raises(ArtifactError, match=reason):
        write(bad, tmp_path / "model.gguf", **options)


@pytest.mark.parametrize(
    ("case", "config", "reason"),
    [
        ("llama", {"model_type": "bert"}, "model_type 'bert' has no form in GGUF"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "RoPE scaling 'yarn'"),
        ("qwen2", {"head_dim": 32}, "qwen2"),
        ("gemma2", {"query_pre_attn_scalar": 7}, "query_pre_attn_scalar = 7; llama.cpp's gemma2 computes 32"),
        ("gemma2", {"final_logit_softcapping": None}, "final_logit_softcapping is off"),
        ("gemma3_text", {"layer_types": ["full_attention"] * 7}, "layer_types"),
        ("gemma3_text", {"sliding_window": None}, "no sliding_window"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
    ],
)
def test_a_config_that_llama_cpp_would_compute_otherwise_is_refused(case, config, reason, tmp_path):
    refused(case, tmp_path, re.escape(reason), config=config)


def test_all_missing_and_misshaped_tensors_are_named_at_once(tmp_path):
    model = draw("llama")
    weights = dict(model.weights)
    del weights["model.norm.weight"], weights["model.layers.2.mlp.up_proj.weight"]
    weights["lm_head.weight"] = np.zeros((3, 64), np.float32)
    weights["model.extra"] = np.zeros(4, np.float32)
    with pytest.raises(ArtifactError) as caught:
        write(dataclasses.replace(model, weights=weights), tmp_path / "model.gguf")
    for fault in (
        "model.norm.weight is missing",
        "model.layers.2.mlp.up_proj.weight is missing",
        "lm_head.weight is [3, 64], not [288, 64]",
        "model.extra has no place",
    ):
        assert fault in str(caught.value)


def test_a_weight_that_is_not_finite_is_refused_by_name(tmp_path):
    weights = {"model.layers.1.mlp.up_proj.weight": np.full((96, 64), np.nan, np.float32)}
    refused("llama", tmp_path, r"model\.layers\.1\.mlp\.up_proj\.weight: NaN or Inf", weights=weights)


def test_an_unknown_float_type_is_refused(tmp_path):
    refused("llama", tmp_path, "float_type 'Q3_K': must be one of", float_type="Q3_K")


# What strangers send


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A whole file with every kind of key: a Gemma of one layer. A path, for Hypothesis prints what it is given."""
    path = tmp_path_factory.mktemp("small") / "model.gguf"
    model = draw("gemma3_text")
    sizes = {"num_hidden_layers": 1, "hidden_size": 4, "intermediate_size": 8, "head_dim": 2, "num_key_value_heads": 1}
    sizes |= {"query_pre_attn_scalar": 2, "num_attention_heads": 2}
    config = model.config | sizes
    rng = np.random.default_rng(0)
    wanted = shapes(MODEL_TYPES["gemma3_text"], config)
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in wanted.items()}
    write(Checkpoint(config, weights, TOKENIZER), path, float_type="F32")
    return path


def read_whole(data: bytes, path: Path) -> Checkpoint:
    path.write_bytes(data)
    model = read(path)
    for name in model.weights:
        model.weights[name]
    return model


def only_artifact_errors(data: bytes, path: Path) -> None:
    try:
        read_whole(data, path)
    except ArtifactError as error:
        found = error
    except jaxtyping.TypeCheckError as error:
        # The type check of `Checkpoint.weights`, which there is only in tests, loads the first tensor.
        found = next((cause for cause in causes(error) if isinstance(cause, ArtifactError)), None)
        if found is None:
            raise
    else:
        return
    assert "\n" not in str(found)
    assert len(str(found)) < 6000


def causes(error: BaseException | None):
    """An error and what it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


# Where, and the bytes that come there. Half of them lie among the first keys, where most lengths are.
WOUND = st.tuples(
    st.one_of(st.integers(0, 1500), st.integers(0, 1 << 20)),
    st.one_of(
        st.binary(min_size=1, max_size=8),
        st.integers(0, 2**64 - 1).map(lambda i: struct.pack("<Q", i)),
        st.sampled_from([b"\xff" * 8, b"\x00" * 8, b"\xff\xff\xff\x7f", b"\x00\x00\xc0\x7f"]),
    ),
)


@settings(max_examples=150, deadline=None)
@given(wounds=st.lists(WOUND, min_size=1, max_size=3))
def test_a_damaged_file_raises_nothing_but_artifact_errors(small, tmp_path_factory, wounds):
    path = tmp_path_factory.mktemp("damaged") / "model.gguf"
    damaged = bytearray(small.read_bytes())
    for place, new in wounds:
        at = place % (len(damaged) - 8)
        damaged[at : at + len(new)] = new
    only_artifact_errors(bytes(damaged), path)


@settings(max_examples=60)
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_refused(small, tmp_path_factory, share):
    path = tmp_path_factory.mktemp("short") / "model.gguf"
    # The end may be padding that nothing needs.
    whole = small.read_bytes()
    with pytest.raises(ArtifactError):
        read_whole(whole[: int(share * (len(whole) - 64))], path)


def test_any_bytes_at_all_raise_nothing_but_artifact_errors(tmp_path):
    for data in (b"", b"GGUF", b"GGUF" + b"\xff" * 60, b"PK\x03\x04" * 20, b"GGUF\x03\0\0\0" + bytes(64)):
        with pytest.raises(ArtifactError):
            read_whole(data, tmp_path / "model.gguf")
    with pytest.raises(ArtifactError, match="big-endian"):
        read_whole(b"GGUF\0\0\0\x03" + bytes(64), tmp_path / "model.gguf")
    with pytest.raises(ArtifactError, match="No such file"):
        read(tmp_path / "absent.gguf")


def test_counts_beyond_the_file_are_refused_before_anything_is_allocated(small, tmp_path):
    data = small.read_bytes()
    for offset, what in ((8, "tensors"), (16, "keys"), (24, "bytes of a key")):
        with pytest.raises(ArtifactError, match=f"18446744073709551615 {what} do not fit"):
            read_whole(data[:offset] + b"\xff" * 8 + data[offset + 8 :], tmp_path / "model.gguf")


def crafted(path: Path, tensors: list[tuple[str, np.ndarray]], **keys) -> Path:
    writer = GGUFWriter(path, keys.pop("architecture", "llama"))
    for key, value in keys.items():
        writer.add_uint32(key.replace("__", "."), value)
    for name, value in tensors:
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_tensor_on_top_of_another_is_refused(tmp_path):
    path = crafted(tmp_path / "model.gguf", [("a", np.ones(16, np.float32)), ("b", np.ones(16, np.float32))])
    data = path.read_bytes()
    at = data.index(struct.pack("<IQ", 0, 64))  # type F32, offset 64
    path.write_bytes(data[: at + 4] + struct.pack("<Q", 32) + data[at + 12 :])
    with pytest.raises(ArtifactError, match="b overlaps a"):
        read(path)
    path.write_bytes(data[: at + 4] + struct.pack("<Q", 33) + data[at + 12 :])
    with pytest.raises(ArtifactError, match="offset 33, not a multiple of 32"):
        read(path)


def test_a_doubled_tensor_is_refused(tmp_path):
    path = crafted(tmp_path / "model.gguf", [("aa", np.ones(16, np.float32)), ("ab", np.ones(16, np.float32))])
    path.write_bytes(path.read_bytes().replace(b"ab", b"aa"))
    with pytest.raises(ArtifactError, match="tensor aa stands there twice"):
        read(path)


def test_an_unsupported_file_is_refused_by_what_it_is(tmp_path):
    ones = [("token_embd.weight", np.ones((4, 4), np.float32))]
    cases = {
        "architecture 'mamba' is not supported": {"architecture": "mamba"},
        "no key llama.embedding_length": {},
        "one part of a split model": {"split__count": 2},
        "llama.attention.head_count = 0: must be an integer from 1": {
            "llama__embedding_length": 4,
            "llama__attention__head_count": 0,
        },
    }
    for reason, keys in cases.items():
        with pytest.raises(ArtifactError, match=re.escape(reason)):
            read(crafted(tmp_path / "model.gguf", ones, **keys))
    with pytest.raises(ArtifactError, match=r"cannot read the types of token_embd\.weight \(F64\)"):
        read(crafted(tmp_path / "model.gguf", [("token_embd.weight", np.ones((4, 4)))]))


def test_a_tensor_with_nan_is_refused_by_name_when_it_is_read(small, tmp_path):
    path = tmp_path / "model.gguf"
    start = next(tensor.data_offset for tensor in GGUFReader(small).tensors if tensor.name == "blk.0.ffn_up.weight")
    data = small.read_bytes()
    path.write_bytes(data[:start] + struct.pack("<f", np.nan) + data[start + 4 :])
    model = read(path)
    model.weights["model.norm.weight"]
    with pytest.raises(ArtifactError, match=r"blk\.0\.ffn_up\.weight: NaN or Inf"):
        model.weights["model.layers.0.mlp.up_proj.weight"]
