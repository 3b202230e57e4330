"""The gate: a policy's rules applied to a report's measurements.

A rule passes only on evidence. What is missing, not finite, contradictory or too little is inconclusive.
"""

import dataclasses
import sys
import tomllib
from typing import Any, Literal

from eval.errors import EvidenceError
from eval.metrics import CANDIDATE, METRICS, PARENT, TEACHER
from eval.report import Measurement, Report, finite, sound
from eval.schema import did_you_mean

PASS, WARN, FAIL, INCONCLUSIVE, SKIPPED = "pass", "warn", "fail", "inconclusive", "skipped"

BUILT_IN = """\
# Against the unquantized parent: perplexity may rise by 5% (a warning from 2% on) ...
[[rule]]
metric = "perplexity_increase"
baseline = "parent"
bound = "max"
limit = 0.05
warn = 0.02
min_documents = 4

# ... and the mean KL divergence a token may be 0.1 nats.
[[rule]]
metric = "kl_mean"
baseline = "parent"
bound = "max"
limit = 0.1
min_documents = 4

# The distilled student is closer to the teacher than the undistilled cut was.
[[rule]]
metric = "kl_gain"
model = "distilled"
baseline = "teacher"
bound = "min"
limit = 0.0
min_documents = 4
requires = "distill"
"""


@dataclasses.dataclass(frozen=True)
class Rule:
    """One bound on one metric.

    Attributes:
      metric: a key of METRICS.
      bound: "max": the metric may be at most `limit`; "min": at least.
      limit: in the metric's unit; 0.05 is 5% of a fraction.
      baseline: "parent" or "teacher"; None for a metric that has none.
      model: whose metric.
      warn: a stricter limit; to pass the rule without passing this one is a warning.
      min_tokens: fewer scored tokens are too little evidence.
      min_documents: the same of documents (of pairs, for a preference metric).
      requires: the rule applies only if the report says that this stage ran.
    """

    metric: str
    bound: Literal["max", "min"]
    limit: float
    baseline: str | None = None
    model: str = CANDIDATE
    warn: float | None = None
    min_tokens: int = 0
    min_documents: int = 0
    requires: str | None = None

    def describe(self) -> str:
        """'kl_mean of candidate against parent at most 0.1'."""
        against = f" against {self.baseline}" if self.baseline else ""
        return f"{self.metric} of {self.model}{against} {_WORD[self.bound]} {self.limit:.4g}"


@dataclasses.dataclass(frozen=True)
class Policy:
    rules: tuple[Rule, ...]

    @classmethod
    def from_toml(cls, text: str, source: str = "gate.toml") -> "Policy":
        """Read a policy: `[[rule]]` tables whose keys are Rule's fields.

        Raises:
          EvidenceError: naming the rule, for an unknown key or metric, a wrong type, or a policy without rules.
        """
        try:
            table = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise EvidenceError(f"{source}: not TOML: {error}") from None
        for key in table:
            if key != "rule":
                raise EvidenceError(f"{source}: no table '{key[:100]}'; a policy is a list of [[rule]]")
        rules = table.get("rule", [])
        if not isinstance(rules, list) or not rules or not all(isinstance(rule, dict) for rule in rules):
            raise EvidenceError(f"{source}: no [[rule]]; a policy without rules can't pass anything")
        return cls(tuple(_rule(rule, f"{source} rule {i}") for i, rule in enumerate(rules, 1)))

    @classmethod
    def built_in(cls) -> "Policy":
        """The policy that holds where none is given."""
        return cls.from_toml(BUILT_IN, "the built-in policy")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one rule: its subject, its status, and the sentence why."""

    subject: str
    status: str
    why: str


@dataclasses.dataclass(frozen=True)
class Verdict:
    outcomes: tuple[Outcome, ...]

    @property
    def status(self) -> str:
        """The worst first: fail, then inconclusive (any, or none judged), then warn, then pass."""
        found = {outcome.status for outcome in self.outcomes}
        if FAIL in found:
            return FAIL
        if INCONCLUSIVE in found or not found & {PASS, WARN}:
            return INCONCLUSIVE
        return WARN if WARN in found else PASS

    @property
    def exit_code(self) -> int:
        """0 pass (with warnings too), 1 fail, 3 inconclusive."""
        return {PASS: 0, WARN: 0, FAIL: 1, INCONCLUSIVE: 3}[self.status]

    def sentence(self) -> str:
        """The verdict in one line, with the reason if it isn't a pass."""
        reasons = [f"{o.subject}: {o.why}" for o in self.outcomes if o.status == self.status]
        if self.status == PASS:
            return f"pass: {sum(o.status == PASS for o in self.outcomes)} of {len(self.outcomes)} rules apply and hold"
        return f"{self.status}: " + ("; ".join(reasons) or "no rule applied, so nothing was judged")


def judge(report: Report, policy: Policy) -> Verdict:
    """Apply every rule of the policy, and every check of the artifact that the report lists.

    Of a metric with an interval, "max" passes if the upper confidence limit is at most the limit, fails if the lower
    one is above it, and is inconclusive in between; "min" mirrors that. Of a metric without one (quantiles, the
    maximum, sums over all weights: `METRICS[...].interval` is false), the value alone is held against the limit.
    """
    outcomes = [_apply(rule, report) for rule in policy.rules]
    for check in report.checks:
        status = {True: PASS, False: FAIL}.get(check.passed, INCONCLUSIVE)  # type: ignore[arg-type]
        outcomes.append(Outcome(f"artifact check {check.name}", status, check.detail or _CHECKED[status]))
    if all(outcome.status == SKIPPED for outcome in outcomes[: len(policy.rules)]):
        outcomes.append(Outcome("policy", INCONCLUSIVE, "no rule applies to this report, so nothing was judged"))
    return Verdict(tuple(outcomes))


