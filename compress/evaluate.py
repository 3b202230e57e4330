"""Models over held-out text: logits in bounded chunks for `eval`, and the report that comes of it.

Letters: B rows, T tokens of a window, N tokens of a chunk, V vocabulary, D model.
"""

import dataclasses
import importlib.metadata
import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from compress.data.rows import SHOWN, Rows, skipped_rows
from compress.data.windows import Windows, documents, windows
from compress.errors import RecipeError
from compress.models.decoder import EMBEDDING, HEAD, LAYER, head, hidden_states, linears, project, stack
from compress.models.folder import Model, cast, load
from compress.models.linear import dense
from compress.quantize.account import Quantization, read_quantization
from compress.settings import Common, Eval, MeshShape
from compress.tokenizer import same_tokenizer
from compress.train.mesh import mesh_of_devices, on_host, on_mesh, place, place_rows, replicated, rows_across
from eval import metrics
from eval.markdown import to_table
from eval.quantization_error import SquaredError, tensor_error
from eval.report import Convention, ErrorRow, Report, Size, SizePart, tail, to_json
from eval.retention import ADAPTED, BASE, LANDED, Retention, accumulate
from eval.scores import Chunk, score
from export.atomic import atomic_file
from export.quantized import PackedTensor

CHUNK = 256  # tokens whose logits exist at once, a model
BATCH = 4  # windows that go through a model at once
VERSIONED = ("jax", "jaxlib", "flax", "numpy", "optax", "safetensors", "tokenizers")


def run(settings: Eval, common: Common) -> dict[str, Any]:
    """Measure a model, against its parent and teacher if given, and write report.json.

    Raises:
      RecipeError, DataError, ArtifactError: settings, data or models that will not do.
    """
    assert settings.model is not None
    models = {metrics.CANDIDATE: load(settings.model)}
    if settings.baseline:
        models[metrics.PARENT] = load(settings.baseline).merged().dequantized()
    if settings.teacher:
        models[metrics.TEACHER] = load(settings.teacher).merged().dequantized()
    held_out = open_windows(models, settings, common)
    path = Path(settings.model)
    report = measure(models, held_out, common, name=path.name, record=read_quantization(path))
    if common.out is not None:
        with atomic_file(common.out, common.force) as path:
            path.write_text(to_json(report), encoding="utf-8")
    return summary(report) | held_out.facts() | ({"report": str(common.out)} if common.out else {})


