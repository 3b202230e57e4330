"""Bits and group size of each layer, under a budget or a limit of KL: measured, chosen, and written down."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from compress.data.batch import Batch
from compress.errors import RecipeError
from compress.models.decoder import EMBEDDING, HEAD
from compress.models.folder import Model
from compress.quantize.allocate import Choice, Point, frontier, least, total, under_budget, under_kl
from compress.quantize.layer import JOIN
from compress.quantize.sensitivity import sensitivities
from compress.quantize.settings import Quantize, parse_budget
from export.gguf_blocks import QUANTIZED
from export.quantized import QuantSpec

HEADER = 512
"""Bytes that at most stand in a file's header for a tensor."""


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Each tensor's spec, and for the folder what it was chosen by: sensitivities, frontier and choice."""

    specs: dict[str, QuantSpec]
    record: dict[str, Any]


def choose(
    model: Model,
    weights: Mapping[str, Any],
    batches: Sequence[Batch],
    settings: Quantize,
    progress: Callable[..., None],
) -> Chosen:
    """Measure what each unit costs alone on the calibration text, and choose its spec.

    Raises:
      RecipeError: nothing that is allowed is small or close enough; it says what is.
    """
    blocks = settings.budget_format == "gguf"
    # As engines load compressed-tensors, its embedding is floats.
    outside = [name for name in ((EMBEDDING, HEAD) if blocks else (HEAD,)) if name in weights]
    rows = first_rows(batches, settings.sensitivity_tokens)
    units = sensitivities(
        model.config, weights, rows, candidates(settings), outside=outside, blocks=blocks, progress=progress
    )
    names = [name for unit in units for name in unit.split(JOIN)]
    count = sum(math.prod(weights[name].shape) for name in names)
    beside = bytes_beside(model, weights, set(names), blocks=blocks)
    if settings.max_kl is not None:
        choice = under_kl(units, settings.max_kl)
        if choice is None:
            raise RecipeError(f"max_kl = {settings.max_kl}: the least that can be had is {frontier(units)[-1].kl:.3g}")
    else:
        assert settings.budget is not None
        amount, unit = parse_budget(settings.budget)
        choice = under_budget(units, amount * 1e6 - beside if unit == "MB" else amount * count / 8)
        if choice is None:
            fewest = total(least(units)).bytes
            lowest = f"{(fewest + beside) / 1e6:.1f} MB" if unit == "MB" else f"{8 * fewest / count:.2f} bits"
            raise RecipeError(
                f"budget = {settings.budget}: the least that can be had is {lowest}; allow that, or fewer bits"
            )

    def told(point: Point) -> dict[str, int | float]:
        return {"bytes": point.bytes + beside, "bits": 8 * point.bytes / count, "kl": point.kl}

    specs = specs_of(choice)
    record = {
        "format": settings.budget_format,
        "tokens": sum(int((batch.segments > 0).sum()) for batch in rows),
        "weights": count,
        "bytes_beside": beside,
        "chosen": told(total(choice)),
        "specs": {name: dataclasses.asdict(spec) for name, spec in specs.items()},
        "frontier": [told(point) for point in frontier(units)],
        "kl_if_only_this": {
            unit: [{**dataclasses.asdict(spec), "bytes": size, "kl": kl} for spec, size, kl in options]
            for unit, options in units.items()
        },
    }
    return Chosen(specs, record)


def candidates(settings: Quantize) -> list[QuantSpec]:
    """What a unit may become; where zero points are wanted, each may do without."""
    found = [
        QuantSpec(bits, size, symmetric)
        for size in settings.group_sizes
        for bits in settings.allowed_bits
        for symmetric in ((True,) if settings.symmetric else (True, False))
    ]
    if settings.budget_format == "gguf":
        return [spec for spec in found if (spec.bits, spec.symmetric) in QUANTIZED]
    return found


def specs_of(choice: Choice) -> dict[str, QuantSpec]:
    """Each tensor's spec."""
    return {name: option.spec for unit, option in choice.items() for name in unit.split(JOIN)}


def bytes_beside(model: Model, weights: Mapping[str, Any], quantized: set[str], *, blocks: bool) -> int:
    """Bytes of an artifact beside its quantized tensors: floats, the tokenizer's files and headers."""
    vector = 4 if blocks else 2
    floats = sum(
        math.prod(value.shape) * (vector if value.ndim == 1 else 2)
        for name, value in weights.items()
        if name not in quantized
    )
    return floats + sum(map(len, model.files.values())) + HEADER * len(weights)


def first_rows(batches: Sequence[Batch], tokens: int) -> list[Batch]:
    """The first rows that have so many tokens, at least one."""
    left = max(1, tokens // batches[0].tokens.shape[1])
    taken: list[Batch] = []
    for batch in batches:
        taken.append(jax.tree.map(lambda leaf, rows=left: leaf[:rows], batch))
        left -= len(batch.tokens)
        if left <= 0:
            break
    return taken
