"""The numbers of GGUF blocks, against the layouts' definitions written out one value at a time."""

import ml_dtypes
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from export.errors import ArtifactError
from export.gguf_blocks import READABLE, block_type, dequantize, encode, half_scales
from export.quantized import QuantizedTensor, QuantSpec, pack


def half(raw: bytes) -> np.float32:
    return np.float32(np.frombuffer(raw, np.float16)[0])


def nibbles(raw: bytes) -> list[int]:
    return [byte & 15 for byte in raw] + [byte >> 4 for byte in raw]


def define_q4_0(raw: bytes) -> list[float]:
    return [half(raw[:2]) * (q - 8) for q in nibbles(raw[2:])]


def define_q4_1(raw: bytes) -> list[float]:
    return [half(raw[:2]) * q + half(raw[2:4]) for q in nibbles(raw[4:])]


def fifth_bits(raw: bytes) -> list[int]:
    word = int.from_bytes(raw, "little")
    return [(word >> i & 1) << 4 for i in range(32)]


def define_q5_0(raw: bytes) -> list[float]:
    codes = [low | high for low, high in zip(nibbles(raw[6:]), fifth_bits(raw[2:6]), strict=True)]
    return [half(raw[:2]) * (q - 16) for q in codes]


def define_q5_1(raw: bytes) -> list[float]:
    codes = [low | high for low, high in zip(nibbles(raw[8:]), fifth_bits(raw[4:8]), strict=True)]
    return [half(raw[:2]) * q + half(raw[2:4]) for q in codes]


def define_q8_0(raw: bytes) -> list[float]:
    return [half(raw[:2]) * np.float32(q) for q in np.frombuffer(raw[2:], np.int8)]


def k_scales(s: bytes, j: int) -> tuple[int, int]:
    if j < 4:
        return s[j] & 63, s[j + 4] & 63
    return s[j + 4] & 15 | s[j - 4] >> 6 << 4, s[j + 4] >> 4 | s[j] >> 6 << 4


