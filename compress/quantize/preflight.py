"""What must hold before any weight is quantized, checked before any work."""

import dataclasses
from collections.abc import Sequence
from fnmatch import fnmatchcase

from compress.errors import RecipeError
from compress.models.config import DecoderConfig
from compress.models.decoder import EMBEDDING, linears, shapes
from compress.quantize.quantizers import QUANTIZERS
from compress.quantize.rotate import require_rotation
from compress.quantize.settings import Quantize
from export.quantized import QuantSpec, misfits

SIZES = (256, 128, 64, 32)


def chosen(config: DecoderConfig, exclude: Sequence[str] = ()) -> dict[str, tuple[int, ...]]:
    """Shapes of the linears to quantize: those that no pattern of `exclude` matches.

    Raises:
      RecipeError: a pattern matches none, or they match all.
    """
    every = linears(config)
    first = next(iter(every))
    for pattern in exclude:
        if not any(fnmatchcase(name, pattern) for name in every):
            raise RecipeError(f"exclude: no linear of the model matches {pattern!r}; they are named as {first}")
    left = {name: shape for name, shape in every.items() if not any(fnmatchcase(name, p) for p in exclude)}
    if not left:
        raise RecipeError("exclude: the patterns match every linear of the model; nothing is left to quantize")
    return left


def require_fit(
    config: DecoderConfig,
    group_size: int,
    *,
    embedding: bool = False,
    method: str | None = None,
    exclude: Sequence[str] = (),
) -> None:
    """Every linear's inputs, and the embedding's width if asked, are a multiple of the group size.

    Raises:
      RecipeError: naming the layers whose are not, and the largest size that fits all.
    """
    wanted = ({EMBEDDING: shapes(config)[EMBEDDING]} if embedding else {}) | chosen(config, exclude)
    bad = misfits(wanted, group_size)
    if bad:
        fits = next((size for size in SIZES if size < group_size and not misfits(wanted, size)), None)
        cure = f"--group-size {fits} fits all layers" if fits else "none of 32 to 256 fits all layers, leave out some"
        if method == "nf4":
            cure = f"nf4 has no other blocks; with rtn {cure}"
        shown = ", ".join(bad[:6]) + (f" and {len(bad) - 6} more" if len(bad) > 6 else "")
        raise RecipeError(f"group_size = {group_size} does not divide the inputs of {shown}; {cure}")


def check_settings(settings: Quantize, config: DecoderConfig) -> None:
    """What the settings ask for can be done with a model of this architecture.

    Raises:
      RecipeError: groups that do not divide a layer's inputs, patterns that match no linear, a family whose residual
        stream cannot be rotated, or a method without its calibration data.
    """
    require_rotation(config, settings.rotate)
    spec = QuantSpec(bits=settings.bits, group_size=settings.group_size, symmetric=settings.symmetric)
    if settings.method == "nf4":
        require_fit(config, settings.group_size, method="nf4", exclude=settings.exclude)
    if settings.is_mixed:
        require_fit(config, min(settings.group_sizes), embedding=settings.budget_format == "gguf")
        if not settings.calibration:
            raise RecipeError("--calibration is missing: it takes text to measure what each layer's bits cost")
        return
    spec_of_layers(config, spec, settings.fallback_group_size, settings.embedding_bits, settings.exclude)
    if QUANTIZERS[settings.method].calibrated and not settings.calibration:
        raise RecipeError(
            f"--calibration is missing: {settings.method} needs text to calibrate on; or use --method rtn"
        )


def spec_of_layers(
    config: DecoderConfig,
    spec: QuantSpec,
    fallback_group_size: int | None,
    embedding_bits: int | None = None,
    exclude: Sequence[str] = (),
) -> dict[str, QuantSpec]:
    """Each linear's spec, and the embedding's if it has bits: `spec`, or the fallback's groups where its own misfit.

    Raises:
      RecipeError: as `chosen`, and as `require_fit`, of the layers that neither size divides.
    """
    wanted = ({EMBEDDING: shapes(config)[EMBEDDING]} if embedding_bits else {}) | chosen(config, exclude)
    specs = {}
    for name, shape in wanted.items():
        misfit = shape[-1] % spec.group_size
        size = fallback_group_size if misfit and fallback_group_size else spec.group_size
        bits = embedding_bits if name == EMBEDDING and embedding_bits else spec.bits
        specs[name] = dataclasses.replace(spec, group_size=size, bits=bits)
    if any(shape[-1] % specs[name].group_size for name, shape in wanted.items()):
        require_fit(config, fallback_group_size or spec.group_size, embedding=bool(embedding_bits), exclude=exclude)
    return specs
