"""No silent fallback: every linear is accounted for, and bad input is named or refused, never rounded otherwise."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress import cli
from compress.errors import RecipeError
from compress.evaluate import coverage_of
from compress.models import read_config
from compress.models.decoder import linears, split_layers
from compress.models.folder import load
from compress.quantize.account import Rounded, account, output_error, read_quantization
from compress.quantize.calibrate import quantize_layer
from compress.quantize.layer import Layer
from compress.quantize.preflight import chosen, spec_of_layers
from compress.quantize.quantizers import QUANTIZERS
from eval.report import QuantizedRow, worst_first
from export.checkpoint import Checkpoint
from export.errors import ArtifactError
from export.quantized import PackedTensor, QuantSpec
from export.safetensors import write
from tests.tiny_run import CONFIG, rows, tokenizer_files, weights, write_jsonl, write_model

SMALL = CONFIG | {"num_hidden_layers": 2}
SPEC = QuantSpec(4, 32)
GRAMS = {
    "self_attn.k_proj|self_attn.q_proj|self_attn.v_proj": 64,
    "self_attn.o_proj": 64,
    "mlp.gate_proj|mlp.up_proj": 64,
    "mlp.down_proj": 96,
}
UP, DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("account")
    write_model(folder / "model", SMALL)
    write_jsonl(folder / "text.jsonl", [{"text": text} for text in rows(8, 1)])
    return folder


def quantize(world, out, *flags) -> int:
    words = ["quantize", "--model", str(world / "model"), "--out", str(out), "--sequence-length", "32", "--device"]
    return cli.main([*words, "cpu", "--group-size", "32", "--calibration", str(world / "text.jsonl"), *flags])


def layer(change=lambda name, gram: gram) -> Layer:
    """The model's first layer on inputs of its own, their Hessians as `change` leaves them."""
    rng, config = np.random.default_rng(0), read_config(SMALL)
    tensors = {name: jnp.asarray(value) for name, value in split_layers(config, weights(SMALL))[1][0].items()}
    grams = {}
    for name, size in GRAMS.items():
        x = rng.normal(size=(200, size)).astype(np.float32)
        grams[name] = jnp.asarray(change(name, x.T @ x / 200))
    specs = {name: SPEC for name, value in tensors.items() if value.ndim == 2}
    return Layer(config, "model.layers.0.", tensors, specs, grams, [], [], [], None, [])


def test_a_folder_tells_of_every_linear_and_of_what_was_not_as_asked(world, tmp_path, capsys):
    flags = ["--group-size", "64", "--fallback-group-size", "32", "--exclude", UP, "--json"]
    words = ["quantize", "--model", str(world / "model"), "--out", str(tmp_path / "out"), "--device", "cpu"]
    assert cli.main([*words, "--sequence-length", "32", "--calibration", str(world / "text.jsonl"), *flags]) == 0
    printed = json.loads(capsys.readouterr().out)
    found, model = read_quantization(tmp_path / "out"), load(tmp_path / "out")
    by_name = {row.name: row for row in found.tensors}
    sizes = linears(model.config)
    assert by_name.keys() == sizes.keys()
    assert by_name[DOWN].fallback == "groups of 32: 64 does not divide its 96 inputs"
    assert by_name[UP] == QuantizedRow(UP, "none", 96 * 64, 2 * 96 * 64, fallback="excluded: stays in floats")
    assert printed["not_as_asked"].keys() == {UP, DOWN, DOWN.replace("layers.1", "layers.0")}
    total = sum(np.prod(shape) for shape in sizes.values())
    assert found.coverage == printed["coverage"] == coverage_of(model) == pytest.approx(1 - 96 * 64 / total)
    original = weights(SMALL)
    for name, row in by_name.items():
        packed = model.weights[name]
        assert isinstance(packed, PackedTensor) is (name != UP)
        if name != UP:
            error = np.square(np.asarray(packed.dequantize(), np.float64) - original[name]).sum()
            assert row.sqnr_db == pytest.approx(-10 * np.log10(error / np.square(original[name]).sum()), abs=0.05)
            assert (row.method, row.bits, row.bytes) == ("gptq", 4, packed.nbytes)
            assert row.group_size == (32 if "down_proj" in name else 64)
            assert row.output_sqnr_db > 0


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_output_error_is_that_of_the_outputs(seed):
    rng = np.random.default_rng(seed)
    x, w, w_hat = (rng.normal(size=shape).astype(np.float32) for shape in ((50, 8), (5, 8), (5, 8)))
    found = output_error(jnp.asarray(w), jnp.asarray(w_hat), jnp.asarray(x.T @ x / 50))
    wanted, made = x @ w.T, x @ w_hat.T
    assert found.error == pytest.approx(float(np.square(wanted - made).sum() / 50), rel=1e-3)
    assert found.relative_mse == pytest.approx(
        float(np.square(wanted - made).sum() / np.square(wanted).sum()), rel=1e-3
    )


def test_more_damping_than_asked_is_told():
    def broken(name, gram):
        return gram - 0.9 * np.diag(gram).mean() * np.eye(len(gram), dtype=np.float32) * (name == "self_attn.o_proj")

    rounded = quantize_layer(layer(broken), QUANTIZERS["gptq"], damp=0.01)
    told = {row.name: row.fallback for row in account(rounded, "gptq", SPEC)}
    noted = {name for name, why in told.items() if why}
    assert noted == {"model.layers.0.self_attn.o_proj.weight"}
    assert "damping of 10: with 0.01 the Hessian has no Cholesky factor" in told[noted.pop()]


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_nan_in_a_hessian_is_refused_and_its_linears_are_named(method):
    def nan(name, gram):
        return np.where(np.eye(len(gram)) * (name == "mlp.down_proj"), np.nan, gram)

    with pytest.raises(ArtifactError, match=r"model\.layers\.0\.mlp\.down_proj: the calibration activations are NaN"):
        quantize_layer(layer(nan), QUANTIZERS[method])


