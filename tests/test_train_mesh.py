"""Training on eight simulated devices is training on one; and where weights lie."""

import dataclasses
import math
import re
import shutil
from functools import cache, partial

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from compress.align.loss import preference_loss
from compress.distill.loss import distillation_loss
from compress.errors import RecipeError
from compress.models import decoder, read_config
from compress.models.decoder import Stacked
from compress.settings import MeshShape
from compress.train.checkpoints import Checkpoints
from compress.train.fit import fit
from compress.train.mesh import (
    AXES,
    batch_sharding,
    fit_spec,
    make_mesh,
    mesh_of_devices,
    place,
    place_rows,
    weight_shardings,
)
from compress.train.step import FitSettings, make_optimizer, make_step
from export.quantized import QuantizedTensor, QuantSpec
from tests import tiny_training as tiny
from tests.goldens.make_models import draw

PLAN = FitSettings(steps=3, learning_rate=1e-2, warmup_steps=1, global_batch=8)


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    with tiny.unoptimized():
        yield


def distil(mesh, plan=PLAN):
    loss = distillation_loss(tiny.STUDENT, tiny.TEACHER, chunk=32)
    return fit(loss, tiny.student(), tiny.teacher(), map(tiny.batch, range(3)), plan, mesh=mesh)


def dpo(mesh, plan=PLAN):
    base, adapters = tiny.base_and_adapters()
    loss = preference_loss(tiny.STUDENT, 2.0, beta=0.5, dropout=0.2)
    return fit(loss, adapters, base, map(tiny.pairs, range(3)), plan, mesh=mesh)


@cache
def on_one_device(train):
    return train(None)


def assert_same_trace(trace, expected):
    assert {name for row in expected.steps for name in row} >= {"loss", "gradient_norm", "count", "seconds"}
    for ours, theirs in zip(trace.steps, expected.steps, strict=True):
        for name in theirs.keys() - {"seconds"}:
            assert ours[name] == pytest.approx(theirs[name], rel=2e-4, abs=2e-5), name


def assert_same_run(train, mesh, plan=PLAN):
    weights, trace = train(mesh, plan)
    expected_weights, expected = on_one_device(train)
    assert_same_trace(trace, expected)
    # Adam divides by the gradient's size, so that a gradient near zero makes rounding visible: hence not tighter.
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-3, atol=2e-3), weights, expected_weights)


