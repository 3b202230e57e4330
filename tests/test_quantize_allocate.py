"""Bits under a budget: the choice against all choices, and what is measured against the whole model run anew."""

import dataclasses
import itertools
import json
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress import cli
from compress.data.batch import Batch
from compress.errors import RecipeError
from compress.models import read_config
from compress.models.decoder import EMBEDDING, HEAD, hidden_states, linears, logits, shapes, stack
from compress.models.folder import Model, load
from compress.progress import Progress
from compress.quantize.allocate import Option, frontier, hull, least, total, under_budget, under_kl
from compress.quantize.budget import candidates, choose
from compress.quantize.calibrate import quantize_model
from compress.quantize.layer import JOIN
from compress.quantize.rtn import rtn
from compress.quantize.sensitivity import bytes_of, sensitivities
from compress.quantize.settings import Quantize
from export.gguf_blocks import block_type, encode
from export.quantized import QuantSpec
from tests.tiny_run import CONFIG as TINY
from tests.tiny_run import rows, write_jsonl, write_model

UNITS = st.dictionaries(
    st.sampled_from("abcd"),
    st.lists(
        st.builds(
            lambda bits, size, kl: Option(QuantSpec(bits, 32), size, kl / 64),
            st.sampled_from([3, 4, 5, 6, 8]),
            st.integers(1, 40),
            st.integers(0, 64),
        ),
        min_size=1,
        max_size=4,
    ),
    min_size=1,
)


def best(units, budget) -> float:
    """The least KL of all choices within the budget."""
    every = (dict(zip(units, options)) for options in itertools.product(*units.values()))
    return min((total(choice).kl for choice in every if total(choice).bytes <= budget), default=np.inf)


@settings(deadline=None)
@given(UNITS, st.integers(0, 160), st.integers(0, 40))
def test_a_choice_keeps_to_its_budget_and_more_bytes_never_give_more_kl(units, budget, more):
    small, large = under_budget(units, budget), under_budget(units, budget + more)
    if small is None:
        assert best(units, budget) == np.inf
        return
    assert total(small).bytes <= budget
    assert all(option in units[name] for name, option in small.items())
    assert best(units, budget) <= total(small).kl
    assert total(large).kl <= total(small).kl


@settings(deadline=None)
@given(UNITS)
def test_no_choice_of_the_bytes_of_a_point_of_the_frontier_has_less_kl(units):
    points = frontier(units)
    assert points[0].bytes == min(
        sum(sizes) for sizes in itertools.product(*([o.bytes for o in u] for u in units.values()))
    )
    assert points[-1].kl == sum(min(option.kl for option in options) for options in units.values())
    for point in points:
        assert point.kl == best(units, point.bytes) == total(under_budget(units, point.bytes)).kl


@settings(deadline=None)
@given(UNITS, st.floats(0, 3))
def test_under_a_limit_of_kl_the_frontiers_first_point_is_taken(units, limit):
    choice, points = under_kl(units, limit), [point for point in frontier(units) if point.kl <= limit]
    assert (None if choice is None else total(choice)) == next(iter(points), None)


def test_an_option_above_the_line_between_two_others_is_no_step():
    options = [Option(QuantSpec(bits, 32), size, kl) for bits, size, kl in [(4, 4, 8.0), (5, 5, 7.0), (8, 8, 0.0)]]
    assert [option.spec.bits for option in hull(options)] == [4, 8]
    assert least({"a": options})["a"].spec.bits == 4


CONFIG = read_config(TINY | {"num_hidden_layers": 2})
SPECS = [QuantSpec(4, 32), QuantSpec(8, 32)]


@cache
def drawn() -> dict[str, np.ndarray]:
    """Weights that give logits of a deviation near 1."""
    rng = np.random.default_rng(1)
    spread = {name: 1.5 / np.sqrt(shape[-1]) if len(shape) == 2 else 0.0 for name, shape in shapes(CONFIG).items()}
    made = {name: rng.normal(len(shape) == 1, spread[name], shape) for name, shape in shapes(CONFIG).items()}
    return {name: value.astype(np.float32) for name, value in made.items()}