_WORD = {"max": "at most", "min": "at least"}
_CHECKED = {PASS: "holds", FAIL: "does not hold", INCONCLUSIVE: "could not be made"}


def _apply(rule: Rule, report: Report) -> Outcome:
    def outcome(status: str, why: str) -> Outcome:
        return Outcome(rule.describe(), status, why)

    if rule.requires and rule.requires not in report.stages:
        return outcome(SKIPPED, f"stage {rule.requires} did not run")
    found = report.find(rule.metric, rule.model, rule.baseline)
    if len(found) != 1:
        return outcome(INCONCLUSIVE, f"measured {len(found)} times" if found else _absent(rule, report))
    (m,) = found
    problem = _insufficient(rule, m)
    if problem:
        return outcome(INCONCLUSIVE, problem)
    status, seen = _compare(rule, m, rule.limit)
    if status == PASS and rule.warn is not None and _compare(rule, m, rule.warn)[0] != PASS:
        return outcome(WARN, f"{seen} holds, but not the stricter {_WORD[rule.bound]} {rule.warn:.4g}")
    said = {
        PASS: "holds",
        FAIL: "is beyond the limit",
        INCONCLUSIVE: "includes the limit; score more documents",
    }
    return outcome(status, f"{seen} {said[status]}")


def _insufficient(rule: Rule, m: Measurement) -> str | None:
    """Why this measurement can't decide the rule, or None."""
    if finite(m.value) is None:
        return "the value is missing or not finite"
    for unit in ("tokens", "documents"):
        have, need = getattr(m, unit), getattr(rule, f"min_{unit}")
        if (have or 0) < need:
            return f"only {have or 0} {unit} were scored, {need} are needed"
    if not sound(m):
        return "the interval does not hold the value"
    metric = METRICS.get(rule.metric)
    # A metric that should have an interval and has none was seen on too few documents to know its spread.
    if (metric is None or metric.interval) and (finite(m.low) is None or finite(m.high) is None):
        return f"{m.value:.4g} has no finite confidence interval; score more documents"
    return None


def _compare(rule: Rule, m: Measurement, limit: float) -> tuple[str, str]:
    """Hold the interval (or the value) against `limit`: the status, and what was held against it, in words."""
    low, high = (m.low, m.high) if METRICS[rule.metric].interval else (m.value, m.value)
    assert low is not None, "_insufficient saw to it"
    assert high is not None, "_insufficient saw to it"
    shown = f"{m.value:.4g} [{low:.4g}, {high:.4g}]" if METRICS[rule.metric].interval else f"{m.value:.4g}"
    inside, outside = (high <= limit, low > limit) if rule.bound == "max" else (low >= limit, high < limit)
    return PASS if inside else FAIL if outside else INCONCLUSIVE, shown


def _absent(rule: Rule, report: Report) -> str:
    found = [m for m in report.metrics if m.name == rule.metric]
    others = [f"{m.model} against {m.baseline}" if m.baseline else m.model for m in found]
    return "not measured" + (f"; measured: {', '.join(others[:5])}" if others else "")


def _rule(table: dict[str, Any], where: str) -> Rule:
    fields = {field.name for field in dataclasses.fields(Rule)}
    for key in table:
        if key not in fields:
            raise EvidenceError(f"{where}: no key '{key[:100]}'{did_you_mean(key, sorted(fields))}")
    missing = [key for key in ("metric", "bound", "limit") if key not in table]
    if missing:
        raise EvidenceError(f"{where}: missing {', '.join(missing)}")
    for key, value in table.items():
        _check_type(key, value, where)
    numbers: dict[str, Any] = {key: float(table[key]) for key in ("limit", "warn") if key in table}
    rule = Rule(**{**table, **numbers})
    _check_rule(rule, where)
    return rule


def _check_type(key: str, value: Any, where: str) -> None:
    if key in ("limit", "warn"):
        good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
        wanted = "a finite number"
    elif key == "bound":
        good, wanted = isinstance(value, str) and value in _WORD, "'max' or 'min'"
    elif key.startswith("min_"):
        good, wanted = isinstance(value, int) and not isinstance(value, bool) and value >= 0, "a count"
    else:
        good, wanted = isinstance(value, str), "a string"
    if not good:
        raise EvidenceError(f"{where}: {key} = {str(value)[:60]}: expected {wanted}")


def _check_rule(rule: Rule, where: str) -> None:
    if rule.metric not in METRICS:
        raise EvidenceError(f"{where}: no metric '{rule.metric[:100]}'{did_you_mean(rule.metric, METRICS)}")
    if rule.baseline not in (None, PARENT, TEACHER):
        raise EvidenceError(f"{where}: baseline = '{rule.baseline[:60]}': expected 'parent' or 'teacher'")
    if METRICS[rule.metric].versus != (rule.baseline is not None):
        wanted = "needs a baseline" if METRICS[rule.metric].versus else "has no baseline"
        raise EvidenceError(f"{where}: metric '{rule.metric}' {wanted}")
    if rule.warn is not None and (rule.warn > rule.limit if rule.bound == "max" else rule.warn < rule.limit):
        raise EvidenceError(f"{where}: warn = {rule.warn:g} must be stricter than limit = {rule.limit:g}")
