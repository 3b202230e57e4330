"""The report: what was measured, on what, by which convention. `docs/report.md` documents the JSON."""

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import field

import numpy as np

from eval import schema
from eval.divergence import TAIL
from eval.errors import EvidenceError
from eval.quantization_error import SquaredError
from eval.scores import TokenScores

SCHEMA = "compress.report"
VERSION = 1


@dataclasses.dataclass(frozen=True)
class Convention:
    """How perplexity was measured: two numbers compare only if all of this agrees."""

    name: str
    window: int
    stride: int
    bos: bool
    tokens: int
    documents: int
    data: str
    data_sha256: str
    seed: int
    document: str = "a row; rows and plain text are cut into contiguous blocks of at most 1024 tokens"


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A metric's value, with its two-sided interval where there is one. None is missing or not finite."""

    name: str
    model: str
    baseline: str | None
    value: float | None
    low: float | None = None
    high: float | None = None
    confidence: float | None = None
    unit: str = ""
    tokens: int | None = None
    documents: int | None = None


@dataclasses.dataclass(frozen=True)
class ErrorRow:
    """The error of one tensor or of one layer's output; `sqnr_db` is None without error."""

    name: str
    relative_mse: float | None
    mse: float | None
    sqnr_db: float | None
    max_abs: float | None
    count: int

    @classmethod
    def of(cls, e: SquaredError) -> "ErrorRow":
        return cls(e.name, finite(e.relative_mse), finite(e.mse), finite(e.sqnr_db), finite(e.max_abs), e.count)


@dataclasses.dataclass(frozen=True)
class QuantizedRow:
    """How one weight was quantized, and what it cost.

    Attributes:
      method: "none" for a weight that stays in floats; then `bits` and what follows are None.
      bytes: of codes and scales; of floats two a weight.
      error, reference: sums of the weight's squared error and of its squares.
      sqnr_db: of the weight; None without error.
      output_sqnr_db: of the linear's output on the calibration text; None without text or error.
      fallback: what was not done as asked, and why.
    """

    name: str
    method: str
    weights: int
    bytes: int
    bits: int | None = None
    group_size: int | None = None
    error: float | None = None
    reference: float | None = None
    max_abs: float | None = None
    sqnr_db: float | None = None
    output_sqnr_db: float | None = None
    fallback: str | None = None

    @classmethod
    def of(
        cls,
        e: SquaredError,
        method: str,
        size: int,
        bits: int,
        group_size: int,
        output: SquaredError | None = None,
        fallback: str | None = None,
    ) -> "QuantizedRow":
        """The row of a weight from its error and that of its outputs."""
        sums = (finite(e.error), finite(e.reference), finite(e.max_abs), finite(e.sqnr_db))
        heard = None if output is None else finite(output.sqnr_db)
        return cls(e.name, method, e.count, size, bits, group_size, *sums, heard, fallback)

    @property
    def squared_error(self) -> SquaredError:
        """The error as sums that add up; NaN where it was not finite."""
        nan = math.nan
        sums = [nan if value is None else value for value in (self.error, self.reference, self.max_abs)]
        return SquaredError(self.name, sums[0], sums[1], self.weights, sums[2])


def worst_first(rows: Sequence[QuantizedRow]) -> list[QuantizedRow]:
    """Quantized weights by the noise at their outputs, or in themselves where that is not known."""

    def rank(row: QuantizedRow) -> float:
        heard = row.sqnr_db if row.output_sqnr_db is None else row.output_sqnr_db
        # Without decibels it is exact, or it was not finite.
        return heard if heard is not None else math.inf if row.error == 0 else -math.inf

    return sorted((row for row in rows if row.bits is not None), key=rank)


@dataclasses.dataclass(frozen=True)
class SizePart:
    """A part of the artifact (embedding, attention, ...): its weights and the bytes that they take."""

    name: str
    weights: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Size:
    """Bytes by part, against 2 bytes a weight in bf16."""

    parts: list[SizePart]

    @property
    def weights(self) -> int:
        return sum(part.weights for part in self.parts)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.bytes / self.weights if self.weights else math.nan

    @property
    def ratio(self) -> float:
        """Size over the size in bf16."""
        return self.bits_per_weight / 16


@dataclasses.dataclass(frozen=True)
class Event:
    """What a guard did at a step of a stage."""

    step: int
    text: str


