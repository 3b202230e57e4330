"""What can be known to fail before a run's first stage starts, so that no hour of training is lost to it."""

from pathlib import Path
from typing import Any

from compress import gate
from compress.artifact import require_form
from compress.data.rows import Rows
from compress.distill.cache import check_temperatures, check_top_k
from compress.distill.student import student_architecture
from compress.errors import RecipeError
from compress.models.config import DecoderConfig
from compress.models.folder import architecture
from compress.quantize.preflight import check_settings, require_fit
from compress.settings import Data
from export.errors import ArtifactError
from export.gguf_blocks import require_gguf_form


def preflight(stages: dict[str, Any], data: Data, policy: Path | None) -> None:
    """Check the settings of a run's stages, in order, against the files that they name and against each other.

    Raises:
      RecipeError: groups that do not divide a layer's inputs, a method without its calibration data, no such student,
        a temperature that the cache to be made will not be at.
      DataError: a data file that is not there, or is none.
      ArtifactError: a model that cannot be read.
      EvidenceError: the policy is none.
    """
    gate.read_policy(policy)
    if {"quantize", "export"} <= stages.keys():
        for name in stages["export"].format:
            require_form(stages["quantize"].method == "nf4", name, stages["export"].gguf_type, "[quantize]")
    if "gguf" in getattr(stages.get("export"), "format", ()) and stages["export"].gguf_type not in ("F16", "Q8_0"):
        _require_gguf_form(stages)
    for settings in stages.values():
        for key in ("data", "valid", "calibration"):
            if getattr(settings, key, ()):
                Rows(getattr(settings, key), columns=data.columns, bad_rows=data.bad_rows)
    if "cache_teacher" in stages:
        cache, distill = stages["cache_teacher"], stages["distill"]
        check_top_k(cache.top_k, architecture(cache.teacher).vocab_size)
        check_temperatures(distill.teacher_cache, cache.top_k, cache.temperature, distill)
    config = _first_model(stages)
    if config is None:
        return
    if "distill" in stages:
        distill, aligned = stages["distill"], stages.get("align")
        if distill.landing != "none" and distill.rank is None:  # under adapters the base may have groups of its own
            require_fit(config, distill.group_size)
        if aligned and not distill.is_rounded:
            require_fit(config, aligned.group_size, method=aligned.base)
    if "quantize" in stages:
        check_settings(stages["quantize"], config)


def _require_gguf_form(stages: dict[str, Any]) -> None:
    """What the last stage that rounds makes has a block type.

    Raises:
      RecipeError: it has none.
    """
    rounds = {"quantize": "quantize" in stages, "distill": getattr(stages.get("distill"), "is_rounded", False)}
    name = next((name for name, does in rounds.items() if does), None)
    if name is None:
        return
    settings = stages[name]
    mixed = getattr(settings, "is_mixed", False)
    wanted = settings.allowed_bits if mixed else (settings.bits or 4, getattr(settings, "embedding_bits", None))
    try:
        for bits in filter(None, wanted):
            require_gguf_form(f"[{name}]", bits, settings.symmetric or mixed)
    except ArtifactError as error:
        raise RecipeError(str(error)) from None


def _first_model(stages: dict[str, Any]) -> DecoderConfig | None:
    """The architecture that the first stage makes or reads; no later one changes it."""
    if "distill" in stages:
        return student_architecture(stages["distill"].student, architecture(stages["distill"].teacher))
    first = next(iter(stages.values()))
    return architecture(first.model) if getattr(first, "model", None) else None