SHAPES = [(2, 4, 1), (2, 2, 2), (4, 1, 2), (8, 1, 1), (1, 8, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("train", [distil, dpo])
def test_training_on_a_mesh_has_the_loss_trace_of_one_device(train, shape):
    assert_same_run(train, make_mesh(*shape))


def test_dpo_in_parts_on_a_mesh_has_the_loss_trace_of_one_device():
    assert_same_run(dpo, make_mesh(1, 2, 4), dataclasses.replace(PLAN, per_device_batch=2))


def distil_from_three_heads(mesh, plan=PLAN):
    """The student's heads divide by `tensor`, the teacher's do not; nor does its vocabulary."""
    config = read_config(tiny.TEACHER_HF | {"num_attention_heads": 3, "num_key_value_heads": 3, "vocab_size": 99})
    teacher = decoder.stack(config, draw(decoder.shapes(config), 4))
    loss = distillation_loss(tiny.STUDENT, config, chunk=32)
    return fit(loss, tiny.student(), teacher, map(tiny.batch, range(3)), plan, mesh=mesh)


def test_a_teacher_that_divides_otherwise_than_its_student_teaches_the_same():
    assert_same_run(distil_from_three_heads, make_mesh(2, 1, 4))


def test_weights_are_gathered_and_logits_are_not():
    mesh = make_mesh(fsdp=8)
    step, optimizer = make_step(distillation_loss(tiny.STUDENT, tiny.TEACHER, chunk=32), PLAN, mesh)
    weights, frozen = place(mesh, tiny.student()), place(mesh, tiny.teacher())
    state = optimizer.init(weights)
    state = jax.device_put(state, weight_shardings(mesh, state))
    batch = place_rows(mesh, tiny.batch(0))
    text = step.lower(weights, state, frozen, batch, np.int32(1), np.float32(1)).compile().as_text()
    shapes = [tuple(map(int, found.split(","))) for found in re.findall(r"\w+\[([\d,]+)\]\S* all-gather\(", text)]
    for config in (tiny.STUDENT, tiny.TEACHER):
        beside = {math.prod(shape) // config.vocab_size for shape in shapes if config.vocab_size in shape}
        assert beside == {config.hidden_size}


class Samples:
    """Batches that know where they are, and which of them were handed out."""

    def __init__(self):
        self.number, self.handed = 0, []

    def __iter__(self):
        return self

    def __next__(self):
        self.handed.append(self.number)
        self.number += 1
        return tiny.batch(self.handed[-1])

    def state(self):
        return {"number": self.number}

    def restore(self, state):
        self.number = state["number"]


def distil_on(mesh, folder, samples, on_step=lambda step, row: None):
    plan = dataclasses.replace(PLAN, save_every=1)
    loss = distillation_loss(tiny.STUDENT, tiny.TEACHER, chunk=32)
    checkpoints = Checkpoints(folder, {})
    try:
        args = loss, tiny.student(), tiny.teacher(), samples, plan
        return fit(*args, mesh=mesh, on_step=on_step, checkpoints=checkpoints)
    finally:
        checkpoints.close()


def test_a_run_goes_on_where_it_was_on_another_mesh_and_on_one_device(tmp_path):
    def kill(step, row):
        if step == 2:
            raise KeyboardInterrupt

    first = Samples()
    with pytest.raises(KeyboardInterrupt):
        distil_on(make_mesh(8, 1, 1), tmp_path / "eight", first, kill)
    shutil.copytree(tmp_path / "eight", tmp_path / "one")
    expected_weights, expected = distil_on(None, tmp_path / "whole", Samples())
    for folder, mesh in (("eight", make_mesh(2, 4, 1)), ("one", None)):
        samples = Samples()
        weights, trace = distil_on(mesh, tmp_path / folder, samples)
        assert samples.handed == [1, 2]
        assert_same_trace(trace, expected)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-3, atol=2e-3), weights, expected_weights)


def test_trained_weights_and_the_optimizer_s_state_lie_on_the_mesh():
    mesh = make_mesh(2, 2, 2)
    weights = place(mesh, tiny.student())
    state = make_optimizer(PLAN).init(weights)
    placed = jax.device_put(state, weight_shardings(mesh, state))
    found = {
        str(leaf.sharding.spec)
        for path, leaf in jax.tree_util.tree_leaves_with_path(placed)
        if "q_proj.weight" in jax.tree_util.keystr(path)
    }
    assert found == {str(P(None, "tensor", "fsdp"))}


NAMES = {
    "self_attn.q_proj.weight": P(None, "tensor", "fsdp"),
    "mlp.gate_proj.weight": P(None, "tensor", "fsdp"),
    "self_attn.o_proj.weight": P(None, "fsdp", "tensor"),
    "mlp.down_proj.weight": P(None, "fsdp", "tensor"),
    "self_attn.q_proj.lora_A": P(None, None, "fsdp"),
    "self_attn.q_proj.lora_B": P(None, "tensor", "fsdp"),
    "mlp.down_proj.lora_A": P(None, "fsdp", "tensor"),
    "mlp.down_proj.lora_B": P(None, "fsdp", None),
}


def test_weights_are_placed_by_their_names():
    mesh = make_mesh(2, 2, 2)
    layer = {name: np.zeros((3, 8, 8), np.float32) for name in NAMES}
    layer |= {"input_layernorm.weight": np.zeros((4, 8), np.float32), "self_attn.q_proj.bias": np.zeros((4, 8))}
    rest = {"model.embed_tokens.weight": np.zeros((8, 8), np.float32), "model.norm.weight": np.zeros(8, np.float32)}
    found = weight_shardings(mesh, Stacked(rest, [layer]))
    assert {name: found.layers[0][name].spec for name in NAMES} == NAMES
    assert found.rest["model.embed_tokens.weight"].spec == P("tensor", "fsdp")
    for leaf in ("input_layernorm.weight", "self_attn.q_proj.bias"):
        assert found.layers[0][leaf].is_fully_replicated
    assert found.rest["model.norm.weight"].is_fully_replicated


def test_a_quantized_weight_lies_as_its_dense_one_and_drops_what_does_not_divide():
    mesh = make_mesh(1, 4, 2)
    packed = QuantizedTensor(
        np.zeros((3, 8, 16), np.uint8), np.zeros((3, 8, 2), np.float32), np.zeros((3, 8, 2), np.uint8), QuantSpec(4, 16)
    )
    layer = {"self_attn.q_proj.weight": packed, "self_attn.o_proj.weight": packed}
    found = weight_shardings(mesh, Stacked({}, [layer])).layers[0]
    q, o = found["self_attn.q_proj.weight"], found["self_attn.o_proj.weight"]
    assert q.packed.spec == P(None, "tensor", "fsdp")
    assert q.scale.spec == q.zero.spec == P(None, "tensor", None)  # 2 groups on 4 devices
    assert o.packed.spec == o.scale.spec == o.zero.spec == P(None, "fsdp", "tensor")


def test_placing_a_model_changes_where_it_lies_and_nothing_else():
    mesh = make_mesh(1, 4, 2)
    base, _ = tiny.base_and_adapters()
    placed = place(mesh, base)
    jax.tree.map(np.testing.assert_array_equal, placed, base)
    q = placed.layers[0]["self_attn.q_proj.weight"]
    assert not q.packed.is_fully_replicated
    assert {shard.data.shape for shard in q.packed.addressable_shards} == {(2, 16, 4)}


@given(
    shape=st.lists(st.integers(1, 12), min_size=2, max_size=3),
    spec=st.tuples(*[st.sampled_from([None, *AXES])] * 2).filter(lambda s: s[0] is None or s[0] != s[1]),
)
def test_an_axis_that_does_not_divide_is_dropped(shape, spec):
    mesh = make_mesh(1, 2, 4)
    found = fit_spec(mesh, spec, tuple(shape))
    for length, axis, wanted in zip(reversed(shape), reversed(found), reversed(spec)):
        divides = wanted is not None and length % mesh.shape[wanted] == 0
        assert axis == (wanted if divides else None)
    assert len(found) == len(shape)


def test_rows_lie_over_data_and_fsdp():
    mesh = make_mesh(2, 2, 2)
    placed = jax.device_put(tiny.batch(0), batch_sharding(mesh))
    assert {shard.data.shape for shard in placed.tokens.addressable_shards} == {(2, tiny.LENGTH)}
    assert batch_sharding(mesh, rows_axis=1).spec == P(None, ("data", "fsdp"))


def test_data_takes_the_devices_that_are_left():
    assert make_mesh(fsdp=2).shape == {"data": 4, "fsdp": 2, "tensor": 1}


@pytest.mark.parametrize(
    "shape", [(3, 1, 1), (None, 3, 1), (None, 16, 1), (None, 0, 1), (-2, -4, 1), (4, 4, 1)], ids=str
)
def test_a_mesh_that_does_not_fit_the_devices_is_refused(shape):
    with pytest.raises(RecipeError, match=r"does not fit 8 devices"):
        make_mesh(*shape)


def test_settings_name_a_mesh_and_what_is_left_is_data():
    assert mesh_of_devices(MeshShape(fsdp=4)).shape == {"data": 2, "fsdp": 4, "tensor": 1}
    with pytest.raises(RecipeError, match=r"mesh 1 x 2 x 1 .* does not fit 8 devices"):
        mesh_of_devices(MeshShape(data=1, fsdp=2))


def test_a_batch_that_does_not_divide_over_the_mesh_is_refused():
    with pytest.raises(RecipeError, match="global_batch = 8 is not a multiple of per_device_batch x devices = 24"):
        distil(make_mesh(2, 4, 1), dataclasses.replace(PLAN, per_device_batch=3))
