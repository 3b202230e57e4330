"""The metrics by name: what a report lists and what a policy may bound.

A new metric is one function that finds its values in the evidence, and one line in METRICS.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from eval import divergence, perplexity, preference
from eval.preference import PairScores
from eval.quantization_error import SquaredError, total
from eval.report import Measurement, Size
from eval.retention import Retention
from eval.scores import TokenScores
from eval.stats import Estimate

CANDIDATE, PARENT, TEACHER, CUT, DISTILLED = "candidate", "parent", "teacher", "cut", "distilled"


@dataclasses.dataclass(frozen=True)
class Evidence:
    """All that was measured, from which every metric takes what it needs; what is left out yields no metric.

    Attributes:
      scores: by model name: candidate, parent, teacher, cut (the undistilled student), distilled, or any other.
      preference: by model name.
      retention: of the adapters, in the candidate.
      tensors: of the candidate's quantized tensors against the parent's.
      size: of the candidate.
      coverage: quantized weights over those of all its blocks' linears.
      confidence: of every interval.
      seed: of every interval.
    """

    scores: Mapping[str, TokenScores] = dataclasses.field(default_factory=dict)
    preference: Mapping[str, PairScores] = dataclasses.field(default_factory=dict)
    retention: Retention | None = None
    tensors: Sequence[SquaredError] = ()
    size: Size | None = None
    coverage: float | None = None
    confidence: float = 0.95
    seed: int = 0

    @property
    def draw(self) -> dict:
        return {"confidence": self.confidence, "seed": self.seed}


@dataclasses.dataclass(frozen=True)
class Found:
    """One value: of which model, against which baseline (or None), from how many tokens and documents."""

    model: str
    baseline: str | None
    estimate: Estimate
    tokens: int | None = None
    documents: int | None = None


@dataclasses.dataclass(frozen=True)
class Metric:
    """A metric's unit, how to find it, and how it may be judged.

    Attributes:
      interval: whether it has an interval. If so a gate judges by the interval's limits and never by the value alone;
        if not (a quantile, a maximum, a sum over all weights) it judges by the value.
      versus: whether it needs a baseline.
    """

    find: Callable[[Evidence], Iterator[Found]]
    unit: str
    interval: bool = True
    versus: bool = True


def measure(evidence: Evidence) -> list[Measurement]:
    """Every metric that the evidence supports, in METRICS' order."""
    return [_measurement(name, m.unit, found) for name, m in METRICS.items() for found in m.find(evidence)]


def _measurement(name: str, unit: str, found: Found) -> Measurement:
    e = found.estimate
    return Measurement(
        name=name,
        model=found.model,
        baseline=found.baseline,
        value=e.value,
        low=e.low,
        high=e.high,
        confidence=e.confidence,
        unit=unit,
        tokens=found.tokens,
        documents=found.documents,
    )


def _each(measure_one: Callable[..., Estimate]) -> Callable[[Evidence], Iterator[Found]]:
    """A metric of one model's token scores."""

    def find(evidence: Evidence) -> Iterator[Found]:
        for model, s in evidence.scores.items():
            yield Found(model, None, measure_one(s, **evidence.draw), s.tokens, s.documents)

    return find


def _compared(measure_one: Callable[..., Estimate]) -> Callable[[Evidence], Iterator[Found]]:
    """A metric of one model's token scores against each baseline that it was compared with."""

    def find(evidence: Evidence) -> Iterator[Found]:
        for model, s in evidence.scores.items():
            for baseline in s.kl:
                yield Found(model, baseline, measure_one(s, baseline, **evidence.draw), s.tokens, s.documents)

    return find


def _quantile(level: float) -> Callable[[Evidence], Iterator[Found]]:
    return _compared(lambda s, baseline, **_: divergence.kl_quantile(s, baseline, level))


def _bits_per_byte(evidence: Evidence) -> Iterator[Found]:
    for model, s in evidence.scores.items():
        if s.bytes is not None:
            yield Found(model, None, perplexity.bits_per_byte(s, **evidence.draw), s.tokens, s.documents)


