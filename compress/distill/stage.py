"""The distill stage: a teacher and a student in, a student that predicts like its teacher out."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from compress.data.batches import Batches
from compress.data.rows import Rows, keep_quarantine
from compress.data.split import training_and_held_out
from compress.distill.cache import CachedBatches, TeacherCache, identity
from compress.distill.form import joined, parts_of
from compress.distill.loss import loss_of
from compress.distill.on_policy import OnPolicyBatches, on_policy_batches
from compress.distill.settings import Distill
from compress.distill.strategies import PROJECTION, make_matching
from compress.distill.student import initial_student, read_cut, student_architecture
from compress.distill.temperature import TemperedBatches, temperatures
from compress.errors import RecipeError
from compress.models.decoder import partition, stack
from compress.models.folder import Model, load, parameter_count, save, without_weights
from compress.quantize.preflight import require_fit
from compress.record import TRACE
from compress.settings import Common
from compress.tokenizer import same_tokenizer
from compress.train.checkpoints import Checkpoints
from compress.train.course import (
    fit_settings,
    held_out,
    open_checkpoints,
    tellers,
    told_of,
    validator,
)
from compress.train.fit import fit
from compress.train.mesh import mesh_of_devices, place
from compress.train.processes import shared_folder
from compress.train.trace import Trace

CONVERGED = 0.1  # held-out loss
RATE_BY_WIDTH = 0.5  # AdamW's best rate falls as one over the width (arXiv:2203.03466, table 3)


def run(settings: Distill, common: Common) -> dict[str, Any]:
    """Distill and write the student as a model folder with its loss curve.

    Raises:
      RecipeError, DataError, ArtifactError: settings, data or models that will not do.
    """
    assert common.out is not None
    with shared_folder(common.out, common.force) as folder:
        outline = without_weights(settings.teacher)
        config = student_architecture(settings.student, outline.config)  # what it refuses, it refuses early
        if settings.landing != "none" and settings.rank is None:  # a base may be packed already, in groups of its own
            require_fit(config, settings.group_size)
        options = {"columns": common.data.columns, "bad_rows": common.data.bad_rows}
        rows, valid = training_and_held_out(settings.data, settings.valid, **options)
        cache = open_cache(settings, common, outline, rows, valid)
        if cache is not None and settings.temperature is None:
            settings = dataclasses.replace(settings, temperature=cache.temperature)
        cut = read_cut(settings.student, outline.config)
        teacher = load(settings.teacher).merged().dequantized() if cache is None or cut else outline
        student = initial_student(settings, common, teacher)
        teacher = teacher if cache is None else outline  # its weights may go
        check_pair(teacher, student)
        checkpoints = open_checkpoints(settings, common)
        trained, trace, facts = distill(teacher, student, rows, valid, settings, common, checkpoints, cache)
        skipped = keep_quarantine(folder, rows, valid)
        (folder / TRACE).write_text(trace.to_json())
        save(trained, folder, {"stage": "distill", "teacher": settings.teacher, **facts})
    checkpoints.remove()
    return {
        "out": str(common.out),
        "parameters": {"teacher": parameter_count(teacher), "student": parameter_count(trained)},
        **told_of(trace, CONVERGED),
        **facts,
        **skipped,
    }


def open_cache(settings: Distill, common: Common, teacher: Model, rows: Rows, valid: Rows) -> TeacherCache | None:
    """The cache that the settings name; None where they name none.

    Raises:
      RecipeError: it is of another teacher, other data, or was made otherwise.
      ArtifactError: it is damaged.
    """
    if settings.teacher_cache is None:
        return None
    cache = TeacherCache(settings.teacher_cache)
    cache.require(identity(settings, common, teacher.tokenizer, rows, valid), settings)
    return cache


def check_pair(teacher: Model, student: Model) -> None:
    """Refuse a student that reads other tokens than its teacher.

    Raises:
      RecipeError: with the first difference.
    """
    reason = same_tokenizer(teacher.tokenizer, student.tokenizer)
    if reason:
        raise RecipeError(
            f"teacher and student have different tokenizers: {reason}; distillation compares token by token"
        )


def distill(
    teacher: Model,
    student: Model,
    rows: Rows,
    valid: Rows,
    settings: Distill,
    common: Common,
    checkpoints: Checkpoints | None = None,
    cache: TeacherCache | None = None,
) -> tuple[Model, Trace, dict[str, Any]]:
    """The student after training on `rows`, judged by `valid`; its trace, and what the data was.

    With `cache`, the teacher's weights are not looked at.
    """
    if settings.learning_rate is None:
        settings = dataclasses.replace(settings, learning_rate=RATE_BY_WIDTH / student.config.hidden_size)
    dtype = jnp.dtype(common.dtype)
    matching = make_matching(settings, student.config, teacher.config)
    shape: dict[str, Any] = {"size": settings.global_batch, "length": settings.sequence_length, "seed": common.seed}
    tokenizer = teacher.tokenizer
    batches = Batches(rows, tokenizer, **shape)
    checks = held_out(partial(Batches, valid, tokenizer, **shape), settings)
    mesh = mesh_of_devices(common.mesh)
    plan = fit_settings(settings, batches, common.seed, mesh)

    loss = loss_of(settings, student.config, teacher.config, dtype, sorted(tokenizer.end_ids))
    stream: Batches | OnPolicyBatches | TemperedBatches | CachedBatches = batches
    if settings.temperature_end is not None or settings.on_policy:
        plan = dataclasses.replace(plan, rebound=0.0)  # the loss itself changes, and may rise for that
    if settings.on_policy:
        stream = on_policy_batches(batches, settings)
    if settings.temperature_end is not None:
        ends = settings.tau, settings.temperature_end
        stream = TemperedBatches(stream, temperatures(settings.temperature_schedule, *ends, plan.steps))
    if cache is not None:
        stream, checks, frozen = CachedBatches(stream, cache), [cache.attach(batch) for batch in checks], None
    else:
        frozen = place(mesh, jax.tree.map(lambda leaf: leaf.astype(dtype), stack(teacher.config, teacher.weights)))
    student, trainable, base = parts_of(student, settings, common)
    if base is not None:
        frozen = place(mesh, base), frozen
    if matching is not None:
        projections = matching.projections(jax.random.key(common.seed))
        trainable = dataclasses.replace(trainable, rest=trainable.rest | projections)
    trained, trace = fit(
        loss,
        trainable,
        frozen,
        stream,
        plan,
        mesh=mesh,
        validate=validator(loss, frozen, checks, mesh),
        checkpoints=checkpoints,
        **tellers(common.progress, "distill", plan.steps),
    )
    trained, _ = partition(trained, lambda name: name != PROJECTION)
    ended = [row["ended"] for row in trace.steps if "ended" in row]
    facts = {
        "tokens": int(sum(row["count"] for row in trace.steps)),
        "learning_rate": settings.learning_rate,
        "packing": round(batches.efficiency, 4),
        "rows": rows.quarantine.counts(),
        "data_sha256": rows.sha256,
        **({"on_policy": {"steps": len(ended), "ended": float(np.mean(ended))}} if ended else {}),
    }
    return joined(student, trained, settings), trace, facts