def batches() -> list[Batch]:
    rng, segments = np.random.default_rng(0), np.ones((2, 12), np.int32)
    segments[1, 9:] = 0
    tokens = rng.integers(0, CONFIG.vocab_size, (2, 12)).astype(np.int32)
    positions = np.broadcast_to(np.arange(12, dtype=np.int32), (2, 12))
    return [Batch(tokens, segments, positions, (segments > 0).astype(np.float32))]


def log_probs(weights) -> np.ndarray:
    """Of all real tokens, by the whole model."""
    batch = batches()[0]
    stacked = stack(CONFIG, {name: jnp.asarray(value, jnp.float32) for name, value in weights.items()})
    hidden = hidden_states(CONFIG, stacked, batch.tokens, positions=batch.positions, segments=batch.segments)
    return np.asarray(jax.nn.log_softmax(logits(CONFIG, stacked, hidden)), np.float64)[batch.segments > 0]


@pytest.fixture(scope="module")
def measured():
    weights = drawn()
    outside = [name for name in (EMBEDDING, HEAD) if name in weights]
    return sensitivities(CONFIG, weights, batches(), SPECS, outside=outside, blocks=True)


def test_every_linear_is_in_one_unit_with_those_of_its_input(measured):
    units = [unit.split(JOIN) for unit in measured]
    names = [name for unit in units for name in unit]
    assert len(names) == len(set(names))
    assert set(names) == {*linears(CONFIG), *(name for name in (EMBEDDING, HEAD) if name in drawn())}
    kinds = {tuple(sorted(name.split(".")[-2] for name in unit)) for unit in units}
    assert {("k_proj", "q_proj", "v_proj"), ("gate_proj", "up_proj")} <= kinds


def test_a_units_kl_is_that_of_the_model_with_it_alone_quantized(measured):
    weights = drawn()
    p = log_probs(weights)
    first, *_, last = measured
    inner = next(unit for unit in measured if JOIN in unit)
    for unit in {first, inner, last}:
        for option, rel in zip(measured[unit], (0.02, 0.5), strict=True):  # of layers' units the second is scaled
            changed = {name: np.asarray(rtn(weights[name], option.spec).dequantize()) for name in unit.split(JOIN)}
            q = log_probs(weights | changed)
            assert option.kl == pytest.approx((np.exp(p) * (p - q)).sum(-1).mean(), rel=rel, abs=1e-6)


@pytest.mark.parametrize(
    "spec", [QuantSpec(4, 64), QuantSpec(5, 64, False), QuantSpec(8, 32), QuantSpec(3, 64, False)], ids=str
)
def test_counted_bytes_are_those_of_the_tensor_and_of_its_blocks(spec):
    tensor = jax.tree.map(np.asarray, rtn(np.random.default_rng(0).normal(size=(6, 128)).astype(np.float32), spec))
    assert bytes_of(tensor.shape, spec, blocks=False) == tensor.nbytes
    if spec.bits != 3:
        assert bytes_of(tensor.shape, spec, blocks=True) == encode("w", tensor, block_type("w", tensor, "F16")).nbytes


def model() -> Model:
    return Model({}, CONFIG, drawn(), {"tokenizer.json": b"x" * 1000})


def settings_of(**keys) -> Quantize:
    return Quantize(group_size=32, method="rtn", budget_format="gguf", **keys)