@dataclasses.dataclass(frozen=True)
class Curve:
    """A value that a stage logged over its steps, and what happened; a value that was not finite is None."""

    stage: str
    name: str
    steps: list[int]
    values: list[float | None]
    events: list[Event] = field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Tail:
    """Quantiles over tokens of KL(baseline || model) in nats; level 1 is the maximum."""

    model: str
    baseline: str
    levels: list[float]
    values: list[float | None]


@dataclasses.dataclass(frozen=True)
class Generation:
    """What each model answered to a prompt."""

    prompt: str
    outputs: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Check:
    """A check of the artifact's files; `passed` is None if it could not be made."""

    name: str
    passed: bool | None
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """All of it. A part that was not measured is empty, and a gate that asks for it is inconclusive."""

    name: str
    convention: Convention | None = None
    metrics: list[Measurement] = field(default_factory=list)
    tensors: list[ErrorRow] = field(default_factory=list)
    layers: list[ErrorRow] = field(default_factory=list)
    quantization: list[QuantizedRow] = field(default_factory=list)
    size: Size | None = None
    tails: list[Tail] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    stages: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def find(self, name: str, model: str, baseline: str | None) -> list[Measurement]:
        """The measurements of that name; a valid report has at most one."""
        key = (name, model, baseline)
        return [m for m in self.metrics if (m.name, m.model, m.baseline) == key]


def to_json(report: Report) -> str:
    """The text of report.json. A value that is not finite becomes null.

    Raises:
      EvidenceError: if `from_json` would refuse the text.
    """
    check(report, "report")
    document = {"schema": SCHEMA, "version": VERSION, **schema.encode(report)}
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def from_json(text: str | bytes, source: str = "report.json") -> Report:
    """Read and validate report.json.

    Raises:
      EvidenceError: if it is not JSON, of another schema or version, or holds what a report cannot hold.
    """
    document = schema.parse(text, source)
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise EvidenceError(f'{source}: not a report: its "schema" must be "{SCHEMA}"')
    version = document.get("version")
    if version != VERSION or isinstance(version, bool):
        raise EvidenceError(f"{source}: version {version!r:.20}; this program reads version {VERSION}")
    body = {key: value for key, value in document.items() if key not in ("schema", "version")}
    report = schema.decode(Report, body, source)
    check(report, source)
    return report


def check(report: Report, source: str) -> None:
    """Refuse a report that contradicts itself.

    Raises:
      EvidenceError: for a doubled measurement, an interval that does not hold its value, curves or tails of unequal
        lengths, or negative counts.
    """
    seen = set()
    for m in report.metrics:
        key = (m.name, m.model, m.baseline)
        where = f"{source}: metric {title(m)}"
        if key in seen:
            raise EvidenceError(f"{where} is there twice")
        seen.add(key)
        if not sound(m):
            raise EvidenceError(f"{where}: low <= value <= high and 0 < confidence < 1 do not hold")
        if min(m.tokens or 0, m.documents or 0) < 0:
            raise EvidenceError(f"{where}: a negative count")
    lengths = [(f"curve {c.stage} {c.name}", len(c.steps), len(c.values)) for c in report.curves]
    lengths += [(f"tail {t.model} {t.baseline}", len(t.levels), len(t.values)) for t in report.tails]
    for where, points, values in lengths:
        if points != values:
            raise EvidenceError(f"{source}: {where[:100]}: {points} points but {values} values")
    for part in report.size.parts if report.size else ():
        if part.weights < 0 or part.bytes < 0:
            raise EvidenceError(f"{source}: size of {part.name[:100]}: a negative count")


def sound(m: Measurement) -> bool:
    """Whether the limits, where finite, enclose the value, and the confidence is one."""
    low, value, high = (finite(x) for x in (m.low, m.value, m.high))
    ordered = [x for x in (low, value, high) if x is not None]
    return ordered == sorted(ordered) and (m.confidence is None or 0 < m.confidence < 1)


def title(m: Measurement) -> str:
    """'kl_mean of candidate against parent'."""
    return f"{m.name} of {m.model}" + (f" against {m.baseline}" if m.baseline else "")


def finite(x: float | None) -> float | None:
    """x, or None if it is missing, NaN or infinite."""
    return None if x is None or not math.isfinite(x) else float(x)


def tail(scores: TokenScores, model: str, baseline: str) -> Tail:
    """The KL tail for the report, from a model's scores."""
    kl = scores.kl[baseline].astype(np.float64)
    known = bool(len(kl)) and bool(np.all(np.isfinite(kl)))
    values = [float(np.quantile(kl, level)) if known else None for level in TAIL]
    return Tail(model, baseline, list(TAIL), values)
