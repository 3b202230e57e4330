"""The quantize stage: a model in, with adapters or without; a packed folder out."""

import dataclasses
import itertools
import json
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from compress.data.batch import Batch
from compress.data.batches import Batches
from compress.data.rows import Rows, keep_quarantine
from compress.models.decoder import shapes
from compress.models.folder import Model, architecture, open_stream
from compress.quantize.budget import Chosen, choose
from compress.quantize.calibrate import quantize_model, quantize_parts
from compress.quantize.preflight import check_settings
from compress.quantize.quantizers import QUANTIZERS
from compress.quantize.settings import Quantize
from compress.quantize.shards import Shards
from compress.record import VERSION, open_partial, stamp_of
from compress.settings import Common
from export.atomic import atomic_folder, check_output
from export.manifest import write_manifest
from export.quantized import PackedTensor, QuantSpec, Weights

LAYERS, CHOICE = "layers.json", "sensitivities.json"


def run(settings: Quantize, common: Common) -> dict[str, Any]:
    """Merge adapters into the (dequantized) base that they were trained on, quantize, and write, part by part.

    A run that was interrupted goes on with the first part that is missing, and ends with the same bytes.

    Raises:
      RecipeError: groups that do not divide a layer, a method without its calibration data, or a begun run of other
        settings or data.
      DataError, ArtifactError: data or a model that will not do.
    """
    assert common.out is not None and settings.model is not None
    check_settings(settings, architecture(settings.model))
    check_output(common.out, common.force)
    rows = calibration_rows(settings, common)
    source = open_stream(settings.model)
    if source.packed:
        common.progress.warn(f"{settings.model} is quantized already; its rounded weights are rounded once more")
    config = source.model.config
    options, choice = options_of(dataclasses.replace(source.model, weights=source.weights), rows, settings, common)
    folder = open_partial(common, "quantize", identity(settings, common, rows))
    shards = Shards(folder, source.model, config.num_hidden_layers + 2, options["spec"].scale_dtype)
    parts = quantize_parts(
        config, source.weights, **options, done=set(shards.facts), kept=shards.read(), scratch=folder
    )
    with ThreadPoolExecutor(1) as writer:  # while the next part is made
        writing: Future | None = None
        for part in parts:
            if writing is not None:
                writing.result()
            writing = writer.submit(shards.put, *part)
            if 0 < part.number <= config.num_hidden_layers:
                common.progress("quantize", part.number, config.num_hidden_layers)
            del part  # its arrays go when they are written
        if writing is not None:
            writing.result()
    with atomic_folder(common.out, common.force) as out:
        shards.finish(out)
        skipped = keep_quarantine(out, *rows)
        (out / LAYERS).write_text(json.dumps(shards.errors) + "\n")
        if choice is not None:
            (out / CHOICE).write_text(json.dumps(choice.record, indent=1) + "\n")
        write_manifest(out, {"stage": "quantize", "method": settings.method, "model": settings.model})
    shutil.rmtree(folder)
    return {
        "out": str(common.out),
        "method": settings.method,
        **(
            {"chosen": choice.record["chosen"]}
            if choice
            else {"bits": settings.bits, "group_size": settings.group_size, "symmetric": settings.symmetric}
        ),
        "tensors": {"quantized": len(shards.packed), "of": sum(len(shape) == 2 for shape in shapes(config).values())},
        "bytes": sum(facts["bytes"] for facts in shards.facts.values()),
        **({"rows": {str(text.paths[0]): text.quarantine.counts() for text in rows}} if rows else {}),
        **skipped,
    }


def identity(settings: Quantize, common: Common, rows: list[Rows]) -> dict[str, Any]:
    """What decides the bytes of a quantized model."""
    assert settings.model is not None
    keys = dataclasses.asdict(settings)
    own = {"model": stamp_of(Path(settings.model)), "calibration": [text.sha256 for text in rows]}
    return keys | own | {"seed": common.seed, "columns": dict(common.data.columns), "version": VERSION}


@dataclasses.dataclass(frozen=True)
class Result:
    """The quantized model and its layers' output errors."""

    model: Model
    layers: list[dict[str, Any]]


def quantize(parent: Model, rows: list[Rows], settings: Quantize, common: Common) -> Result:
    """A float model's linears, and its embedding if asked, as groups of few bits."""
    options, _ = options_of(parent, rows, settings, common)
    found = quantize_model(parent.config, parent.weights, **options, progress=common.progress)
    weights: Weights = {
        n: v if isinstance(v, PackedTensor) else np.asarray(v, np.float32) for n, v in found.weights.items()
    }
    return Result(dataclasses.replace(parent, weights=weights), found.layers)


def options_of(
    parent: Model, rows: list[Rows], settings: Quantize, common: Common
) -> tuple[dict[str, Any], Chosen | None]:
    """The arguments of `quantize_parts` beside the model's, and under a budget what each layer's bits are chosen by."""
    share = settings.calibration_tokens // max(1, len(rows))
    batches = [batch for text in rows for batch in calibration_batches(parent, text, share, settings, common.seed)]
    seen = sum(int((batch.segments > 0).sum()) for batch in batches)
    if rows and seen < settings.calibration_tokens // 2:
        common.progress.warn(f"the calibration text has {seen} tokens; {settings.calibration_tokens} were asked for")
    choice = choose(parent, batches, settings, common.progress) if settings.is_mixed else None
    options = {
        "batches": batches,
        "spec": QuantSpec(bits=settings.bits, group_size=settings.group_size, symmetric=settings.symmetric),
        "method": settings.method,
        "embedding_bits": settings.embedding_bits,
        "fallback_group_size": settings.fallback_group_size,
        "specs": choice.specs if choice else None,
        "settings": {name: getattr(settings, name) for name in QUANTIZERS[settings.method].settings},
    }
    return options, choice


def calibration_rows(settings: Quantize, common: Common) -> list[Rows]:
    """The calibration text, file by file."""
    data = common.data
    return [Rows(path, columns=data.columns, bad_rows=data.bad_rows) for path in settings.calibration]


def calibration_batches(parent: Model, rows: Rows, share: int, settings: Quantize, seed: int) -> list[Batch]:
    """The first `share` tokens of a calibration text, packed."""
    size = max(1, min(4, share // settings.sequence_length))
    shape: dict[str, Any] = {"size": size, "length": settings.sequence_length, "buffer": share}
    batches = Batches(rows, parent.tokenizer, **shape, seed=seed, epochs=1, shuffle=False)
    wanted = max(1, share // (size * settings.sequence_length))
    return list(itertools.islice(batches, wanted))
