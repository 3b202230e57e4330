"""What of a student trains: its rounded weights and adapters on its packed base, against their definitions; and that
what is written is what was validated.
"""

import dataclasses
import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress import cli
from compress.data.batches import Batches
from compress.data.split import training_and_held_out
from compress.distill import stage
from compress.distill.form import adapted, joined, parts_of, round_linears, rounded
from compress.distill.loss import distillation_loss, loss_of
from compress.distill.settings import Distill
from compress.distill.student import initial_student, student_architecture
from compress.errors import RecipeError
from compress.models import decoder, read_config
from compress.models.folder import Model, load, save
from compress.models.lora import merge_adapters, with_landing
from compress.progress import Progress
from compress.quantize.base import packed_base
from compress.quantize.rtn import fake_quantize, rtn
from compress.settings import Common
from compress.train.course import held_out, validator
from export.quantized import QuantSpec
from tests import tiny_training as tiny
from tests.tiny_models import draw
from tests.tiny_run import rows, write_jsonl, write_model


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    with tiny.unoptimized():
        yield


SPECS = {str(spec): spec for spec in (QuantSpec(4, 16), QuantSpec(8, 16, symmetric=False))}
LOSS = distillation_loss(tiny.STUDENT, tiny.TEACHER, temperature=2.0, alpha=0.9, chunk=16)
STEP = jax.jit(jax.value_and_grad(lambda trainable, frozen, batch: LOSS(trainable, frozen, batch, None)[0]))


ROUNDED = jax.jit(round_linears, static_argnums=1)


def on_grid(w, spec):
    """In NumPy: each weight as the nearest code of its group's grid, whose scale and zero point are rtn's."""
    made = rtn(w, spec)
    repeat = lambda x: np.repeat(np.asarray(x, np.float64), spec.group_size, axis=-1)  # noqa: E731
    scale = repeat(made.scale)
    zero = spec.levels // 2 if made.zero is None else repeat(made.zero)
    codes = np.clip(np.round(np.float64(w) / scale) + zero, 0, spec.levels - 1)
    return np.float32((codes - zero) * scale)


def rounded_student(spec):
    linears = decoder.linears(tiny.STUDENT)
    weights = tiny.student_weights()
    return decoder.stack(tiny.STUDENT, {n: on_grid(w, spec) if n in linears else w for n, w in weights.items()})


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_rounded_loss_is_that_of_weights_on_the_grid_and_its_gradient_too(spec):
    """Straight through: the gradient of a weight is the one at its rounded value."""
    batch = tiny.batch(3, rows=4)
    step = jax.jit(jax.value_and_grad(lambda t, f, b: rounded(LOSS, spec)(t, f, b, None)[0]))
    found, slope = step(tiny.student(), tiny.teacher(), batch)
    wanted, straight = STEP(rounded_student(spec), tiny.teacher(), batch)
    ours, theirs = (
        np.float64(tiny.logits_of(config, stacked, batch))[:, :-1, : tiny.VOCAB]
        for config, stacked in ((tiny.STUDENT, rounded_student(spec)), (tiny.TEACHER, tiny.teacher()))
    )
    p, q = (tiny.numpy_log_softmax(x / 2) for x in (theirs, ours))
    nll = -np.take_along_axis(tiny.numpy_log_softmax(ours), batch.tokens[:, 1:, None], -1)[..., 0]
    definition = ((0.9 * 4 * (np.exp(p) * (p - q)).sum(-1) + 0.1 * nll) * batch.mask[:, 1:]).sum()
    assert found == pytest.approx(definition, rel=1e-3)
    assert found == pytest.approx(float(wanted), rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), slope, straight)


@settings(max_examples=10, deadline=None)
@given(st.sampled_from([*SPECS.values()]), st.integers(0, 2**16))
def test_every_linear_is_rounded_and_nothing_else_and_what_is_rounded_stays(spec, seed):
    weights = draw(decoder.shapes(tiny.STUDENT), seed)
    once = ROUNDED(decoder.stack(tiny.STUDENT, weights), spec)
    linears = decoder.linears(tiny.STUDENT)
    for name, value in decoder.unstack(tiny.STUDENT, once).items():
        wanted = on_grid(weights[name], spec) if name in linears else weights[name]
        np.testing.assert_allclose(value, wanted, rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, ROUNDED(once, spec), once)