def define_k(raw: bytes, high_bits: bytes, codes: bytes) -> list[float]:
    d, dmin, scales = half(raw[:2]), half(raw[2:4]), raw[4:16]
    values = []
    for j in range(8):
        part = codes[j // 2 * 32 : j // 2 * 32 + 32]
        scale, least = k_scales(scales, j)
        for i, byte in enumerate(part):
            q = (byte >> 4 if j % 2 else byte & 15) | (high_bits[i] >> j & 1) << 4
            values.append(d * np.float32(scale) * np.float32(q) - dmin * np.float32(least))
    return values


def define_q4_k(raw: bytes) -> list[float]:
    return define_k(raw, bytes(32), raw[16:])


def define_q5_k(raw: bytes) -> list[float]:
    return define_k(raw, raw[16:48], raw[48:])


def define_q6_k(raw: bytes) -> list[float]:
    low, high, scales, d = raw[:128], raw[128:192], np.frombuffer(raw[192:208], np.int8), half(raw[208:])
    values = []
    for i in range(256):
        side, at = divmod(i, 128)
        quarter, column = divmod(at, 32)
        byte = low[64 * side + 32 * (quarter % 2) + column]
        q = (byte >> 4 if quarter >= 2 else byte & 15) | (high[32 * side + column] >> 2 * quarter & 3) << 4
        values.append(d * np.float32(scales[i // 16]) * np.float32(q - 32))
    return values


DEFINITIONS = {
    "F32": lambda raw: np.frombuffer(raw, np.float32),
    "F16": lambda raw: np.frombuffer(raw, np.float16),
    "BF16": lambda raw: np.frombuffer(raw, ml_dtypes.bfloat16),
    "Q4_0": define_q4_0,
    "Q4_1": define_q4_1,
    "Q5_0": define_q5_0,
    "Q5_1": define_q5_1,
    "Q8_0": define_q8_0,
    "Q4_K": define_q4_k,
    "Q5_K": define_q5_k,
    "Q6_K": define_q6_k,
}
HALVES = {"Q4_1": 2, "Q5_1": 2, "Q4_K": 2, "Q5_K": 2}  # float16 fields at a block's start; Q6_K's is its last
FLOATS = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def random_blocks(kind: GGMLQuantizationType, count: int, seed: int) -> np.ndarray:
    """Random bytes with the scales, which could be NaN, drawn as float16 numbers."""
    rng = np.random.default_rng(seed)
    if kind.name in FLOATS:
        return rng.standard_normal(count).astype(FLOATS[kind.name]).view(np.uint8)
    raw = rng.integers(0, 256, (count, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    halves = HALVES.get(kind.name, 1)
    scale = rng.standard_normal((count, halves)).astype(np.float16).view(np.uint8)
    if kind.name == "Q6_K":
        raw[:, -2:] = scale
    else:
        raw[:, : 2 * halves] = scale
    return raw.reshape(-1)


def test_every_readable_type_has_a_definition_here():
    assert set(DEFINITIONS) == {kind.name for kind in READABLE}


@pytest.mark.parametrize("kind", READABLE, ids=lambda kind: kind.name)
def test_a_block_holds_what_its_layout_defines(kind):
    raw = random_blocks(kind, 5, seed=kind)
    size = GGML_QUANT_SIZES[kind][1]
    blocks = [raw[i : i + size].tobytes() for i in range(0, raw.size, size)]
    want = np.concatenate([np.asarray(DEFINITIONS[kind.name](block), np.float32) for block in blocks])
    np.testing.assert_array_equal(dequantize(raw, kind), want)


def test_a_tensor_longer_than_a_chunk_is_converted_whole():
    values = np.random.default_rng(0).standard_normal((1 << 20) + 96).astype(np.float16)
    np.testing.assert_array_equal(dequantize(values.view(np.uint8), GGMLQuantizationType.F16), values)


SPECS = [
    QuantSpec(4, 32),
    QuantSpec(4, 64),
    QuantSpec(4, 96, scale_dtype="float16"),
    QuantSpec(8, 32),
    QuantSpec(8, 128),
    QuantSpec(4, 32, symmetric=False),
    QuantSpec(4, 128, symmetric=False),
    QuantSpec(5, 32),
    QuantSpec(5, 64, symmetric=False),
]


def draw(spec: QuantSpec, rows: int, groups: int, seed: int) -> QuantizedTensor:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, spec.levels, (rows, groups * spec.group_size), dtype=np.uint8)
    scale = (rng.choice([-1, 1], (rows, groups)) * rng.uniform(1e-4, 2, (rows, groups))).astype(spec.scale_dtype)
    zero = None if spec.symmetric else rng.integers(0, spec.levels, (rows, groups), dtype=np.uint8)
    return QuantizedTensor(pack(codes, spec.bits), scale, zero, spec)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@settings(max_examples=20)
@given(rows=st.integers(1, 5), groups=st.integers(1, 4), seed=st.integers(0, 1000))
def test_codes_and_scales_survive_the_re_encoding(spec, rows, groups, seed):
    tensor = draw(spec, rows, groups, seed)
    kind = block_type("w", tensor, "F16")
    raw = encode("w", tensor, kind)
    found = dequantize(raw.reshape(-1), kind).reshape(tensor.shape)
    want = np.asarray(tensor.dequantize(np.float32))
    if spec.symmetric:
        np.testing.assert_array_equal(found, want)
    else:  # the offset -z * s is rounded to float16, to half a unit in its last of 11 bits
        offset = np.asarray(tensor.zero, np.float32) * np.abs(np.asarray(tensor.scale, np.float32))
        bound = np.repeat(offset * 2.0**-11 + 2.0**-25, spec.group_size, axis=1) * (1 + 1e-3) + np.abs(want) * 1e-6
        assert (np.abs(found - want) <= bound).all()


@given(arrays(np.uint16, st.integers(1, 20)))
def test_a_scale_becomes_float16_exactly_or_within_a_subnormal_step_or_not_at_all(bits):
    scale = bits.view(ml_dtypes.bfloat16)[None]
    wide = scale.astype(np.float32)
    if not np.isfinite(wide).all() or np.abs(wide).max() >= 65520:
        with pytest.raises(ArtifactError, match=r"^w: "):
            half_scales("w", scale)
        return
    found = half_scales("w", scale).astype(np.float32)
    normal = np.abs(wide) >= 2.0**-14
    np.testing.assert_array_equal(found[normal], wide[normal])
    assert (np.abs(found - wide) <= 2.0**-25).all()


def test_a_float32_scale_that_float16_cannot_hold_is_refused():
    with pytest.raises(ArtifactError, match=r"^a\.weight: float32 scales have no exact float16"):
        half_scales("a.weight", np.array([[0.1]], np.float32))


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (QuantSpec(4, 48), "groups of 48"),
        (QuantSpec(8, 32, symmetric=False), "8 bits with zero points"),
        (QuantSpec(3, 32), "3 bits without zero points"),
        (QuantSpec(6, 32, symmetric=False), "6 bits with zero points"),
    ],
)
def test_what_has_no_block_type_is_refused_by_name(spec, reason):
    with pytest.raises(ArtifactError, match=rf"^layers\.0: {reason}"):
        block_type("layers.0", draw(spec, 2, 2, 0), "F16")


@pytest.mark.parametrize("float_type", ["F32", "F16", "BF16", "Q8_0"])
def test_floats_are_stored_to_the_precision_of_their_type(float_type):
    values = np.random.default_rng(0).standard_normal((7, 64)).astype(np.float32)
    kind = block_type("w", values, float_type)
    found = dequantize(encode("w", values, kind).reshape(-1), kind).reshape(values.shape)
    error = np.abs(found - values)
    relative = {"F32": 0.0, "F16": 2.0**-11, "BF16": 2.0**-8, "Q8_0": 0.0}[float_type]
    step = np.abs(values).reshape(7, 2, 32).max(axis=-1).repeat(32, axis=1) / 127
    bound = np.abs(values) * relative + (step * 0.51 if float_type == "Q8_0" else 0)
    assert kind.name == float_type
    assert (error <= bound).all()


def test_vectors_are_f32_and_ragged_rows_f16():
    assert block_type("norm", np.ones(64), "Q8_0") == GGMLQuantizationType.F32
    assert block_type("w", np.ones((2, 40)), "Q8_0") == GGMLQuantizationType.F16


@pytest.mark.parametrize(("value", "kind"), [(np.nan, "F32"), (np.inf, "Q8_0"), (7e4, "F16"), (1e8, "Q8_0")])
def test_a_value_that_cannot_be_stored_is_refused_by_name(value, kind):
    values = np.zeros((2, 32), np.float32)
    values[1, 3] = value
    with pytest.raises(ArtifactError, match=r"^model\.norm: "):
        encode("model.norm", values, GGMLQuantizationType[kind])
