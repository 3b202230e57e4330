"""Adapters beside a weight do what their product inside it does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compress.models import decoder
from compress.models.folder import load
from compress.models.linear import Dropout, Linear, bind
from compress.models.lora import init_adapters, is_adapter, magnitudes, merge_adapters, with_adapters, with_landing
from compress.quantize.rtn import fake_quantize, rtn
from export import peft
from export.errors import ArtifactError
from tests import tiny_run
from tests import tiny_training as tiny

SCALE = 2.0
BASES = {"dense": tiny.student_weights, "4-bit": tiny.packed_weights}


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    with tiny.unoptimized():
        yield


def random_adapters(seed=0, targets=".*"):
    rng = np.random.default_rng(seed)
    drawn = init_adapters(tiny.STUDENT, jax.random.key(0), tiny.RANK, targets=targets)
    return {name: rng.normal(0, 0.1, value.shape).astype(np.float32) for name, value in drawn.items()}


def with_magnitudes(adapters):
    """The same with rows of random lengths (DoRA)."""
    rng = np.random.default_rng(3)
    lengths = {
        f"{name.removesuffix('lora_B')}lora_magnitude_vector": rng.uniform(0.5, 2, len(value)).astype(np.float32)
        for name, value in adapters.items()
        if name.endswith("lora_B")
    }
    return adapters | lengths


def adapted(weights, adapters, **options):
    parts = decoder.partition(decoder.stack(tiny.STUDENT, weights | adapters), is_adapter)
    return with_adapters(parts[1], parts[0], SCALE, **options)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("targets", [".*", r"[qv]_proj", r"layers\.1\."])
@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
def test_merging_equals_running_with_adapters(base, targets, dora):
    adapters, batch = random_adapters(targets=targets), tiny.batch(0)
    adapters = with_magnitudes(adapters) if dora else adapters
    beside = tiny.logits_of(tiny.STUDENT, adapted(base(), adapters), batch)
    inside = decoder.stack(tiny.STUDENT, merge_adapters(base(), adapters, SCALE))
    np.testing.assert_allclose(beside, tiny.logits_of(tiny.STUDENT, inside, batch), rtol=1e-3, atol=2e-4)
    without = tiny.logits_of(tiny.STUDENT, decoder.stack(tiny.STUDENT, base()), batch)
    assert np.abs(beside - without).max() > 0.1


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
def test_a_merged_weight_is_w_plus_scale_b_a(base):
    adapters = random_adapters(targets="q_proj")
    merged = merge_adapters(base(), adapters, SCALE)
    changed = {name for name in merged if merged[name] is not base()[name]}
    assert changed == {f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)}
    for name in changed:
        linear, weight = name.removesuffix(".weight"), base()[name]
        dense = weight if isinstance(weight, np.ndarray) else np.asarray(weight.dequantize())
        delta = adapters[f"{linear}.lora_B"].astype(np.float64) @ adapters[f"{linear}.lora_A"]
        np.testing.assert_allclose(merged[name], dense + SCALE * delta, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
def test_rows_of_a_merged_weight_are_as_long_as_their_magnitudes(base):
    plain, adapters = random_adapters(targets="q_proj"), with_magnitudes(random_adapters(targets="q_proj"))
    merged, whole = merge_adapters(base(), adapters, SCALE), merge_adapters(base(), plain, SCALE)
    for name in adapters.keys() - plain.keys():
        weight = name.replace("lora_magnitude_vector", "weight")
        w = whole[weight].astype(np.float64)
        wanted = adapters[name][:, None] * w / np.sqrt(np.square(w).sum(1, keepdims=True))
        np.testing.assert_allclose(merged[weight], wanted, rtol=1e-5, atol=1e-6)
    adapters[name] = np.ones(3, np.float32)
    with pytest.raises(ArtifactError, match=r"q_proj: a magnitude \(3,\) on 32 outputs"):
        merge_adapters(base(), adapters, SCALE)


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
def test_lengths_as_they_are_change_nothing(base):
    adapters = init_adapters(tiny.STUDENT, jax.random.key(0), tiny.RANK)
    fresh = adapters | magnitudes(base(), adapters)
    assert len(fresh) == len(adapters) * 3 // 2
    plain = tiny.logits_of(tiny.STUDENT, decoder.stack(tiny.STUDENT, base()), tiny.batch(0))
    beside = tiny.logits_of(tiny.STUDENT, adapted(base(), fresh), tiny.batch(0))
    np.testing.assert_allclose(beside, plain, rtol=1e-4, atol=1e-5)


def test_no_gradient_goes_through_the_norm_of_a_row():
    rng = np.random.default_rng(0)
    w, a, b, x = (rng.normal(size=shape).astype(np.float32) for shape in [(5, 6), (2, 6), (5, 2), (3, 4, 6)])
    m = rng.uniform(0.5, 2, 5).astype(np.float32)
    upstream = rng.normal(size=(3, 4, 5)).astype(np.float32)

    def run(a, b, m):
        names = {"weight": jnp.asarray(w), "lora_A": a, "lora_B": b, "lora_magnitude_vector": m}
        return bind(Linear(6, 5), names)(jnp.asarray(x))

    y, pull = jax.vjp(run, *map(jnp.asarray, (a, b, m)))
    whole = w + b.astype(np.float64) @ a
    norms = np.sqrt(np.square(whole).sum(1))
    np.testing.assert_allclose(y, x @ (m[:, None] * whole / norms[:, None]).T, rtol=1e-4, atol=1e-5)
    g = np.einsum("bto,bti->oi", upstream, x, dtype=np.float64)
    of_v = g * (m / norms)[:, None]
    wanted = (b.T @ of_v, of_v @ a.T, (g * whole).sum(1) / norms)
    for found, want in zip(pull(jnp.asarray(upstream)), wanted, strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
def test_fresh_adapters_change_nothing(base):
    adapters = init_adapters(tiny.STUDENT, jax.random.key(0), tiny.RANK)
    keys = jax.random.split(jax.random.key(1), 8)
    plain = tiny.logits_of(tiny.STUDENT, decoder.stack(tiny.STUDENT, base()), tiny.batch(0))
    for options in ({}, {"rate": 0.5, "keys": keys}):
        beside = tiny.logits_of(tiny.STUDENT, adapted(base(), adapters, **options), tiny.batch(0))
        np.testing.assert_array_equal(beside, plain)


def test_every_linear_takes_an_adapter_and_nothing_else_does():
    adapters = init_adapters(tiny.STUDENT, jax.random.key(0), tiny.RANK)
    assert all(map(is_adapter, adapters))
    wanted = {
        name.removesuffix("weight") + half for name in decoder.linears(tiny.STUDENT) for half in ("lora_A", "lora_B")
    }
    assert adapters.keys() == wanted
    for name, (outputs, inputs) in decoder.linears(tiny.STUDENT).items():
        a, b = (adapters[name.removesuffix("weight") + half] for half in ("lora_A", "lora_B"))
        assert (a.shape, b.shape) == ((tiny.RANK, inputs), (outputs, tiny.RANK))
        assert not b.any()
        assert np.abs(a).max() <= inputs**-0.5
        assert np.std(a) == pytest.approx(inputs**-0.5 / 3**0.5, rel=0.3)
    firsts = {float(adapters[name][0, 0]) for name in adapters if name.endswith("lora_A")}
    assert len(firsts) == len(wanted) // 2


def test_targets_that_match_nothing_are_refused():
    with pytest.raises(ArtifactError, match=r"'attention' match no linear layer"):
        init_adapters(tiny.STUDENT, jax.random.key(0), tiny.RANK, targets="attention")


def test_all_adapters_that_do_not_fit_are_named_at_once():
    adapters = random_adapters(targets="proj")
    q, k, v, o = (f"model.layers.0.self_attn.{name}_proj" for name in "qkvo")
    adapters[f"{q}.lora_A"] = np.zeros((tiny.RANK, 31), np.float32)
    del adapters[f"{k}.lora_B"]
    adapters[f"{v}.lora_B"] = np.zeros((16, tiny.RANK + 1), np.float32)
    adapters["model.layers.7.mlp.up_proj.lora_A"] = adapters["model.layers.7.mlp.up_proj.lora_B"] = np.zeros((4, 4))
    with pytest.raises(ArtifactError) as error:
        merge_adapters(tiny.student_weights(), adapters, SCALE)
    for linear in (q, k, v, "model.layers.7.mlp.up_proj"):
        assert linear in str(error.value)
    assert o not in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_s_adapters_that_do_not_fit_are_told_with_the_folder(tmp_path):
    folder = tiny_run.write_model(tmp_path / "model")
    linear = "model.layers.0.self_attn.q_proj"
    halves = {f"{linear}.lora_A": np.zeros((2, 64), np.float32), f"{linear}.lora_B": np.zeros((9, 2), np.float32)}
    peft.write(peft.Adapters(halves, 2, 4.0), folder)
    with pytest.raises(ArtifactError, match=rf"{folder}: adapters that do not fit the model: {linear}: B \(9, 2\)"):
        load(folder)


def test_merging_leaves_the_caller_s_weights_alone():
    before = {name: value.copy() for name, value in tiny.student_weights().items()}
    merge_adapters(tiny.student_weights(), random_adapters(), SCALE)
    jax.tree.map(np.testing.assert_array_equal, tiny.student_weights(), before)


def test_a_row_s_dropout_depends_on_its_key_alone():
    batch, adapters = tiny.batch(0), random_adapters()
    keys = jax.random.split(jax.random.key(1), 8)
    order = np.array([3, 1, 7, 0, 2, 6, 5, 4])
    forward = lambda keys, batch: tiny.logits_of(  # noqa: E731
        tiny.STUDENT, adapted(tiny.student_weights(), adapters, rate=0.3, keys=keys), batch
    )
    out = forward(keys, batch)
    moved = forward(keys[order], jax.tree.map(lambda leaf: leaf[order], batch))
    np.testing.assert_allclose(moved, out[order], rtol=1e-5, atol=1e-5)
    assert np.abs(forward(keys[order], batch) - out).max() > 0.01


def test_layers_and_linears_drop_different_inputs():
    keys = jax.random.split(jax.random.key(1), 8)
    segment = adapted(tiny.student_weights(), random_adapters(), rate=0.3, keys=keys).layers[0]
    drops = [leaf.keys for name, leaf in segment.items() if name.endswith("lora_dropout")]
    seen = {tuple(key) for one in drops for key in jax.random.key_data(one).reshape(-1, 2).tolist()}
    assert len(seen) == 7 * 2 * 8  # linears, layers, rows


def test_dropout_keeps_the_mean_and_drops_at_its_rate():
    dropped = Dropout(jax.random.split(jax.random.key(0), 4), 0.25)(jnp.ones((4, 50, 64)))
    assert set(np.unique(dropped)) == {np.float32(0), np.float32(1 / 0.75)}
    assert np.mean(dropped == 0) == pytest.approx(0.25, abs=0.02)


def test_no_rate_or_no_keys_drops_nothing():
    keys = jax.random.split(jax.random.key(1), 8)
    plain = adapted(tiny.student_weights(), random_adapters())
    for options in ({"rate": 0.5}, {"rate": 0.0, "keys": keys}):
        found = adapted(tiny.student_weights(), random_adapters(), **options)
        assert [layer.keys() for layer in found.layers] == [layer.keys() for layer in plain.layers]


@pytest.fixture(scope="module")
def landing():
    """A 4-bit base that lands, its adapters, and the dense weights that they are rounded to."""
    base, adapters = tiny.base_and_adapters(2)
    merged = merge_adapters(tiny.packed_weights(), decoder.unstack(tiny.STUDENT, adapters), SCALE)
    rounded = {name: rtn(merged[name], tiny.SPEC).dequantize() for name in decoder.linears(tiny.STUDENT)}
    return with_landing(base, fake_quantize), adapters, decoder.stack(tiny.STUDENT, merged | rounded)


def test_adapters_that_land_run_as_their_merged_weights_rounded(landing):
    base, adapters, rounded = landing
    keys = jax.random.split(jax.random.key(1), 8)
    for options in ({}, {"rate": 0.5, "keys": keys}):
        found = tiny.logits_of(tiny.STUDENT, with_adapters(base, adapters, SCALE, **options), tiny.batch(0))
        np.testing.assert_allclose(found, tiny.logits_of(tiny.STUDENT, rounded, tiny.batch(0)), rtol=1e-3, atol=2e-4)
    beside = adapted(tiny.packed_weights(), decoder.unstack(tiny.STUDENT, adapters))
    assert np.abs(found - tiny.logits_of(tiny.STUDENT, beside, tiny.batch(0))).max() > 0.1
    plain = tiny.logits_of(tiny.STUDENT, decoder.stack(tiny.STUDENT, tiny.packed_weights()), tiny.batch(0))
    np.testing.assert_array_equal(tiny.logits_of(tiny.STUDENT, base, tiny.batch(0)), plain)


def test_adapters_that_land_learn_from_the_gradient_of_the_rounded_weights(landing):
    base, adapters, rounded = landing
    loss = lambda stacked: jnp.square(tiny.logits_of(tiny.STUDENT, stacked, tiny.batch(0))).mean()  # noqa: E731
    found = jax.grad(lambda adapters: loss(with_adapters(base, adapters, SCALE)))(adapters).layers[0]
    wanted = jax.grad(loss)(rounded).layers[0]
    for name, g in wanted.items():
        linear = name.removesuffix(".weight")
        if f"{linear}.lora_A" in found:
            a, b = (adapters.layers[0][f"{linear}.lora_{half}"] for half in "AB")
            of_a, of_b = SCALE * jnp.swapaxes(b, 1, 2) @ g, SCALE * g @ jnp.swapaxes(a, 1, 2)
            np.testing.assert_allclose(found[f"{linear}.lora_A"], of_a, rtol=2e-2, atol=1e-5)
            np.testing.assert_allclose(found[f"{linear}.lora_B"], of_b, rtol=2e-2, atol=1e-5)


def test_layers_of_unlike_bases_take_their_own_adapters():
    """A base whose layers are quantized differently is stacked in segments; adapters follow."""
    mixed = tiny.packed_weights() | {n: w for n, w in tiny.student_weights().items() if ".layers.1." in n}
    adapters = random_adapters()
    beside = adapted(mixed, adapters)
    assert len(beside.layers) == 2
    inside = decoder.stack(tiny.STUDENT, merge_adapters(mixed, adapters, SCALE))
    out = [tiny.logits_of(tiny.STUDENT, stacked, tiny.batch(0)) for stacked in (beside, inside)]
    np.testing.assert_allclose(*out, rtol=1e-3, atol=2e-4)


def test_adapters_in_bfloat16_run_in_the_activations_dtype():
    half = decoder.stack(
        tiny.STUDENT,
        {name: jnp.asarray(value, jnp.bfloat16) for name, value in tiny.student_weights().items()} | random_adapters(),
    )
    adapters, base = decoder.partition(half, is_adapter)
    policy = with_adapters(base, adapters, SCALE)
    hidden = jax.eval_shape(
        lambda stacked, tokens: decoder.hidden_states(tiny.STUDENT, stacked, tokens), policy, tiny.batch(0).tokens
    )
    assert hidden.dtype == jnp.bfloat16