@pytest.mark.parametrize("landing", [False, True])
def test_the_loss_of_adapters_is_that_of_the_merged_weights_and_the_base_has_no_gradient(landing):
    base, adapters = tiny.base_and_adapters(seed=5)
    batch = tiny.batch(4, rows=4)
    merged = merge_adapters(tiny.packed_weights(), decoder.unstack(tiny.STUDENT, adapters), 0.5)
    if landing:
        base = with_landing(base, fake_quantize)
        merged |= {name: on_grid(merged[name], tiny.SPEC) for name in decoder.linears(tiny.STUDENT)}
    loss = adapted(distillation_loss(tiny.STUDENT, tiny.TEACHER, chunk=16, dtype=None), 0.5)
    step = jax.jit(jax.value_and_grad(lambda t, f, b: loss(t, f, b, None)[0]))
    found, slope = step(adapters, (base, tiny.teacher()), batch)
    wanted, straight = STEP(decoder.stack(tiny.STUDENT, merged), tiny.teacher(), batch)
    assert found == pytest.approx(float(wanted), rel=1e-4)
    for ours, theirs, pair in zip(slope.layers, straight.layers, adapters.layers, strict=True):
        for name in (name for name in theirs if f"{name.removesuffix('weight')}lora_A" in ours):
            a, b = (np.asarray(pair[f"{name.removesuffix('weight')}lora_{half}"]) for half in "AB")
            whole = np.asarray(theirs[name])
            expected = {"A": 0.5 * np.swapaxes(b, 1, 2) @ whole, "B": 0.5 * whole @ np.swapaxes(a, 1, 2)}
            for half, value in expected.items():
                got = ours[f"{name.removesuffix('weight')}lora_{half}"]
                np.testing.assert_allclose(got, value, rtol=1e-2, atol=1e-3 * np.abs(value).max())


# The stage.