def test_a_budget_is_kept_and_what_it_chose_is_written_down():
    found = choose(model(), model().weights, batches(), settings_of(budget="5.5 bits"), Progress())
    record = json.loads(json.dumps(found.record))
    assert record["chosen"]["bits"] <= 5.5
    assert {spec.bits for spec in found.specs.values()} <= {4, 5, 8}
    assert record["specs"] == {name: dataclasses.asdict(spec) for name, spec in found.specs.items()}
    assert record["frontier"][0]["kl"] > record["chosen"]["kl"] > record["frontier"][-1]["kl"]
    size = record["frontier"][3]["bytes"] / 1e6
    under = choose(model(), model().weights, batches(), settings_of(budget=f"{size:.6f} MB"), Progress())
    assert under.record["chosen"] == record["frontier"][3]
    limit = record["frontier"][3]["kl"]
    assert choose(model(), model().weights, batches(), settings_of(max_kl=limit), Progress()).specs == under.specs
    packed = quantize_model(CONFIG, drawn(), [], SPECS[0], "rtn", specs=under.specs).weights
    assert {name: value.spec for name, value in packed.items() if hasattr(value, "spec")} == under.specs


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"budget": "1 MB", "allowed_bits": (8,)}, None),
        ({"budget": "4.4 bits"}, r"budget = 4.4 bits: the least that can be had is 4.50 bits"),
        ({"budget": "0.01 MB"}, r"budget = 0.01 MB: the least that can be had is 0.\d MB"),
        ({"max_kl": 1e-12}, r"max_kl = 1e-12: the least that can be had is"),
    ],
)
def test_what_cannot_be_had_says_what_can(keys, said):
    if said is None:
        assert {
            spec.bits
            for spec in choose(model(), model().weights, batches(), settings_of(**keys), Progress()).specs.values()
        } == {8}
        return
    with pytest.raises(RecipeError, match=said):
        choose(model(), model().weights, batches(), settings_of(**keys), Progress())


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"budget": "90 GB"}, "give megabytes, or bits a weight"),
        ({"budget": "0 MB"}, "give megabytes, or bits a weight"),
        ({"budget": "90 MB", "max_kl": 0.1}, "not both"),
        ({"budget": "90 MB", "embedding_bits": 8}, "leave nf4, embedding_bits"),
    ],
)
def test_budgets_that_are_none_are_refused(keys, said):
    with pytest.raises(RecipeError, match=said):
        Quantize(**keys)


def test_zero_points_are_a_choice_and_gguf_has_none_at_8_bits():
    found = candidates(settings_of(symmetric=False, max_kl=1.0, allowed_group_sizes=(32, 64)))
    assert {(spec.bits, spec.symmetric) for spec in found} == {(4, True), (4, False), (5, True), (5, False), (8, True)}
    assert {spec.group_size for spec in found} == {32, 64}


def test_a_command_under_a_budget_makes_a_file_of_at_most_the_bytes_that_it_counted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "teacher", TINY | {"num_hidden_layers": 2})
    write_jsonl(tmp_path / "text.jsonl", [{"text": text} for text in rows(20, 1)])
    flags = "--group-size 32 --method rtn --calibration text.jsonl --calibration-tokens 128 --sequence-length 32"
    chosen = "--asymmetric --allowed-bits 4 --allowed-bits 5 --allowed-bits 8 --budget-format gguf --budget"
    command = f"quantize --model teacher {flags} {chosen}".split()
    assert cli.main([*command, "5.6 bits", "--out", "small", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["chosen"]
    record = json.loads((tmp_path / "small/sensitivities.json").read_text())
    assert told == record["chosen"]
    assert cli.main("export --model small --format gguf --out gguf".split()) == 0
    size = (tmp_path / "gguf/model.gguf").stat().st_size
    assert record["chosen"]["bytes"] - record["bytes_beside"] < size <= record["chosen"]["bytes"]
    specs = {name: value.spec for name, value in load("small").weights.items() if hasattr(value, "spec")}
    assert {name: dataclasses.asdict(spec) for name, spec in specs.items()} == record["specs"]
    assert cli.main([*command, "1 bits", "--out", "none"]) == 2
    assert "budget = 1 bits: the least that can be had is 4.50 bits" in capsys.readouterr().err
    assert cli.main(["quantize", "--model", "teacher", "--budget", "1 MB", "--method", "rtn", "--out", "none"]) == 2