def summary(report: Report) -> dict[str, Any]:
    """The headline numbers, and the convention that they were measured by."""
    assert report.convention is not None
    return {
        "measured": {what: {"value": value, "interval": interval} for what, value, interval in to_table(report)},
        "convention": dataclasses.asdict(report.convention),
    }


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Held-out text as all models read it: the windows, how they were made, and the rows that they came from."""

    windows: Windows
    convention: Convention
    rows: Rows

    def facts(self) -> dict[str, Any]:
        """What a result says of the rows."""
        skipped = skipped_rows(self.rows)[:SHOWN]
        return {"rows": self.rows.quarantine.counts()} | ({"skipped_rows": skipped} if skipped else {})

    def notes(self) -> list[str]:
        """What the report says of them."""
        quarantine = self.rows.quarantine
        return [f"{quarantine.skipped} of {quarantine.read} held-out rows skipped"] if quarantine.skipped else []


def measure(
    models: Mapping[str, Model],
    held_out: HeldOut,
    common: Common,
    *,
    name: str,
    evidence: Mapping[str, Any] | None = None,
    record: Quantization | None = None,
    **parts: Any,
) -> Report:
    """The report on models named as in `eval.metrics`; the candidate is among them.

    Args:
      evidence: further fields of the evidence.
      record: what quantization told of the candidate.
      parts: further fields of the report.
    """
    baselines = [model for model in (metrics.PARENT, metrics.TEACHER) if model in models]
    pairs = [(baseline, model) for baseline in baselines for model in models if model != baseline]
    scores = score(chunks(models, held_out.windows, common, "eval"), pairs)
    candidate = models[metrics.CANDIDATE]
    if metrics.PARENT not in models:
        tensors = []
    elif record is not None and record.folded:  # the parent's weights are not those that were rounded
        tensors = [row.squared_error for row in record.tensors if row.bits is not None]
    else:
        tensors = tensor_errors(models[metrics.PARENT], candidate)
    size = size_of(candidate)
    found = metrics.Evidence(
        scores=scores,
        tensors=tensors,
        size=size,
        coverage=coverage_of(candidate),
        seed=common.seed,
        **(evidence or {}),
    )
    return Report(
        name=name,
        convention=held_out.convention,
        metrics=metrics.measure(found),
        tensors=[ErrorRow.of(error) for error in tensors],
        quantization=record.tensors if record else [],
        size=size,
        tails=[tail(scores[model], model, baseline) for baseline, model in pairs if model == metrics.CANDIDATE],
        notes=held_out.notes(),
        versions={package: importlib.metadata.version(package) for package in VERSIONED},
        **parts,
    )


def open_windows(models: Mapping[str, Model], settings: Eval, common: Common) -> HeldOut:
    """Held-out windows that all models read alike, and the convention's name and numbers.

    Raises:
      RecipeError: two models have different tokenizers, or a BOS is asked for that there is not.
    """
    tokenizer = models[metrics.CANDIDATE].tokenizer
    for other, model in models.items():
        reason = same_tokenizer(tokenizer, model.tokenizer)
        if reason:
            raise RecipeError(
                f"{other} has another tokenizer than the candidate: {reason}; their tokens do not compare"
            )
    if settings.bos and tokenizer.bos_id is None:
        raise RecipeError("bos = true, but the tokenizer has no BOS token")
    rows = Rows(settings.data, columns=common.data.columns, bad_rows=common.data.bad_rows)
    found = documents(rows, tokenizer, tokens=settings.max_tokens)
    # Text runs on from document to document, as in every published protocol; a conversation stands by itself.
    joined = all(document.mask.all() for document in found)
    cut = windows(
        found,
        settings.window,
        stride=settings.stride,
        bos_id=tokenizer.bos_id if settings.bos else None,
        joined=joined,
        size=BATCH,
        pad_id=tokenizer.pad_id or 0,
    )
    facts = cut.convention
    convention = Convention(
        name=f"{'joined' if joined else 'separate'} windows of {facts.window}, stride {facts.stride}, "
        f"{'BOS' if facts.bos else 'no BOS'}",
        window=facts.window,
        stride=facts.stride,
        bos=facts.bos,
        tokens=facts.scored,
        documents=facts.documents,
        data=", ".join(path.name for path in settings.data),
        data_sha256=facts.sha256,
        seed=common.seed,
    )
    return HeldOut(cut, convention, rows)


def chunks(models: Mapping[str, Model], held_out: Windows, common: Common, stage: str) -> Iterator[Chunk]:
    """Every model's logits on the windows, `CHUNK` tokens at a time; column t predicts token t + 1."""
    dtype, mesh = jnp.dtype(common.dtype), scoring_mesh(common.mesh)
    runs = {name: Runner(model, dtype, mesh) for name, model in models.items()}
    held_out = dataclasses.replace(held_out, size=windows_at_once(mesh))
    batches = -(-len(held_out.windows) // held_out.size)
    for number, (batch, owners) in enumerate(held_out, 1):
        common.progress(stage, number, batches)
        hidden = {name: run.hidden(batch) for name, run in runs.items()}
        targets, mask, document = (a[:, 1:].reshape(-1) for a in (batch.tokens, batch.mask, owners))
        for at in range(0, len(targets), CHUNK):
            piece = slice(at, at + CHUNK)
            if not mask[piece].any():
                continue
            logits = {name: runs[name].logits(hidden[name][piece]) for name in runs}
            yield Chunk(logits, targets[piece], mask[piece], document[piece])


def scoring_mesh(shape: MeshShape) -> Mesh | None:
    """The mesh that models are scored on: one over all devices where the recipe splits weights, else None.

    Raises:
      RecipeError: the shape is for another number of devices.
    """
    # Of several processes the first scores alone, on a device of its own.
    split = shape.fsdp * shape.tensor > 1 and jax.process_count() == 1
    return mesh_of_devices(shape) if split else None


def windows_at_once(mesh: Mesh | None) -> int:
    """Windows that go through a model at once: as many on each device that has its own."""
    across = rows_across(mesh)
    return -(-BATCH // across) * across


class Runner:
    """A model, its adapters on, that is run batch after batch, on the mesh if there is one."""

    def __init__(self, model: Model, dtype, mesh: Mesh | None = None):
        """Stack the weights once."""
        self.mesh = mesh
        with on_host(mesh):
            stacked = stack(model.config, cast(model.merged().weights, dtype))
        self.stacked = place(mesh, stacked)
        self.head = jnp.asarray(dense(head(model.config, self.stacked), dtype))

        def states(stacked, batch):
            return hidden_states(
                model.config, stacked, batch.tokens, positions=batch.positions, segments=batch.segments
            )

        whole = replicated(mesh)
        self._hidden = jax.jit(on_mesh(mesh, states), out_shardings=whole)
        self._project = jax.jit(partial(project, model.config), out_shardings=whole)

    def hidden(self, batch) -> jax.Array:
        """Hidden states that predict columns 1 .. T-1 [B * (T - 1), D]."""
        states = self._hidden(self.stacked, place_rows(self.mesh, batch))
        return states[:, :-1].reshape(-1, states.shape[-1])

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Logits [N, V] in float32."""
        return self._project(hidden, self.head)


def tensor_errors(parent: Model, candidate: Model) -> list[SquaredError]:
    """The error of every quantized tensor against the parent's."""
    return [
        tensor_error(name, np.asarray(parent.weights[name], np.float32), np.asarray(value.dequantize(np.float32)))
        for name, value in candidate.weights.items()
        if isinstance(value, PackedTensor) and name in parent.weights
    ]


def coverage_of(model: Model) -> float | None:
    """The share of the blocks' linear weights that are quantized; None of a float model."""
    counts = {name: math.prod(shape) for name, shape in linears(model.config).items()}
    packed = sum(count for name, count in counts.items() if isinstance(model.weights[name], PackedTensor))
    return packed / sum(counts.values()) if packed else None


def size_of(model: Model) -> Size:
    """Weights and bytes of embedding, attention, MLP, norms, head and adapters; floats count two bytes, as exported."""
    parts: dict[str, list[int]] = {}
    named = [(part_of(name), value) for name, value in model.weights.items()]
    named += [("adapters", value) for value in (model.adapters.weights.values() if model.adapters else ())]
    for name, value in named:
        part = parts.setdefault(name, [0, 0])
        count = int(np.prod(value.shape))
        part[0] += count
        part[1] += value.nbytes if isinstance(value, PackedTensor) else 2 * count
    return Size([SizePart(name, weights, size) for name, (weights, size) in parts.items()])


def part_of(name: str) -> str:
    """Which part of the model a tensor belongs to."""
    if name in (EMBEDDING, HEAD):
        return "embedding" if name == EMBEDDING else "head"
    match = LAYER.fullmatch(name)
    inner = match[2] if match else name
    return next(
        (part for key, part in (("norm", "norms"), ("self_attn", "attention"), ("mlp", "mlp")) if key in inner), "other"
    )


def retention(base: Model, landed: Model, held_out: HeldOut, common: Common) -> Retention | None:
    """How much of the adapters on `base` survived in `landed`; None where there are none."""
    if base.adapters is None:
        return None
    bare = dataclasses.replace(base, adapters=None)
    models = {LANDED: landed, BASE: bare, ADAPTED: base.merged()}
    return accumulate(chunks(models, held_out.windows, common, "adapters"))