FORMS = {
    "rounded": {"landing": "fake_quantize"},
    "asymmetric": {"landing": "fake_quantize", "symmetric": False},
    "adapters": {"rank": 4, "lora_alpha": 8.0},
    "rounded adapters": {"rank": 4, "lora_alpha": 8.0, "scaling": "rslora", "landing": "fake_quantize"},
}
forms = pytest.mark.parametrize("form", FORMS)
COMMON = Common(progress=Progress(quiet=True))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A teacher, a packed student, and text."""
    folder = tmp_path_factory.mktemp("form")
    write_model(folder / "teacher")
    teacher = load(folder / "teacher")
    plain = Distill(teacher=str(folder / "teacher"), data=())
    save(packed_base(initial_student(plain, COMMON, teacher), QuantSpec(4, 32)), folder / "packed")
    write_jsonl(folder / "train.jsonl", [{"text": text} for text in rows(80, 1)])
    write_jsonl(folder / "valid.jsonl", [{"text": text} for text in rows(12, 2)])
    return folder


def given_to(world: Path, form: dict) -> Distill:
    return Distill(
        teacher=str(world / "teacher"),
        student=str(world / "packed") if "rank" in form else "half",
        data=(world / "train.jsonl",),
        valid=(world / "valid.jsonl",),
        **form,
        group_size=32,
        sequence_length=32,
        global_batch=8,
        steps=8,
        learning_rate=3e-3,
        warmup=2,
        valid_every=4,
        save_every=3,
    )


@pytest.fixture(scope="module")
def trained(world):
    """Each form, on all eight devices: its settings, the model and the trace."""
    found = {}
    for name, form in FORMS.items():
        asked = given_to(world, form)
        teacher = load(asked.teacher)
        texts = training_and_held_out(asked.data, asked.valid)
        found[name] = asked, *stage.distill(teacher, initial_student(asked, COMMON, teacher), *texts, asked, COMMON)
    return found


@pytest.fixture(scope="module")
def held_out_loss(world):
    """The held-out loss of a model of floats, by the loss of a student that is nothing else."""
    asked, teacher = given_to(world, {}), load(world / "teacher")
    config = student_architecture("half", teacher.config)
    _, valid = training_and_held_out(asked.data, asked.valid)
    shape = {"size": asked.global_batch, "length": asked.sequence_length}
    checks = held_out(partial(Batches, valid, teacher.tokenizer, **shape), asked)
    loss = loss_of(asked, config, teacher.config, jnp.float32)
    validate = validator(loss, decoder.stack(teacher.config, teacher.weights), checks, None)
    return lambda model: validate(decoder.stack(config, model.dequantized().weights))["loss"]


@forms
def test_what_is_written_is_what_was_validated(trained, held_out_loss, form, tmp_path, capsys):
    asked, model, trace, _ = trained[form]
    assert trace.best["loss"] < trace.validations[0]["loss"]
    save(model, tmp_path / "student")
    written = load(tmp_path / "student")
    if asked.rank and asked.landing != "none":
        # It is what quantize makes of it.
        line = f"quantize --model {tmp_path}/student --method rtn --group-size 32 --device cpu --out {tmp_path}/landed"
        assert cli.main(line.split()) == 0
        landed = load(tmp_path / "landed")
    else:
        landed = written.merged()
    # All but the linears is rounded to bfloat16 as it is written, by at most 2^-9.
    linears = decoder.linears(model.config)
    exact = landed.weights | {name: value for name, value in model.weights.items() if name not in linears}
    assert held_out_loss(dataclasses.replace(landed, weights=exact)) == pytest.approx(trace.best["loss"], rel=1e-4)
    assert held_out_loss(landed) == pytest.approx(trace.best["loss"], rel=1e-2)


@forms
def test_a_rounded_student_is_packed_and_a_base_stays_as_it_was(world, trained, form):
    asked, model, _, _ = trained[form]
    specs = {model.weights[name].spec for name in decoder.linears(model.config)}
    assert specs == {QuantSpec(4, 32, symmetric=asked.symmetric)}
    assert (model.adapters is not None) is (asked.rank is not None)
    if model.adapters is not None:
        base = load(world / "packed")
        jax.tree.map(np.testing.assert_array_equal, model.weights, base.weights)
        assert model.adapters.scale == (8.0 / 4 if asked.scaling == "lora" else 8.0 / 2)
        assert all(np.abs(value).max() > 0 for value in model.adapters.weights.values())


def test_a_float_student_is_rounded_before_its_adapters_train(world):
    asked = dataclasses.replace(given_to(world, {"rank": 2, "bits": 8}), student="half")
    student = initial_student(asked, COMMON, load(asked.teacher))
    base, adapters, frozen = parts_of(student, asked, COMMON)
    assert {base.weights[name].spec for name in decoder.linears(base.config)} == {QuantSpec(8, 32)}
    assert frozen is not None
    again = joined(base, adapters, asked)
    assert again.adapters is not None
    jax.tree.map(np.testing.assert_array_equal, again.merged().dequantized().weights, base.dequantized().weights)


def test_a_student_in_nf4_does_not_land_on_integers(world):
    asked = given_to(world, {"rank": 2, "landing": "fake_quantize"})
    hf = tiny.STUDENT_HF | {"hidden_size": 64, "intermediate_size": 64}
    config = read_config(hf)
    student = packed_base(Model(hf, config, draw(decoder.shapes(config), 0), {}), QuantSpec(), "nf4")
    with pytest.raises(RecipeError, match=r"rounds to integers.*NF4"):
        parts_of(student, asked, COMMON)
    assert parts_of(student, dataclasses.replace(asked, landing="none"), COMMON)[0] is student


def run(asked: Distill, out: Path, **options) -> dict:
    return stage.run(asked, dataclasses.replace(COMMON, out=out, **options))


@pytest.mark.parametrize("form", ["rounded", "adapters"])
def test_a_training_that_is_killed_ends_as_one_that_was_not(world, tmp_path, monkeypatch, form):
    monkeypatch.setattr(stage, "mesh_of_devices", lambda shape: None)
    asked = given_to(world, FORMS[form])
    run(asked, tmp_path / "whole")
    told = []

    def killed(name, done, total, **figures):
        told.append(done)
        if told == list(range(1, 8)):
            raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "listener", staticmethod(killed))
    with pytest.raises(KeyboardInterrupt):
        run(asked, tmp_path / "killed")
    other = dataclasses.replace(asked, **({"rank": 8} if asked.rank else {"bits": 8}))
    with pytest.raises(RecipeError, match=r"checkpoints of a run with another (rank|bits); --force"):
        run(other, tmp_path / "killed")
    run(asked, tmp_path / "killed")
    assert told[7:] == [7, 8]
    for path in (tmp_path / "whole").glob("*.safetensors"):
        assert (tmp_path / "killed" / path.name).read_bytes() == path.read_bytes()


def test_a_packed_student_trains_as_floats_where_nothing_is_said(world, tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "mesh_of_devices", lambda shape: None)
    run(dataclasses.replace(given_to(world, {}), student=str(world / "packed"), steps=1), tmp_path / "out")
    assert not load(tmp_path / "out").is_quantized


def test_adapters_learn_from_a_cache_and_copy_layers(world, tmp_path, monkeypatch, capsys):
    for module in ("stage", "cache_stage"):
        monkeypatch.setattr(f"compress.distill.{module}.mesh_of_devices", lambda shape: None)
    flags = f"--teacher {world}/teacher --data {world}/train.jsonl --sequence-length 32 --device cpu"
    train = f"{flags} --student {world}/packed --rank 4 --steps 2 --global-batch 4 --warmup 1"
    assert cli.main(f"cache-teacher {flags} --top-k 0 --out {tmp_path}/cache".split()) == 0
    assert cli.main(f"distill {train} --teacher-cache {tmp_path}/cache --out {tmp_path}/cached".split()) == 0
    assert cli.main(f"distill {train} --out {tmp_path}/online".split()) == 0
    one, two = (json.loads((tmp_path / name / "training.json").read_text()) for name in ("cached", "online"))
    steps = [[row["divergence"] for row in found["steps"]] for found in (one, two)]
    assert steps[0] == pytest.approx(steps[1], rel=2e-3)
    assert cli.main(f"distill {train} --hidden 1 --attention 1 --out {tmp_path}/layers".split()) == 0
    (first, *_) = json.loads((tmp_path / "layers/training.json").read_text())["steps"]
    assert {"hidden", "attention"} <= first.keys()
    assert all(name.endswith((".lora_A", ".lora_B")) for name in load(tmp_path / "layers").adapters.weights)


@pytest.mark.parametrize("keep", ["merge", "keep"])
def test_the_adapted_student_is_exported_as_an_aligned_model_is(trained, tmp_path, capsys, keep):
    save(trained["adapters"][1], tmp_path / "student")
    kind = "compressed-tensors" if keep == "keep" else "safetensors"
    line = f"export --model {tmp_path}/student --format {kind} --adapters {keep} --device cpu --out {tmp_path}/out"
    assert cli.main(line.split()) == 0
    assert (load(tmp_path / "out").adapters is None) is (keep == "merge")


def test_what_cannot_be_rounded_as_asked_is_refused_before_anything_is_read(world, tmp_path):
    with pytest.raises(RecipeError, match=r'bits = 8: nothing is rounded; set landing = "fake_quantize", or a rank'):
        given_to(world, {"bits": 8})
    wide = dataclasses.replace(given_to(world, FORMS["rounded"]), group_size=64)
    with pytest.raises(RecipeError, match=r"group_size = 64 does not divide .*mlp.down_proj.*--group-size 32 fits"):
        run(wide, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
