"""Every format gives back what it was given."""

import json
import re
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from export import FORMATS, compressed_tensors
from export.checkpoint import DTYPES, FILES, Checkpoint, check_finite, kind, read
from export.errors import ArtifactError
from export.gguf_blocks import QUANTIZED
from export.quantized import BITS, NF4_BLOCK, NF4Tensor, PackedTensor, QuantizedTensor, QuantSpec, pack, unpack

# Of what is no matrix of the model's own, each format is asked to keep all bits.
EXACTLY = {
    "safetensors": {"dtype": "float32"},
    "bitsandbytes": {"dtype": "float32"},
    "gguf": {"float_type": "F32"},
    "orbax": {"dtype": "float32"},
}
FOLDERS = [name for name in FORMATS if name != "gguf"]
VOCABULARY, HIDDEN, WIDE = 40, 128, 256
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
LAYER = {
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (WIDE, HIDDEN),
    "mlp.up_proj": (WIDE, HIDDEN),
    "mlp.down_proj": (HIDDEN, WIDE),
}
SPECS = st.builds(
    QuantSpec,
    bits=st.sampled_from(BITS),
    group_size=st.sampled_from([32, 64, 128]),
    symmetric=st.booleans(),
    scale_dtype=st.just("bfloat16"),
)


def draw(rng: np.random.Generator, shape: tuple[int, ...], spec: QuantSpec) -> QuantizedTensor:
    groups = (*shape[:-1], shape[-1] // spec.group_size)
    scale = rng.uniform(0.01, 0.1, groups).astype(DTYPES[spec.scale_dtype])
    zero = None if spec.symmetric else rng.integers(0, spec.levels, groups, dtype=np.uint8)
    codes = rng.integers(0, spec.levels, shape, dtype=np.uint8)
    return QuantizedTensor(pack(codes, spec.bits), scale, zero, spec)


def draw_nf4(rng: np.random.Generator, shape: tuple[int, int]) -> NF4Tensor:
    packed = rng.integers(0, 256, (shape[0], shape[1] // 2), dtype=np.uint8)
    scale = rng.integers(0, 256, (shape[0], shape[1] // NF4_BLOCK), dtype=np.uint8)
    nested = rng.uniform(0.01, 0.1, -(-scale.size // 256)).astype(np.float32)
    return NF4Tensor(packed, scale, nested, np.asarray(rng.uniform(0.1, 0.2), np.float32))


def linears_for(name: str):
    """How the linears are packed in a model that a format takes."""
    return lambda tensor: None if "embed" in tensor else "nf4" if name == "bitsandbytes" else QuantSpec()


def llama(seed: int, choose) -> Checkpoint:
    """A one-layer model; `choose(name)` gives a matrix's spec, "nf4", or None for floats."""
    rng = np.random.default_rng(seed)
    shapes = {f"model.layers.0.{name}.weight": shape for name, shape in LAYER.items()}
    shapes |= {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    weights = {}
    for name, shape in shapes.items():
        spec = choose(name) if len(shape) == 2 else None
        floats = rng.normal(size=shape).astype(ml_dtypes.bfloat16)
        drawn = draw_nf4 if spec == "nf4" else partial(draw, spec=spec)
        weights[name] = floats if spec is None else drawn(rng, shape)
    return Checkpoint(CONFIG, weights)


def same_bits(a: PackedTensor, b: PackedTensor) -> bool:
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b))
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in leaves)


def floats(value) -> np.ndarray:
    return np.asarray(value.dequantize() if isinstance(value, PackedTensor) else value, np.float32)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=8, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_every_format_gives_back_the_model(name, tmp_path_factory, data, seed):
    specs = SPECS if name != "gguf" else SPECS.filter(lambda spec: (spec.bits, spec.symmetric) in QUANTIZED)
    specs = st.just("nf4") if name == "bitsandbytes" else specs
    spec, other = data.draw(specs), data.draw(st.none() | specs)
    model = llama(seed, lambda name: None if "embed" in name else other if "down" in name else spec)
    folder = tmp_path_factory.mktemp("round") / "model"
    FORMATS[name].write(model, folder, **EXACTLY.get(name, {}))
    assert kind(folder) == name
    again = read(folder)
    assert again.config.items() >= {k: v for k, v in CONFIG.items() if name != "gguf"}.items()
    assert "quantization_config" not in again.config
    assert again.weights.keys() == model.weights.keys()
    check_finite(again)
    for tensor, value in model.weights.items():
        found = again.weights[tensor]
        assert found.shape == value.shape
        if isinstance(value, PackedTensor) and isinstance(found, PackedTensor):
            assert same_bits(found, value)
        # GGUF's Q4_1 and Q5_1 keep -z * s in float16, off by at most 2**-11 of 31 * 0.1.
        np.testing.assert_allclose(floats(found), floats(value), rtol=0, atol=2e-3 if name == "gguf" else 0)


@pytest.mark.parametrize("name", ["compressed-tensors", "bitsandbytes", "orbax"])
def test_quantized_formats_keep_tensors_quantized(name, tmp_path):
    model = llama(0, linears_for(name))
    FORMATS[name].write(model, tmp_path)
    again = read(tmp_path).weights
    assert all(type(again[tensor]) is type(value) for tensor, value in model.weights.items())


@pytest.mark.parametrize("name", FOLDERS)
def test_files_travel_along_and_strangers_stay_behind(name, tmp_path):
    files = {file: file.encode() for file in FILES}
    model = llama(0, linears_for(name))
    FORMATS[name].write(Checkpoint(model.config, model.weights, files), tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    assert read(tmp_path).files == files
    with pytest.raises(ArtifactError, match=r"\.\./evil"):
        FORMATS[name].write(Checkpoint(model.config, model.weights, {"../evil": b""}), tmp_path / "again")


@pytest.mark.parametrize("name", FORMATS)
def test_jax_arrays_are_written_like_numpy_ones(name, tmp_path):
    model = llama(0, linears_for(name))
    on_device = Checkpoint(model.config, jax.tree.map(jnp.asarray, model.weights))
    for folder, checkpoint in (("numpy", model), ("jax", on_device)):
        FORMATS[name].write(checkpoint, tmp_path / folder)
    first, second = read(tmp_path / "numpy").weights, read(tmp_path / "jax").weights
    assert all(np.array_equal(floats(first[tensor]), floats(second[tensor])) for tensor in model.weights)


def stream_of(codes: np.ndarray, bits: int) -> list[int]:
    """A row's codes as one long number, the first in the lowest bits."""
    return [sum(int(code) << bits * i for i, code in enumerate(row)) for row in codes]


@pytest.mark.parametrize("library", [np, jnp], ids=["numpy", "jax"])
@pytest.mark.parametrize("bits", BITS)
@settings(max_examples=20, deadline=None)
@given(data=st.data(), runs=st.integers(0, 9), seed=st.integers(0, 2**32 - 1))
def test_bytes_hold_codes_from_the_low_bits_up(library, bits, data, runs, seed):
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (data.draw(st.integers(0, 3)), 8 * runs), dtype=np.uint8)
    packed = pack(library.asarray(codes), bits)
    assert isinstance(packed, np.ndarray if library is np else jax.Array)
    assert (packed.shape, packed.dtype) == ((len(codes), bits * runs), np.uint8)
    assert [int.from_bytes(row.tobytes(), "little") for row in np.asarray(packed)] == stream_of(codes, bits)
    assert np.array_equal(unpack(packed, bits), codes)


@given(SPECS, st.integers(1, 19), st.integers(0, 2**32 - 1))
def test_words_hold_signed_codes_plus_half_from_the_low_bits_up(spec, outputs, seed):
    inputs = 8 * outputs
    codes = np.random.default_rng(seed).integers(0, spec.levels, (outputs, inputs), dtype=np.uint8)
    words = compressed_tensors.to_words(pack(codes, spec.bits))
    assert words.shape == (outputs, -(-inputs * spec.bits // 32))
    assert [int.from_bytes(row.tobytes(), "little") for row in words] == stream_of(codes, spec.bits)
    zeros = compressed_tensors.pack_zeros(codes, spec.bits)
    assert zeros.shape == (-(-outputs * spec.bits // 32), inputs)
    assert [int.from_bytes(column.tobytes(), "little") for column in zeros.T] == stream_of(codes.T, spec.bits)
    assert np.array_equal(compressed_tensors.unpack_zeros(zeros, spec.bits, outputs), codes)


def test_codes_that_fill_no_bytes_and_bits_that_nothing_packs_are_refused():
    with pytest.raises(ArtifactError, match=r"group_size = 4: 3-bit codes of a group must fill whole bytes"):
        QuantSpec(3, 4)
    with pytest.raises(ArtifactError, match=r"bits = 7: only 3, 4, 5, 6, 8 can be packed"):
        QuantSpec(7, 32)


def test_a_tensor_that_two_groups_of_the_config_fit_is_refused(tmp_path):
    model = llama(0, lambda name: None if "embed" in name else QuantSpec(4, 32))
    weights = dict(model.weights)
    name = "model.layers.0.self_attn.o_proj.weight"  # 3 and 4 bits of 8 inputs are a word each
    for bits, at in ((3, name), (4, name.replace("o_proj", "q_proj"))):
        weights[at] = draw(np.random.default_rng(0), (HIDDEN, 8), QuantSpec(bits, 8))
    FORMATS["compressed-tensors"].write(Checkpoint(model.config, weights), tmp_path)
    with pytest.raises(ArtifactError, match=r"^[^\n]*o_proj: [^\n]*fit several groups of the config[^\n]*$"):
        read(tmp_path)


@given(SPECS, st.integers(0, 2**32 - 1))
def test_packing_is_undone_and_numbers_are_as_defined(spec, seed):
    tensor = draw(np.random.default_rng(seed), (3, 128), spec)
    q = unpack(tensor.packed, spec.bits).astype(np.float64)
    z = spec.levels // 2 if spec.symmetric else np.repeat(tensor.zero, spec.group_size, axis=1).astype(np.float64)
    want = (q - z) * np.repeat(tensor.scale, spec.group_size, axis=1).astype(np.float64)
    np.testing.assert_array_equal(tensor.dequantize(), want.astype(np.float32))


def test_ignore_lists_exactly_the_linears_that_are_not_quantized(tmp_path):
    model = llama(0, lambda name: None if "embed" in name or "v_proj" in name else QuantSpec())
    FORMATS["compressed-tensors"].write(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head", "model.layers.0.self_attn.v_proj"]
    assert config["dtype"] == "bfloat16"


def test_an_embedding_stays_packed_only_when_asked(tmp_path):
    model = llama(0, lambda name: QuantSpec(8, 128) if "embed" in name else QuantSpec())
    name = "model.embed_tokens.weight"
    FORMATS["compressed-tensors"].write(model, tmp_path / "engines")
    FORMATS["compressed-tensors"].write(model, tmp_path / "ours", pack_embedding=True)
    assert same_bits(read(tmp_path / "ours").weights[name], model.weights[name])
    found = read(tmp_path / "engines").weights[name]
    assert np.array_equal(found, model.weights[name].dequantize(ml_dtypes.bfloat16))


def test_orbax_restores_without_this_package(tmp_path):
    model = llama(0, lambda name: None if "embed" in name else QuantSpec(4, 32, symmetric=False))
    FORMATS["orbax"].write(model, tmp_path, dtype="float32")
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore(tmp_path / "orbax")
    q = model.weights["model.layers.0.mlp.up_proj.weight"]
    got = tree["model.layers.0.mlp.up_proj.weight"]
    assert [np.array_equal(got[part], getattr(q, part)) for part in ("packed", "scale", "zero")] == [True] * 3
    assert np.array_equal(tree["model.norm.weight"], floats(model.weights["model.norm.weight"]))


def test_a_broken_orbax_checkpoint_is_one_line(tmp_path):
    model = llama(0, lambda name: None if "embed" in name else QuantSpec())
    FORMATS["orbax"].write(model, tmp_path)
    specs = json.loads((tmp_path / "quantization.json").read_text())
    specs["model.layers.0.mlp.up_proj.weight"]["group_size"] = 32
    del specs["model.layers.0.mlp.down_proj.weight"]
    (tmp_path / "quantization.json").write_text(json.dumps(specs))
    with pytest.raises(ArtifactError, match=r"^[^\n]*(down_proj[^\n]*up_proj|up_proj[^\n]*down_proj)[^\n]*$"):
        read(tmp_path)
    (tmp_path / "orbax" / "_METADATA").write_text("{")
    with pytest.raises(ArtifactError, match="Orbax cannot restore"):
        read(tmp_path)


def edit(folder, change) -> None:
    """Change `config.json` and the tensors of a quantized folder."""
    from safetensors.numpy import save_file

    from export.safetensors import read_tensors

    config = json.loads((folder / "config.json").read_text())
    tensors = {name: np.array(value) for name, value in read_tensors(folder).items()}
    change(config["quantization_config"], tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


LINEAR = "model.layers.0.mlp.up_proj"
DAMAGE = {
    "quant_method 'gptq'": lambda config, _: config.update(quant_method="gptq"),
    "format 'nvfp4-pack-quantized'": lambda config, _: config["config_groups"]["group_0"].update(
        format="nvfp4-pack-quantized"
    ),
    "quantized activations": lambda config, _: config["config_groups"]["group_0"].update(
        input_activations={"num_bits": 8}
    ),
    "float of 8 bits": lambda config, _: config["config_groups"]["group_0"]["weights"].update(type="float", num_bits=8),
    "int of 7 bits": lambda config, _: config["config_groups"]["group_0"]["weights"].update(num_bits=7),
    "actorder 'group'": lambda config, _: config["config_groups"]["group_0"]["weights"].update(actorder="group"),
    "config_groups": lambda config, _: config.update(config_groups={}),
    "transform_config": lambda config, _: config.update(transform_config={"r1": {}}),
    "sparse weights": lambda config, _: config.update(sparsity_config={"format": "sparse-24-bitmask"}),
    f"{LINEAR}.weight_g_idx": lambda _, tensors: tensors.update({f"{LINEAR}.weight_g_idx": np.zeros(HIDDEN, "i4")}),
    f"{LINEAR} lacks weight_scale, weight_shape": lambda _, tensors: [
        tensors.pop(f"{LINEAR}.{part}") for part in ("weight_scale", "weight_shape")
    ],
    "fit no group": lambda config, _: config["config_groups"]["group_0"]["weights"].update(group_size=32),
    "weight_packed must be int32": lambda _, tensors: tensors.update({f"{LINEAR}.weight_packed": np.zeros(3, "i4")}),
    "both plain and packed": lambda _, tensors: tensors.update({f"{LINEAR}.weight": np.zeros((2, 2), "f4")}),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_a_strange_or_damaged_quantized_folder_is_refused_by_name(message, tmp_path):
    model = llama(0, lambda name: None if "embed" in name else QuantSpec())
    FORMATS["compressed-tensors"].write(model, tmp_path)
    edit(tmp_path, DAMAGE[message])
    with pytest.raises(ArtifactError, match=re.escape(message)) as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)


def restate(**changes):
    """A change of what a folder of bitsandbytes says of a weight."""

    def change(_, tensors):
        name = f"{LINEAR}.weight.quant_state.bitsandbytes__nf4"
        state = json.loads(tensors[name].tobytes()) | changes
        tensors[name] = np.frombuffer(json.dumps(state).encode(), np.uint8)

    return change


def rename(old: str, new: str):
    return lambda _, tensors: tensors.update({f"{LINEAR}.weight{new}": tensors.pop(f"{LINEAR}.weight{old}")})


NF4_DAMAGE = {
    "8 bits is not read": lambda config, _: config.update(load_in_8bit=True),
    "of 4-bit types only nf4": rename(".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4"),
    "bnb_4bit_use_double_quant": lambda _, tensors: tensors.pop(f"{LINEAR}.weight.nested_absmax"),
    f"{LINEAR}.weight missing": lambda _, tensors: tensors.pop(f"{LINEAR}.weight"),
    "shape [256, 96]": restate(shape=[WIDE, 96]),
    "shape [1000000": restate(shape=[10**4000, 64 * 10**4000]),
    "['xxxx": restate(quant_type="x" * 9999),
    "shape [True, 128]": restate(shape=[True, HIDDEN]),
    "only nf4 in blocks of 64 and 256": restate(blocksize=128),
    "nested_offset nan": restate(nested_offset=float("nan")),
    "nested_offset 1e+39": restate(nested_offset=1e39),
    "uint8 (16384, 1) must be uint8 (32768, 1)": restate(shape=[2 * WIDE, HIDDEN]),
    "absmax: float32 (512,) must be uint8 (512,)": lambda _, tensors: tensors.update(
        {f"{LINEAR}.weight.absmax": np.ones(512, np.float32)}
    ),
    "quant_map: other levels": lambda _, tensors: tensors.update(
        {f"{LINEAR}.weight.quant_map": np.linspace(-1, 1, 16, dtype=np.float32)}
    ),
    "quant_state: not valid JSON": lambda _, tensors: tensors.update(
        {f"{LINEAR}.weight.quant_state.bitsandbytes__nf4": np.zeros(4, np.uint8)}
    ),
}


@pytest.mark.parametrize("message", NF4_DAMAGE)
def test_a_strange_or_damaged_folder_of_bitsandbytes_is_refused_by_name(message, tmp_path):
    FORMATS["bitsandbytes"].write(llama(0, linears_for("bitsandbytes")), tmp_path)
    edit(tmp_path, NF4_DAMAGE[message])
    with pytest.raises(ArtifactError, match=re.escape(message)) as caught:
        read(tmp_path)
    assert LINEAR in str(caught.value) or "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_linears_that_are_not_in_nf4_are_named_for_engines(tmp_path):
    model = llama(0, lambda name: None if "embed" in name or "v_proj" in name else "nf4")
    FORMATS["bitsandbytes"].write(model, tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert said["llm_int8_skip_modules"] == ["lm_head", "model.layers.0.self_attn.v_proj"]
    with pytest.raises(ArtifactError, match="no tensor is in NF4"):
        FORMATS["bitsandbytes"].write(llama(0, lambda name: None), tmp_path / "floats")


def test_all_missing_parts_are_reported_at_once(tmp_path):
    model = llama(0, lambda name: None if "embed" in name else QuantSpec(4, 32, symmetric=False))
    FORMATS["compressed-tensors"].write(model, tmp_path)
    gone = [f"{LINEAR}.weight_scale", "model.layers.0.self_attn.q_proj.weight_zero_point"]
    edit(tmp_path, lambda _, tensors: [tensors.pop(name) for name in gone])
    with pytest.raises(ArtifactError) as caught:
        read(tmp_path)
    assert all(" lacks ".join(name.rsplit(".", 1)) in str(caught.value) for name in gone)


def test_nothing_quantized_is_no_compressed_tensors(tmp_path):
    with pytest.raises(ArtifactError, match="no tensor is quantized"):
        FORMATS["compressed-tensors"].write(llama(0, lambda name: None), tmp_path)


def test_scales_of_another_dtype_than_the_rest_are_refused(tmp_path):
    model = llama(0, lambda name: None if "embed" in name else QuantSpec())
    with pytest.raises(ArtifactError, match="scales in bfloat16, the rest in float32"):
        FORMATS["compressed-tensors"].write(model, tmp_path, dtype="float32")


def test_one_scale_a_row_is_read_as_one_group(tmp_path):
    model = llama(0, lambda name: QuantSpec(8, HIDDEN) if "up_proj" in name else None)
    FORMATS["compressed-tensors"].write(model, tmp_path)
    change = {"strategy": "channel", "group_size": None}
    edit(tmp_path, lambda config, _: config["config_groups"]["group_0"]["weights"].update(change))
    assert same_bits(read(tmp_path).weights[f"{LINEAR}.weight"], model.weights[f"{LINEAR}.weight"])


def test_non_finite_numbers_are_refused_with_every_name(tmp_path):
    model = llama(0, lambda name: None)
    weights = {name: np.array(value) for name, value in model.weights.items()}
    weights["model.norm.weight"][3] = np.nan
    weights[f"{LINEAR}.weight"][:2, 5] = np.inf
    FORMATS["safetensors"].write(Checkpoint(CONFIG, weights), tmp_path)
    with pytest.raises(ArtifactError) as caught:
        check_finite(read(tmp_path))
    assert f"{LINEAR}.weight (2 of {WIDE * HIDDEN})" in str(caught.value)
    assert f"model.norm.weight (1 of {HIDDEN})" in str(caught.value)
