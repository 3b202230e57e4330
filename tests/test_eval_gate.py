"""The gate passes on evidence only."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.errors import EvidenceError
from eval.gate import FAIL, INCONCLUSIVE, PASS, SKIPPED, WARN, Policy, Rule, judge
from eval.metrics import METRICS, Evidence, measure
from eval.report import Check, Measurement, Report, from_json, to_json
from eval.retention import accumulate
from eval.scores import Chunk

INTERVALS = sorted(name for name, metric in METRICS.items() if metric.interval and metric.versus)
POINTS = sorted(name for name, metric in METRICS.items() if not metric.interval and metric.versus)
anything = st.none() | st.floats()
finite = st.floats(-1e6, 1e6)


def measured(name, value, low=None, high=None, model="candidate", baseline="parent", tokens=9000, documents=20):
    return Measurement(name, model, baseline, value, low, high, 0.95, "", tokens, documents)


def kl(value, low, high, **more):
    return Report("x", metrics=[measured("kl_mean", value, low, high, **more)])


def status(report, *rules):
    verdict = judge(report, Policy(rules))
    return verdict.outcomes[0].status


AT_MOST = Rule("kl_mean", "max", 0.1, "parent", warn=0.05, min_tokens=100, min_documents=4)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((0.02, 0.01, 0.03), PASS),
        ((0.02, 0.01, 0.05), PASS),
        ((0.06, 0.04, 0.08), WARN),
        ((0.08, 0.06, 0.1), WARN),
        ((0.09, 0.08, 0.11), INCONCLUSIVE),
        ((0.12, 0.1, 0.2), INCONCLUSIVE),
        ((0.12, 0.11, 0.2), FAIL),
    ],
)
def test_the_interval_decides_and_not_the_value(values, expected):
    assert status(kl(*values), AT_MOST) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [((0.5, 0.0, 0.9), PASS), ((0.5, -0.1, 0.9), INCONCLUSIVE), ((-0.5, -0.9, -0.1), FAIL)],
)
def test_at_least_is_the_mirror(values, expected):
    report = Report("x", metrics=[measured("kl_gain", *values)])
    assert status(report, Rule("kl_gain", "min", 0.0, "parent")) == expected


@given(finite, finite)
def test_a_metric_without_an_interval_is_judged_by_its_value(value, limit):
    report = Report("x", metrics=[measured("kl_p99", value)])
    assert status(report, Rule("kl_p99", "max", limit, "parent")) == (PASS if value <= limit else FAIL)
    assert status(report, Rule("kl_p99", "min", limit, "parent")) == (PASS if value >= limit else FAIL)


counts = st.none() | st.integers(-5, 50)
measurements = st.builds(
    measured,
    st.sampled_from([*INTERVALS, *POINTS]),
    anything,
    anything,
    anything,
    model=st.sampled_from(["candidate", "distilled"]),
    baseline=st.sampled_from(["parent", "teacher", None]),
    tokens=counts,
    documents=counts,
)
rules = st.builds(
    Rule,
    st.sampled_from([*INTERVALS, *POINTS]),
    st.sampled_from(["max", "min"]),
    finite,
    st.sampled_from(["parent", "teacher"]),
    min_tokens=st.integers(0, 20),
    min_documents=st.integers(0, 20),
)


@given(st.lists(measurements, max_size=6), rules)
def test_a_pass_always_rests_on_one_finite_sufficient_measurement(metrics, rule):
    if status(Report("x", metrics=metrics), rule) not in (PASS, WARN):
        return
    (m,) = [m for m in metrics if (m.name, m.model, m.baseline) == (rule.metric, rule.model, rule.baseline)]
    assert math.isfinite(m.value)
    assert (m.tokens or 0) >= rule.min_tokens
    assert (m.documents or 0) >= rule.min_documents
    worst = {"max": m.high, "min": m.low}[rule.bound] if METRICS[rule.metric].interval else m.value
    assert math.isfinite(worst)
    assert worst <= rule.limit if rule.bound == "max" else worst >= rule.limit
    assert rule.metric in POINTS or m.low <= m.value <= m.high


@given(rules, st.sampled_from([None, math.nan, math.inf, -math.inf]), finite, st.integers(0, 2))
def test_a_missing_or_non_finite_number_never_passes_and_never_fails(rule, hole, value, where):
    numbers = [value, value, value]
    numbers[0 if rule.metric in POINTS else where] = hole
    m = measured(rule.metric, *numbers, baseline=rule.baseline)
    assert status(Report("x", metrics=[m]), rule) == INCONCLUSIVE


ORDER = [FAIL, INCONCLUSIVE, WARN, PASS]


@given(st.sampled_from(["max", "min"]), finite, st.floats(0, 10), st.floats(0, 10), st.floats(0, 1e3))
def test_a_worse_value_never_gets_a_better_verdict(bound, value, below, above, worse):
    rule = Rule("kl_mean", bound, 3.0, "parent", warn=3.0 if bound == "max" else 4.0)
    step = worse if bound == "max" else -worse
    before = status(kl(value, value - below, value + above), rule)
    after = status(kl(value + step, value + step - below, value + step + above), rule)
    assert ORDER.index(after) <= ORDER.index(before)


def test_too_little_evidence_says_how_much_is_needed():
    good = (0.02, 0.01, 0.03)
    for report in (kl(*good, tokens=99), kl(*good, documents=3), kl(*good, tokens=None)):
        outcome = judge(report, Policy((AT_MOST,))).outcomes[0]
        assert outcome.status == INCONCLUSIVE
        assert "are needed" in outcome.why


def test_a_measurement_that_is_there_twice_decides_nothing():
    report = Report("x", metrics=[measured("kl_mean", 0.02, 0.01, 0.03), measured("kl_mean", 0.9, 0.8, 1.0)])
    assert status(report, AT_MOST) == INCONCLUSIVE


def test_an_absent_metric_is_inconclusive_and_says_what_there_is():
    report = kl(0.02, 0.01, 0.03, baseline="teacher")
    outcome = judge(report, Policy((AT_MOST,))).outcomes[0]
    assert outcome.status == INCONCLUSIVE
    assert outcome.why == "not measured; measured: candidate against teacher"


def built_in(stages=("distill",), **changed):
    values = {
        "perplexity_increase": (0.01, 0.005, 0.015),
        "kl_mean": (0.02, 0.01, 0.03),
        "kl_gain": (0.5, 0.4, 0.6),
    } | changed
    sides = {"kl_gain": {"model": "distilled", "baseline": "teacher"}}
    metrics = [measured(name, *v, **sides.get(name, {})) for name, v in values.items() if v]
    return judge(Report("x", metrics=metrics, stages=list(stages)), Policy.built_in())


def test_the_built_in_policy_and_its_exit_codes():
    assert (built_in().status, built_in().exit_code) == (PASS, 0)
    warned = built_in(perplexity_increase=(0.03, 0.025, 0.04))
    assert (warned.status, warned.exit_code) == (WARN, 0)
    assert built_in(perplexity_increase=(0.08, 0.06, 0.1)).exit_code == 1
    assert built_in(kl_mean=(0.3, 0.2, 0.4)).exit_code == 1
    assert built_in(kl_mean=(0.1, 0.05, 0.4)).exit_code == 3
    assert built_in(kl_gain=(-0.2, -0.3, -0.1)).exit_code == 1
    assert built_in(kl_gain=None).exit_code == 3


def test_a_failure_outweighs_what_is_inconclusive():
    assert built_in(kl_mean=None, kl_gain=(-0.2, -0.3, -0.1)).exit_code == 1


def test_a_rule_that_requires_a_stage_waits_for_it():
    verdict = built_in(stages=(), kl_gain=None)
    assert [o.status for o in verdict.outcomes] == [PASS, PASS, SKIPPED]
    assert verdict.exit_code == 0


def test_nothing_judged_is_never_a_pass():
    only = Rule("kl_gain", "min", 0.0, "teacher", requires="distill")
    checks = [Check("reload", True)]
    assert judge(Report("x", checks=checks), Policy((only,))).exit_code == 3
    assert judge(Report("x"), Policy(())).exit_code == 3
    assert built_in(perplexity_increase=None, kl_mean=None, kl_gain=None).exit_code == 3


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 1), (None, 3)])
def test_a_check_of_the_artifact_counts_like_a_rule(passed, code):
    report = Report("x", metrics=kl(0.02, 0.01, 0.03).metrics, checks=[Check("reload", passed)])
    assert judge(report, Policy((AT_MOST,))).exit_code == code


RULE = '[[rule]]\nmetric = "kl_mean"\nbaseline = "parent"\nbound = "max"\nlimit = 0.1\n'


def test_a_policy_is_read_from_toml():
    policy = Policy.from_toml(RULE + "warn = 0.05\nmin_tokens = 100\nmin_documents = 4\n")
    assert policy == Policy((AT_MOST,))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (RULE.replace("limit", "limt"), r"gate.toml rule 1: no key 'limt'; did you mean 'limit'\?"),
        (RULE.replace("kl_mean", "kl_maen"), r"rule 1: no metric 'kl_maen'; did you mean 'kl_mean'\?"),
        (RULE.replace("max", "most"), "expected 'max' or 'min'"),
        (RULE.replace('"parent"', '"mother"'), "expected 'parent' or 'teacher'"),
        (RULE.replace('baseline = "parent"\n', ""), "'kl_mean' needs a baseline"),
        (RULE.replace("kl_mean", "perplexity"), "'perplexity' has no baseline"),
        (RULE.replace("0.1", "nan"), "limit = nan: expected a finite number"),
        (RULE.replace("0.1", "inf"), "expected a finite number"),
        (RULE.replace("0.1", "true"), "expected a finite number"),
        (RULE.replace("limit = 0.1", ""), "rule 1: missing limit"),
        (RULE + "warn = 0.2", "warn = 0.2 must be stricter than limit = 0.1"),
        (RULE + "min_tokens = -1", "expected a count"),
        (RULE + RULE + "model = 7", "rule 2: model = 7: expected a string"),
        (RULE + "[other]", "no table 'other'"),
        ("", r"no \[\[rule\]\]"),
        ("rule = 3", r"no \[\[rule\]\]"),
        ("rule = [3]", r"no \[\[rule\]\]"),
        ("[[rule]", "gate.toml: not TOML"),
    ],
)
def test_a_policy_that_cannot_be_meant_is_refused_in_one_line(text, message):
    with pytest.raises(EvidenceError, match=message) as caught:
        Policy.from_toml(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("landed", "expected"), [(0.95, PASS), (0.9, INCONCLUSIVE), (0.5, FAIL)])
def test_the_share_of_the_adapters_that_survived_is_gated_by_its_interval(landed, expected):
    """`landed` is the share that each document keeps, give or take a little, so that there is an interval."""
    rng = np.random.default_rng(0)
    base, adapted = rng.normal(size=(2, 12, 32, 9)).astype(np.float32)
    shares = (landed + 0.04 * np.linspace(-1, 1, 12, dtype=np.float32))[:, None, None]
    kept = base + shares * (adapted - base)
    chunks = (
        Chunk({"base": b, "adapted": a, "landed": x}, np.zeros(32, np.int32), np.ones(32), np.full(32, i))
        for i, (b, a, x) in enumerate(zip(base, adapted, kept, strict=True))
    )
    report = Report("x", metrics=measure(Evidence(retention=accumulate(chunks))))
    rule = '[[rule]]\nmetric = "adapter_retained"\nbound = "min"\nlimit = 0.9\nmin_documents = 4\n'
    verdict = judge(from_json(to_json(report)), Policy.from_toml(rule))
    assert (verdict.status, len(verdict.outcomes)) == (expected, 1)
    (m,) = report.find("adapter_retained", "candidate", None)
    assert m.low < landed < m.high
    assert (m.tokens, m.documents) == (12 * 32, 12)