def _perplexity_increase(evidence: Evidence) -> Iterator[Found]:
    for model, s in evidence.scores.items():
        for baseline in s.kl:
            if baseline in evidence.scores:
                increase = perplexity.perplexity_increase(evidence.scores[baseline], s, **evidence.draw)
                yield Found(model, baseline, increase, s.tokens, s.documents)


def _kl_gain(evidence: Evidence) -> Iterator[Found]:
    """Of the distilled student over the undistilled cut, against what both were compared with."""
    cut, distilled = evidence.scores.get(CUT), evidence.scores.get(DISTILLED)
    if cut is not None and distilled is not None:
        for baseline in distilled.kl:
            if baseline in cut.kl:
                gain = divergence.kl_gain(cut, distilled, baseline, **evidence.draw)
                yield Found(DISTILLED, baseline, gain, distilled.tokens, distilled.documents)


def _quantization_error(evidence: Evidence) -> Iterator[Found]:
    if evidence.tensors:
        whole = total("all", evidence.tensors)
        yield Found(CANDIDATE, PARENT, Estimate(whole.relative_mse))


def _coverage(evidence: Evidence) -> Iterator[Found]:
    if evidence.coverage is not None:
        yield Found(CANDIDATE, None, Estimate(evidence.coverage))


def _size(read: Callable[[Size], float]) -> Callable[[Evidence], Iterator[Found]]:
    def find(evidence: Evidence) -> Iterator[Found]:
        if evidence.size is not None:
            yield Found(CANDIDATE, None, Estimate(read(evidence.size)))

    return find


def _retained(read: Callable[..., Estimate]) -> Callable[[Evidence], Iterator[Found]]:
    def find(evidence: Evidence) -> Iterator[Found]:
        kept = evidence.retention
        if kept is not None:
            yield Found(CANDIDATE, None, read(kept, **evidence.draw), kept.tokens, len(kept.document))

    return find


def _pairs(measure_one: Callable[..., Estimate]) -> Callable[[Evidence], Iterator[Found]]:
    """A metric of preference pairs; `documents` counts the pairs."""

    def find(evidence: Evidence) -> Iterator[Found]:
        for model, pairs in evidence.preference.items():
            estimate = measure_one(pairs, confidence=evidence.confidence)
            yield Found(model, None, estimate, documents=pairs.pairs)

    return find


METRICS: dict[str, Metric] = {
    "perplexity": Metric(_each(perplexity.perplexity), "", versus=False),
    "perplexity_increase": Metric(_perplexity_increase, "fraction"),
    "bits_per_byte": Metric(_bits_per_byte, "bits/byte", versus=False),
    "kl_mean": Metric(_compared(divergence.kl_mean), "nats/token"),
    "kl_p50": Metric(_quantile(0.5), "nats/token", interval=False),
    "kl_p99": Metric(_quantile(0.99), "nats/token", interval=False),
    "kl_max": Metric(_quantile(1.0), "nats/token", interval=False),
    "top1_agreement": Metric(_compared(divergence.top1_agreement), "fraction"),
    "kl_gain": Metric(_kl_gain, "nats/token"),
    "quantization_error": Metric(_quantization_error, "fraction", interval=False),
    "coverage": Metric(_coverage, "fraction", interval=False, versus=False),
    "bits_per_weight": Metric(_size(lambda size: size.bits_per_weight), "bits", interval=False, versus=False),
    "size_ratio": Metric(_size(lambda size: size.ratio), "fraction", interval=False, versus=False),
    "adapter_retained": Metric(_retained(Retention.share), "fraction", versus=False),
    "adapter_residual": Metric(_retained(Retention.residual), "fraction", versus=False),
    "preference_accuracy": Metric(_pairs(preference.preference_accuracy), "fraction", versus=False),
    "preference_accuracy_gain": Metric(_pairs(preference.preference_accuracy_gain), "fraction", versus=False),
    "reward_accuracy": Metric(_pairs(preference.reward_accuracy), "fraction", versus=False),
    "reward_margin": Metric(_pairs(preference.reward_margin), "nats", versus=False),
}
