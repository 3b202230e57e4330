"""The quantize stage: a model in, with adapters or without; a packed folder out."""

import dataclasses
import itertools
import json
from typing import Any

from compress.data.batch import Batch
from compress.data.batches import Batches
from compress.data.rows import Rows, keep_quarantine
from compress.models.folder import Model, architecture, load, save, to_host
from compress.quantize.calibrate import quantize_model
from compress.quantize.preflight import check_settings
from compress.quantize.quantizers import QUANTIZERS
from compress.quantize.settings import Quantize
from compress.settings import Common
from export.atomic import atomic_folder
from export.quantized import PackedTensor, QuantSpec

LAYERS = "layers.json"


def run(settings: Quantize, common: Common) -> dict[str, Any]:
    """Merge adapters into the (dequantized) base that they were trained on, quantize, and write.

    Raises:
      RecipeError: groups that do not divide a layer, a method without its calibration data.
      DataError, ArtifactError: data or a model that will not do.
    """
    assert common.out is not None and settings.model is not None
    check_settings(settings, architecture(settings.model))
    rows = calibration_rows(settings, common)
    with atomic_folder(common.out, common.force) as folder:
        given = load(settings.model)
        if given.is_quantized and given.adapters is None:
            common.progress.warn(f"{settings.model} is quantized already; its rounded weights are rounded once more")
        parent = given.merged().dequantized()
        result = quantize(parent, rows, settings, common)
        skipped = keep_quarantine(folder, *rows)
        (folder / LAYERS).write_text(json.dumps(result.layers) + "\n")
        facts = {"stage": "quantize", "method": settings.method, "model": settings.model}
        save(result.model, folder, facts)
    packed = [value for value in result.model.weights.values() if isinstance(value, PackedTensor)]
    return {
        "out": str(common.out),
        "method": settings.method,
        "bits": settings.bits,
        "group_size": settings.group_size,
        "symmetric": settings.symmetric,
        "tensors": {"quantized": len(packed), "of": sum(value.ndim == 2 for value in parent.weights.values())},
        "bytes": sum(value.nbytes for value in packed),
        **({"rows": {str(text.paths[0]): text.quarantine.counts() for text in rows}} if rows else {}),
        **skipped,
    }


@dataclasses.dataclass(frozen=True)
class Result:
    """The quantized model and its layers' output errors."""

    model: Model
    layers: list[dict[str, Any]]


def quantize(parent: Model, rows: list[Rows], settings: Quantize, common: Common) -> Result:
    """A float model's linears, and its embedding if asked, as groups of few bits."""
    spec = QuantSpec(bits=settings.bits, group_size=settings.group_size, symmetric=settings.symmetric)
    share = settings.calibration_tokens // max(1, len(rows))
    batches = [batch for text in rows for batch in calibration_batches(parent, text, share, settings, common.seed)]
    seen = sum(int((batch.segments > 0).sum()) for batch in batches)
    if rows and seen < settings.calibration_tokens // 2:
        common.progress.warn(f"the calibration text has {seen} tokens; {settings.calibration_tokens} were asked for")
    method = QUANTIZERS[settings.method]
    found = quantize_model(
        parent.config,
        parent.weights,
        batches,
        spec,
        settings.method,
        embedding_bits=settings.embedding_bits,
        fallback_group_size=settings.fallback_group_size,
        settings={name: getattr(settings, name) for name in method.settings},
        progress=common.progress,
    )
    return Result(dataclasses.replace(parent, weights=to_host(found.weights)), found.layers)


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
