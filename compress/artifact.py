"""Exported files: written, checked against the model that they came from, and checked again later."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from compress.errors import RecipeError
from compress.models.decoder import EMBEDDING, hidden_states, logits, stack
from compress.models.folder import Model, load
from compress.settings import Common, Export, Verify
from eval.report import Check
from export import FORMATS
from export.atomic import atomic_folder
from export.card import model_card
from export.checkpoint import kind
from export.errors import ArtifactError
from export.manifest import MANIFEST, read_manifest, verify_files, write_manifest
from export.peft import write as write_adapters
from export.quantized import QuantizedTensor

CARD = "README.md"
PROBE_TOKENS = 32
PROBE_LOGITS = 64
# Largest difference of a logit that rounding explains, as a share of the logits' standard deviation (of 1 at least):
# what is stored exactly differs only by the order of float32 sums; floats are rounded to bfloat16 or float16, and in
# GGUF an asymmetric group's minimum too; Q8_0 rounds every matrix to 8 bits. A wrong model differs by more than 1.
EXACT, ROUNDED, COARSE = 1e-3, 0.1, 0.5
INTEGERS = {"Q4_0": (4, True), "Q4_1": (4, False), "Q5_0": (5, True), "Q5_1": (5, False)}
PACKED = ("compressed-tensors", "bitsandbytes")
PEFT_BASES = (*PACKED, "safetensors")


def export(settings: Export, common: Common) -> dict[str, Any]:
    """Write a model in one format, or in several side by side.

    Raises:
      ArtifactError: the model cannot be read, or written in a format.
    """
    assert common.out is not None and settings.model is not None
    model = load(settings.model)
    with atomic_folder(common.out, common.force) as folder:
        several = len(settings.format) > 1
        written = {
            name: write_artifact(model, name, folder / name if several else folder, settings, settings.model)
            for name in settings.format
        }
    return {"out": str(common.out), "formats": written}


def write_artifact(model: Model, name: str, folder: Path, settings: Export, source: str) -> dict[str, Any]:
    """Write one format with model card and manifest, reload it, and compare logits; returns what was found.

    Adapters are merged, which only safetensors takes, since merged weights are floats again; or kept beside the base.

    Raises:
      RecipeError: adapters are to be kept in a format that PEFT does not read.
      ArtifactError: the reloaded files do not compute what the model does.
    """
    kept = model.adapters if settings.adapters == "keep" else None
    if kept is not None and name not in PEFT_BASES:
        raise RecipeError(f"adapters = keep: PEFT reads no {name}; export --format {' or '.join(PEFT_BASES)}")
    if kept is None and model.adapters is not None and name != "safetensors":
        raise ArtifactError(
            f"{source} has adapters; quantize it first, or export --format safetensors to merge them, "
            "or --adapters keep to write them beside their base"
        )
    model = model if kept else model.merged()
    require_form(model.is_nf4, name, settings.gguf_type, source)
    options: dict[str, Any] = {}
    if name == "gguf" and settings.gguf_type in INTEGERS:
        require_integers(model, settings.gguf_type, source)
    elif name == "gguf" and settings.gguf_type != "auto":
        model, options = model.dequantized(), {"float_type": settings.gguf_type}
    folder.mkdir(parents=True, exist_ok=True)
    FORMATS[name].write(model.checkpoint, folder, **options)
    if kept is not None:
        write_adapters(dataclasses.replace(kept, base="."), folder)
    expected = probe(model)
    difference = compare(load(folder), expected)
    bound = tolerance(name, model, expected, coarse=options.get("float_type") == "Q8_0")
    if not difference <= bound:
        raise ArtifactError(f"{name}: reloaded logits differ by {difference:.3g} from {source}, more than {bound:.3g}")
    size = artifact_bytes(folder)
    facts = {
        "source": Path(source).name,
        "format": name,
        "bytes": size,
        "probe": expected,
        "logit_difference": difference,
    } | ({"adapters": f"rank {kept.rank}, beside the base as PEFT has them"} if kept else {})
    write_card(folder, facts)
    return {"bytes": size, "logit_difference": difference}


def write_card(folder: Path, facts: dict[str, Any], said: dict[str, Any] | None = None, metrics: Any = None) -> None:
    """The model card, with what else is `said` of the model and its `metrics`; then the manifest that lists all."""
    lines = {
        "Format": facts["format"],
        "Bytes": facts["bytes"],
        "Largest logit difference to its source": facts["logit_difference"],
    } | ({"Adapters": facts["adapters"]} if "adapters" in facts else {})
    card = model_card(facts["source"], {**lines, **(said or {})}, metrics or {}, format=facts["format"])
    (folder / CARD).write_text(card, encoding="utf-8")
    write_manifest(folder, facts)


def require_integers(model: Model, gguf_type: str, source: str) -> None:
    """Refuse a GGUF type that the model's weights are not in: choosing their codes is the quantizer's work.

    Raises:
      RecipeError: the model is not in its bits, or has zero points where the type has none, or the other way round.
    """
    bits, symmetric = INTEGERS[gguf_type]
    specs = {value.spec for value in model.weights.values() if isinstance(value, QuantizedTensor)}
    if {spec.symmetric for spec in specs if spec.bits == bits} != {symmetric}:
        cure = f"compress quantize --bits {bits} {'--symmetric' if symmetric else '--asymmetric'} first"
        raise RecipeError(f"gguf_type = {gguf_type}: the weights of {source} are not in it; {cure}")


def require_form(is_nf4: bool, name: str, gguf_type: str, source: str) -> None:
    """Refuse to write NF4 in a form of integers, and anything else as NF4: choosing codes is the quantizer's work.

    Raises:
      RecipeError: it says which method of `quantize` to take, or which format.
    """
    floats = name == "safetensors" or (name == "gguf" and gguf_type in ("F16", "Q8_0"))
    if is_nf4 and name != "bitsandbytes" and not floats:
        raise RecipeError(
            f"{name}: it has no NF4, and the weights of {source} are in it; compress quantize --method gptq first, "
            "or export --format bitsandbytes or safetensors"
        )
    if name == "bitsandbytes" and not is_nf4:
        raise RecipeError(f"the weights of {source} are not in NF4: compress quantize --method nf4 first")


def tolerance(name: str, model: Model, expected: dict[str, Any], *, coarse: bool = False) -> float:
    """How far logits of a reloaded format may be off; `expected` is their probe, which tells how large they are."""
    packed = name in PACKED and not isinstance(model.weights[EMBEDDING], QuantizedTensor)
    share = COARSE if coarse else EXACT if packed else ROUNDED
    return share * max(1.0, float(np.std(expected["logits"])))


def probe(model: Model) -> dict[str, Any]:
    """Fixed token ids and some of the logits that the model gives them: enough to know the model by."""
    vocabulary = model.config.vocab_size
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, vocabulary, PROBE_TOKENS)
    columns = np.unique(draw.integers(0, vocabulary, PROBE_LOGITS))
    found = run_probe(model, tokens, columns)
    return {"tokens": tokens.tolist(), "columns": columns.tolist(), "logits": found.round(6).tolist()}


def run_probe(model: Model, tokens: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Logits [tokens, columns]."""

    @jax.jit
    def run(stacked, tokens):
        return logits(model.config, stacked, hidden_states(model.config, stacked, tokens[None]))[0]

    stacked = stack(model.config, model.merged().weights)
    return np.asarray(run(stacked, jnp.asarray(tokens)))[:, columns]