def test_a_linear_that_a_method_leaves_unquantized_is_an_error():
    task = layer()
    with pytest.raises(ArtifactError, match=r"\.weight: rtn has left it unquantized"):
        account(Rounded(task, {}, {}), "rtn", SPEC)


@pytest.mark.parametrize("method", ["gptq", "awq", "hqq"])
def test_ten_tokens_zero_channels_and_constant_rows_give_finite_weights(method, world, tmp_path):
    tensors = {name: value.copy() for name, value in weights(SMALL).items()}
    tensors["model.layers.0.self_attn.q_proj.weight"][3] = 0.25
    tensors["model.layers.0.mlp.gate_proj.weight"][:, 5] = 0.0
    tensors["model.layers.0.mlp.up_proj.weight"][7] = 0.0
    tensors["model.layers.1.input_layernorm.weight"][2] = 0.0
    (tmp_path / "model").mkdir()
    write(Checkpoint(SMALL, tensors, tokenizer_files()), tmp_path / "model")
    flags = ["--calibration-tokens", "10", "--method", method, "--sequence-length", "10"]
    words = ["quantize", "--model", str(tmp_path / "model"), "--out", str(tmp_path / "o"), "--device", "cpu"]
    words += ["--group-size", "32", "--calibration", str(world / "text.jsonl")]
    assert cli.main([*words, *flags]) == 0
    found, model = read_quantization(tmp_path / "o"), load(tmp_path / "o")
    assert found.coverage == 1
    assert {row.method for row in found.tensors} == {method}
    for value in model.dequantized().weights.values():
        assert np.isfinite(value).all()


def test_what_cannot_be_is_refused_in_one_line(world, tmp_path, capsys):
    def refused(code: int, *said: str, flags=()) -> None:
        assert quantize(world, tmp_path / "out", *flags) == code
        shown = capsys.readouterr().err
        assert all(word in shown for word in said), shown
        assert not (tmp_path / "out").exists()

    refused(2, "no linear of the model matches 'mlp.*'", "model.layers.0.", flags=["--exclude", "mlp.*"])
    refused(2, "nothing is left to quantize", flags=["--exclude", "*"])
    write_jsonl(tmp_path / "nothing.jsonl", [{"text": ""}, {"text": ""}])
    nothing = ["--calibration", str(tmp_path / "nothing.jsonl")]
    words = ["quantize", "--model", str(world / "model"), "--out", str(tmp_path / "out"), "--group-size", "32"]
    assert cli.main([*words, *nothing, "--device", "cpu"]) == 4
    assert "nothing.jsonl" in capsys.readouterr().err
    assert quantize(world, tmp_path / "once", "--method", "rtn") == 0
    again = ["quantize", "--model", str(tmp_path / "once"), "--method", "rtn", "--group-size", "32", "--device", "cpu"]
    assert cli.main([*again, "--out", str(tmp_path / "twice"), "--requantize", "refuse"]) == 2
    assert "is quantized already" in capsys.readouterr().err
    assert not (tmp_path / "twice").exists()


def test_a_dimension_of_160_is_named_and_can_have_smaller_groups_or_stay_in_floats():
    config = read_config(SMALL | {"hidden_size": 128, "head_dim": 32, "intermediate_size": 160})
    with pytest.raises(RecipeError, match=r"128 does not divide.*down_proj.weight \(I = 160\).*--group-size 32 fits"):
        spec_of_layers(config, QuantSpec(4, 128), None)
    specs = spec_of_layers(config, QuantSpec(4, 128), 32)
    assert {spec.group_size for name, spec in specs.items() if "down_proj" in name} == {32}
    assert {spec.group_size for name, spec in specs.items() if "down_proj" not in name} == {128}
    left = spec_of_layers(config, QuantSpec(4, 128), None, exclude=["*.down_proj.weight"])
    assert left.keys() == chosen(config, ["*.down_proj.weight"]).keys() == {n for n in specs if "down_proj" not in n}


def test_the_worst_come_first():
    row = QuantizedRow("good", "gptq", 4, 2, 4, 32, error=1.0, sqnr_db=20.0, output_sqnr_db=30.0)
    bad = dataclasses.replace(row, name="bad", output_sqnr_db=None)
    exact = dataclasses.replace(row, name="exact", error=0.0, sqnr_db=None, output_sqnr_db=None)
    broken = dataclasses.replace(exact, name="broken", error=None)
    floats = QuantizedRow("floats", "none", 4, 8)
    assert [r.name for r in worst_first([exact, row, floats, bad, broken])] == ["broken", "bad", "good", "exact"]


def test_after_awq_the_error_of_the_report_is_that_of_the_weights_that_were_rounded(world, tmp_path, capsys):
    assert quantize(world, tmp_path / "out", "--method", "awq", "--rotate", "full", "--seed", "1") == 0
    capsys.readouterr()
    words = ["eval", "--model", str(tmp_path / "out"), "--baseline", str(world / "model"), "--device", "cpu"]
    words += ["--data", str(world / "text.jsonl"), "--window", "32", "--out", str(tmp_path / "report.json")]
    assert cli.main(words) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    found = {row["name"]: row["value"] for row in report["metrics"] if row["model"] == "candidate"}
    assert found["coverage"] == 1
    assert 0 < found["quantization_error"] < 0.02
    assert len(report["quantization"]) == len(linears(read_config(SMALL)))
