"""The quantize stage: a model in, with adapters or without; a packed folder out."""

import dataclasses
import itertools
import json
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from compress.data.batch import Batch
from compress.data.batches import Batches
from compress.data.rows import Rows, keep_quarantine
from compress.errors import DataError, RecipeError
from compress.models.decoder import shapes
from compress.models.folder import Model, architecture, open_stream
from compress.quantize.account import Quantization, coverage, write_quantization
from compress.quantize.budget import Chosen, choose
from compress.quantize.calibrate import quantize_parts
from compress.quantize.heal import heal
from compress.quantize.preflight import check_settings
from compress.quantize.quantizers import QUANTIZERS
from compress.quantize.rotate import rotated
from compress.quantize.settings import Quantize
from compress.quantize.shards import Shards
from compress.record import VERSION, open_partial, stamp_of
from compress.settings import Common
from compress.train.course import tellers
from export.atomic import atomic_folder, check_output
from export.manifest import write_manifest
from export.quantized import QuantSpec

LAYERS, CHOICE = "layers.json", "sensitivities.json"


def run(settings: Quantize, common: Common) -> dict[str, Any]:
    """Merge adapters into the (dequantized) base that they were trained on, quantize, and write, part by part.

    A run that was interrupted goes on with the first part that is missing, and ends with the same bytes.

    Raises:
      RecipeError: groups that do not divide a layer, a method without its calibration data, a quantized model where
        `requantize` refuses it, or a begun run of other settings or data.
      DataError, ArtifactError: data or a model that will not do.
    """
    assert common.out is not None and settings.model is not None
    check_settings(settings, architecture(settings.model))
    check_output(common.out, common.force)
    rows = calibration_rows(settings, common)
    parent, floats = open_parent(settings, common)
    layers = parent.config.num_hidden_layers
    options, choice = options_of(parent, floats, rows, settings, common)
    folder = open_partial(common, "quantize", identity(settings, common, rows))
    shards = Shards(folder, parent, layers + 2, options["spec"].scale_dtype)
    parts = quantize_parts(parent.config, floats, **options, done=set(shards.facts), kept=shards.read(), scratch=folder)
    with ThreadPoolExecutor(1) as writer:  # while the next part is made
        writing: Future | None = None
        for part in parts:
            if writing is not None:
                writing.result()
            writing = writer.submit(shards.put, part.number, part.weights, part.error, part.rows)
            if 0 < part.number <= layers:
                common.progress("quantize", part.number, layers, took=round(part.seconds, 3))
            del part  # its arrays go when they are written
        if writing is not None:
            writing.result()
    shards, healed = heal_shards(shards, floats, options["batches"], settings, common)
    record = Quantization(coverage(shards.rows), is_folded(settings), shards.rows)
    with atomic_folder(common.out, common.force) as out:
        shards.finish(out)
        skipped = keep_quarantine(out, *rows)
        (out / LAYERS).write_text(json.dumps(shards.errors) + "\n")
        write_quantization(out, record)
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
        "tensors": {
            "quantized": len(shards.packed),
            "of": sum(len(shape) == 2 for shape in shapes(parent.config).values()),
        },
        "coverage": record.coverage,
        "not_as_asked": {row.name: row.fallback for row in record.tensors if row.fallback},
        **({"healed": healed} if healed else {}),
        "bytes": sum(facts["bytes"] for facts in shards.facts.values()),
        **({"rows": {str(text.paths[0]): text.quarantine.counts() for text in rows}} if rows else {}),
        **skipped,
    }


def heal_shards(
    shards: Shards, floats: Mapping[str, Any], batches: list[Batch], settings: Quantize, common: Common
) -> tuple[Shards, dict[str, Any] | None]:
    """The quantized parts with what `heal` trains of them, and what it gained; as they are where nothing is to heal."""
    integers = any(spec is not None for spec in shards.packed.values())
    if not (batches and settings.heal_passes and integers):
        return shards, None
    if len(batches) < 2:
        common.progress.warn("the calibration text is too short to heal by: it takes two batches at least")
        return shards, None
    steps = settings.heal_passes * len(batches)
    weights, trace = heal(
        shards.model.config,
        shards.read(),
        floats,
        batches,
        steps=steps,
        learning_rate=settings.heal_learning_rate,
        seed=common.seed,
        on_step=tellers(common.progress, "heal", steps)["on_step"],
    )
    before, after = (row["loss"] for row in (trace.validations[0], trace.validations[-1]))
    told = {"steps": steps, "kl_before": before, "kl_after": after, "kept": after < before}
    return (shards.replaced(weights) if told["kept"] else shards), told


def open_parent(settings: Quantize, common: Common) -> tuple[Model, Mapping[str, Any]]:
    """The model to quantize, and its weights in floats, read on access; all at once if they are to be rotated.

    Raises:
      RecipeError: it is quantized already, and the settings refuse that.
    """
    assert settings.model is not None
    source = open_stream(settings.model)
    if source.packed and settings.requantize == "refuse":
        raise RecipeError(f"{settings.model} is quantized already; give the model that it was made from")
    if source.packed:
        common.progress.warn(f"{settings.model} is quantized already; its rounded weights are rounded once more")
    if settings.rotate == "none":
        return source.model, source.weights
    parent = rotated(dataclasses.replace(source.model, weights=dict(source.weights)), settings.rotate, common.seed)
    return parent, parent.weights


def identity(settings: Quantize, common: Common, rows: list[Rows]) -> dict[str, Any]:
    """What decides the bytes of a quantized model."""
    assert settings.model is not None
    keys = dataclasses.asdict(settings)
    own = {"model": stamp_of(Path(settings.model)), "calibration": [text.sha256 for text in rows]}
    return keys | own | {"seed": common.seed, "columns": dict(common.data.columns), "version": VERSION}


def is_folded(settings: Quantize) -> bool:
    """Whether what is rounded are not the given model's weights, but those of an equal one."""
    return settings.rotate != "none" or QUANTIZERS[settings.method].prepare is not None


def options_of(
    parent: Model, floats: Mapping[str, Any], rows: list[Rows], settings: Quantize, common: Common
) -> tuple[dict[str, Any], Chosen | None]:
    """The arguments of `quantize_parts` beside the model's, and under a budget what each layer's bits are chosen by."""
    share = settings.calibration_tokens // max(1, len(rows))
    batches = [batch for text in rows for batch in calibration_batches(parent, text, share, settings, common.seed)]
    seen = sum(int((batch.segments > 0).sum()) for batch in batches)
    if rows and not seen:
        raise DataError(f"{', '.join(str(text.paths[0]) for text in rows)}: no tokens to calibrate on")
    if rows and seen < settings.calibration_tokens // 2:
        common.progress.warn(f"the calibration text has {seen} tokens; {settings.calibration_tokens} were asked for")
    choice = choose(parent, floats, batches, settings, common.progress) if settings.is_mixed else None
    options = {
        "batches": batches,
        "spec": QuantSpec(bits=settings.bits, group_size=settings.group_size, symmetric=settings.symmetric),
        "method": settings.method,
        "embedding_bits": settings.embedding_bits,
        "fallback_group_size": settings.fallback_group_size,
        "specs": choice.specs if choice else None,
        "exclude": settings.exclude,
        "settings": {name: getattr(settings, name) for name in QUANTIZERS[settings.method].keys},
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