def compare(model: Model, expected: dict[str, Any]) -> float:
    """The largest difference between the model's logits and those of a probe.

    Raises:
      ArtifactError: the probe is not one.
    """
    try:
        tokens, columns = (np.asarray(expected[name], np.int64) for name in ("tokens", "columns"))
        wanted = np.asarray(expected["logits"], np.float64)
        fits = wanted.shape == (len(tokens), len(columns)) and tokens.size and columns.size
    except (KeyError, TypeError, ValueError, OverflowError):
        fits = False
    if not fits or min(tokens.min(), columns.min()) < 0 or max(tokens.max(), columns.max()) >= model.config.vocab_size:
        raise ArtifactError(f"{MANIFEST}: its probe does not fit the model; export it anew")
    return float(np.abs(run_probe(model, tokens, columns) - wanted).max())


def verify(settings: Verify, common: Common) -> dict[str, Any]:
    """Check an artifact's files against its manifest, reload them, and compare logits with the recorded ones.

    Raises:
      ArtifactError: files are missing, changed or extra, or the logits are not those of the model they came from.
    """
    assert settings.model is not None
    path = Path(settings.model)
    if not path.is_dir():
        raise ArtifactError(f"{path}: not a folder; give the folder that export wrote")
    folders = [path] if (path / MANIFEST).exists() else sorted(found.parent for found in path.glob(f"*/{MANIFEST}"))
    if not folders:
        raise ArtifactError(f"{path}: no {MANIFEST}; only what compress exported can be verified")
    return {"verified": {folder.name: verify_folder(folder, settings.reference) for folder in folders}}


def verify_folder(folder: Path, reference: str | None) -> dict[str, Any]:
    """One format's folder: its files, and its logits against `reference` or the recorded probe."""
    problems = verify_files(folder)
    if problems:
        raise ArtifactError(f"{folder}: {'; '.join(problems[:8])}")
    facts = read_manifest(folder).get("facts")
    expected = facts.get("probe") if isinstance(facts, dict) else None
    if reference:
        expected = probe(load(reference).merged())
    if expected is None:
        return {"files": "unchanged", "logits": "no record to compare with; give --reference"}
    name, model = kind(folder), load(folder)
    difference, bound = compare(model, expected), tolerance(name, model, expected)
    recorded = facts.get("logit_difference") if isinstance(facts, dict) else None
    if isinstance(recorded, float) and not reference:
        bound = max(bound, min(2 * recorded, tolerance(name, model, expected, coarse=True)))
    if not difference <= bound:
        raise ArtifactError(f"{folder}: logits differ by {difference:.3g} from their source, more than {bound:.3g}")
    return {"format": name, "files": "unchanged", "logit_difference": difference}


def check_of(folder: Path) -> Check:
    """Whether an exported format is, file by file and logit by logit, what was exported."""
    try:
        found = verify_folder(folder, None)
    except ArtifactError as error:
        return Check(folder.name, False, str(error))
    if "logit_difference" not in found:
        return Check(folder.name, None, found["logits"])
    return Check(folder.name, True, f"reloaded logits differ by at most {found['logit_difference']:.3g}")


def artifact_bytes(folder: Path) -> int:
    """Bytes of all files of a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def read_json(path: Path) -> Any:
    """A JSON file that this program wrote.

    Raises:
      ArtifactError: somebody has damaged it since.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path}: not valid JSON ({error}); run with --force to make it anew") from error
