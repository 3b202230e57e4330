"""What must hold before any weight is quantized, checked before any work."""

import dataclasses

from compress.errors import RecipeError
from compress.models.config import DecoderConfig
from compress.models.decoder import EMBEDDING, linears, shapes
from export.quantized import QuantSpec, misfits

SIZES = (256, 128, 64, 32)


def require_fit(config: DecoderConfig, group_size: int, *, embedding: bool = False) -> None:
    """Every linear's inputs, and the embedding's width if asked, are a multiple of the group size.

    Raises:
      RecipeError: naming the layers whose are not, and the largest size that fits all.
    """
    wanted = linears(config) | ({EMBEDDING: shapes(config)[EMBEDDING]} if embedding else {})
    bad = misfits(wanted, group_size)
    if bad:
        fits = next((size for size in SIZES if size < group_size and not misfits(wanted, size)), None)
        cure = f"--group-size {fits} fits all layers" if fits else "no group size of 32 to 256 fits all layers"
        shown = ", ".join(bad[:6]) + (f" and {len(bad) - 6} more" if len(bad) > 6 else "")
        raise RecipeError(f"group_size = {group_size} does not divide the inputs of {shown}; {cure}")


def spec_of_layers(config: DecoderConfig, spec: QuantSpec, fallback_group_size: int | None) -> dict[str, QuantSpec]:
    """Each linear's spec: `spec`, or with the fallback's groups where its own do not divide.

    Raises:
      RecipeError: as `require_fit`, of the layers that neither size divides.
    """
    if fallback_group_size is None:
        require_fit(config, spec.group_size)
        return dict.fromkeys(linears(config), spec)
    fallback = dataclasses.replace(spec, group_size=fallback_group_size)
    specs = {}
    for name, shape in linears(config).items():
        specs[name] = spec if shape[-1] % spec.group_size == 0 else fallback
    if any(shape[-1] % specs[name].group_size for name, shape in linears(config).items()):
        require_fit(config, fallback_group_size)
    return specs
