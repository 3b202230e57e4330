"""Healing: what it may change, that it helps, and that it knows when it does not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax

from compress.data.batch import Batch
from compress.errors import DataError
from compress.models.decoder import linears, stack
from compress.quantize import heal as healing
from compress.quantize.heal import HELD_OUT, form, heal, healing_loss, ones, stored, teach
from compress.quantize.rtn import rtn
from export.quantized import QuantizedTensor, QuantSpec
from tests.tiny_models import EXEMPLARS, config_of, forward, weights_of

SPEC = QuantSpec(4, 16, True)


def batches_of(config, count: int, *, seed: int = 0, padded: int = 0) -> list[Batch]:
    rng = np.random.default_rng(seed)
    positions = np.tile(np.arange(24, dtype=np.int32), (8, 1))
    made = []
    for _ in range(count):
        tokens = rng.integers(0, config.vocab_size, (8, 24)).astype(np.int32)
        segments = (positions < 24 - padded).astype(np.int32)
        made.append(Batch(tokens, segments, positions, segments.astype(np.float32)))
    return made


def rounded(case: str, spec: QuantSpec = SPEC):
    config, parent = config_of(case), weights_of(case)
    return config, parent, parent | {name: rtn(parent[name], spec, clip_steps=0) for name in linears(config)}


@pytest.mark.parametrize("family", EXEMPLARS)
def test_healing_lowers_the_kl_and_changes_scales_norms_and_biases_alone(family):
    config, parent, quantized = rounded(EXEMPLARS[family], QuantSpec(4, 16, False))
    healed, trace = heal(config, quantized, parent, batches_of(config, 9), steps=32, learning_rate=4e-3)
    first, last = trace.validations
    assert last["loss"] < 0.98 * first["loss"]
    for name, before in quantized.items():
        after = healed[name]
        if isinstance(before, QuantizedTensor):
            assert np.array_equal(before.packed, after.packed) and np.array_equal(before.zero, after.zero)
            assert after.spec == before.spec and after.scale.dtype == before.scale.dtype
            assert not np.array_equal(before.scale, after.scale)
        elif name.endswith(("norm.weight", "bias")):
            assert after.dtype == before.dtype and not np.array_equal(before, after)
        else:
            assert np.array_equal(before, after)


def test_the_loss_is_the_kl_over_real_tokens():
    config, parent, quantized = rounded(EXEMPLARS["llama"])
    batches = batches_of(config, 1, padded=5)
    taught, head = teach(config, parent, batches)
    base = stack(config, quantized)
    total, count, _ = healing_loss(config)(ones(base), (base, head), taught[0], None)
    batch = batches[0]
    log_p, log_q = (
        log_softmax(np.asarray(forward(config, stacked, batch.tokens, segments=batch.segments), np.float64), -1)
        for stacked in (stack(config, parent), base)
    )
    kl = (np.exp(log_p) * (log_p - log_q)).sum(-1)[batch.segments > 0]
    assert float(count) == kl.size
    np.testing.assert_allclose(float(total), kl.sum(), rtol=1e-4)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans(), st.sampled_from(["bfloat16", "float16", "float32"]))
def test_what_is_trained_is_what_is_stored(seed, symmetric, dtype):
    rng = np.random.default_rng(seed)
    tensor = rtn(rng.normal(size=(3, 32)).astype(np.float32), QuantSpec(4, 16, symmetric, dtype))
    factor = jnp.asarray(np.exp(rng.normal(size=tensor.scale.shape)), jnp.float32)
    kept = stored(tensor, factor)
    np.testing.assert_array_equal(form(tensor, factor), kept.dequantize())
    wanted = np.asarray(tensor.scale, np.float32) * np.asarray(factor)
    np.testing.assert_allclose(np.asarray(kept.scale, np.float32), wanted, rtol=2.0**-8)
    same = stored(tensor, jnp.ones_like(factor))
    assert all(map(np.array_equal, jax.tree.leaves(same), jax.tree.leaves(tensor)))


def test_the_gradient_of_a_factor_is_the_weights_share_of_it():
    tensor = rtn(np.random.default_rng(0).normal(size=(3, 32)).astype(np.float32), SPEC)
    cotangent = np.random.default_rng(1).normal(size=(3, 32)).astype(np.float32)
    found = jax.grad(lambda f: jnp.sum(form(tensor, f) * cotangent))(jnp.ones(tensor.scale.shape))
    wanted = (np.asarray(tensor.dequantize()) * cotangent).reshape(3, 2, 16).sum(-1)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_what_held_out_batches_do_not_favour_is_not_kept():
    config, parent, quantized = rounded(EXEMPLARS["llama"])
    healed, trace = heal(config, quantized, parent, batches_of(config, 3), steps=2, learning_rate=3.0)
    assert trace.validations[-1]["loss"] > trace.validations[0]["loss"]
    assert healed is quantized


def test_held_out_batches_are_not_trained_on(monkeypatch):
    config, parent, quantized = rounded(EXEMPLARS["llama"])
    batches = batches_of(config, HELD_OUT + 1)
    seen = []

    def passes(taught, seed):
        seen.extend(id(item.batch) for item in taught)
        return iter(taught)

    monkeypatch.setattr(healing, "passes", passes)
    heal(config, quantized, parent, batches, steps=2, learning_rate=1e-3)
    assert seen == [id(batch) for at, batch in enumerate(batches) if at != HELD_OUT - 1]


def test_one_batch_is_too_few():
    config, parent, quantized = rounded(EXEMPLARS["llama"])
    with pytest.raises(DataError, match="two batches"):
        heal(config, quantized, parent, batches_of(config, 1), steps=1, learning_rate=1e-3)


def test_the_same_seed_heals_to_the_same_bits():
    config, parent, quantized = rounded(EXEMPLARS["qwen2"])
    runs = [heal(config, quantized, parent, batches_of(config, 3), steps=3, learning_rate=1e-2)[0] for _ in range(2)]
    assert all(map(np.array_equal, *map(jax.tree.leaves, runs)))


def test_nothing_but_grouped_integers_has_scales_to_heal():
    config, parent, _ = rounded(EXEMPLARS["llama"])
    assert all(name.endswith("norm.weight") for name in ones(stack(config, parent)).layers[0])
