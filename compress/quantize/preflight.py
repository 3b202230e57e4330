"""What must hold before any weight is quantized, checked before any work."""

import dataclasses

from compress.errors import RecipeError
from compress.models.config import DecoderConfig
from compress.models.decoder import EMBEDDING, linears, shapes
from compress.quantize.quantizers import QUANTIZERS
from compress.quantize.settings import Quantize
from export.quantized import QuantSpec, misfits

SIZES = (256, 128, 64, 32)


def require_fit(config: DecoderConfig, group_size: int, *, embedding: bool = False, method: str | None = None) -> None:
    """Every linear's inputs, and the embedding's width if asked, are a multiple of the group size.

    Raises:
      RecipeError: naming the layers whose are not, and the largest size that fits all.
    """
    wanted = ({EMBEDDING: shapes(config)[EMBEDDING]} if embedding else {}) | linears(config)
    bad = misfits(wanted, group_size)
    if bad:
        fits = next((size for size in SIZES if size < group_size and not misfits(wanted, size)), None)
        cure = f"--group-size {fits} fits all layers" if fits else "no group size of 32 to 256 fits all layers"
        if method == "nf4":
            cure = f"nf4 has no other blocks; with rtn {cure}"
        shown = ", ".join(bad[:6]) + (f" and {len(bad) - 6} more" if len(bad) > 6 else "")
        raise RecipeError(f"group_size = {group_size} does not divide the inputs of {shown}; {cure}")


def check_settings(settings: Quantize, config: DecoderConfig) -> None:
    """What the settings ask for can be done with a model of this architecture.

    Raises:
      RecipeError: groups that do not divide a layer's inputs, or a method without its calibration data.
    """
    spec = QuantSpec(bits=settings.bits, group_size=settings.group_size, symmetric=settings.symmetric)
    if settings.method == "nf4":
        require_fit(config, settings.group_size, method="nf4")
    if settings.is_mixed:
        require_fit(config, min(settings.group_sizes), embedding=settings.budget_format == "gguf")
        if not settings.calibration:
            raise RecipeError("--calibration is missing: it takes text to measure what each layer's bits cost")
        return
    spec_of_layers(config, spec, settings.fallback_group_size, settings.embedding_bits)
    if QUANTIZERS[settings.method].calibrated and not settings.calibration:
        raise RecipeError(
            f"--calibration is missing: {settings.method} needs text to calibrate on; or use --method rtn"
        )


def spec_of_layers(
    config: DecoderConfig, spec: QuantSpec, fallback_group_size: int | None, embedding_bits: int | None = None
) -> dict[str, QuantSpec]:
    """Each linear's spec, and the embedding's if it has bits: `spec`, or the fallback's groups where its own misfit.

    Raises:
      RecipeError: as `require_fit`, of the layers that neither size divides.
    """
    wanted = ({EMBEDDING: shapes(config)[EMBEDDING]} if embedding_bits else {}) | linears(config)
    specs = {}
    for name, shape in wanted.items():
        misfit = shape[-1] % spec.group_size
        size = fallback_group_size if misfit and fallback_group_size else spec.group_size
        bits = embedding_bits if name == EMBEDDING and embedding_bits else spec.bits
        specs[name] = dataclasses.replace(spec, group_size=size, bits=bits)
    if any(shape[-1] % specs[name].group_size for name, shape in wanted.items()):
        require_fit(config, fallback_group_size or spec.group_size, embedding=bool(embedding_bits))
    return specs
