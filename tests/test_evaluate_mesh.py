"""Scoring on eight simulated devices is scoring on one; and no device holds a model whole."""

import jax
import numpy as np
import pytest

from compress.data.windows import windows
from compress.evaluate import BATCH, Runner, chunks, scoring_mesh
from compress.models import decoder
from compress.models.folder import Model
from compress.settings import Common, MeshShape
from eval.metrics import CANDIDATE, PARENT
from tests import tiny_training as tiny
from tests.goldens.make_models import draw


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    with tiny.unoptimized():
        yield


def scored(shape: MeshShape):
    """Logits, targets and owners of all scored tokens of some windows, by a packed candidate and its float parent."""
    weights = {CANDIDATE: tiny.packed_weights(), PARENT: tiny.student_weights()}
    models = {name: Model(tiny.STUDENT_HF, tiny.STUDENT, found, {}) for name, found in weights.items()}
    rng = np.random.default_rng(0)
    text = [tiny.sample(rng, length) for length in (40, 7, 90)]
    held_out = windows(text, tiny.LENGTH, size=BATCH)
    found = list(chunks(models, held_out, Common(mesh=shape), "eval"))
    real = np.concatenate([chunk.mask for chunk in found]) > 0
    columns = [np.concatenate([chunk.targets for chunk in found]), np.concatenate([chunk.document for chunk in found])]
    columns += [np.concatenate([np.asarray(chunk.logits[name]) for chunk in found]) for name in models]
    return [column[real] for column in columns]


@pytest.mark.parametrize("shape", [(1, 8, 1), (2, 2, 2)], ids=str)
def test_models_spread_over_a_mesh_score_as_on_one_device(shape):
    alone = scored(MeshShape())  # no weight is split
    assert len(alone[0]) > 100
    for found, expected in zip(scored(MeshShape(*shape)), alone, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_no_device_holds_more_than_its_share_of_a_model_that_is_scored():
    model = Model(tiny.TEACHER_HF, tiny.TEACHER, draw(decoder.shapes(tiny.TEACHER), 2), {})
    runner = Runner(model, np.float32, scoring_mesh(MeshShape(fsdp=8)))
    matrices = [leaf for leaf in jax.tree.leaves(runner.stacked) if leaf.size > 1000]
    assert len(matrices) >= 9
    assert {leaf.size / leaf.addressable_shards[0].data.size for leaf in [*matrices, runner.head]} == {8.0}
