"""The report as JSON, Markdown, table and page: all of it survives, and nothing in it acts on the reader."""

import dataclasses
import html.parser
import json
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eval import schema
from eval.errors import EvidenceError
from eval.gate import Policy, judge
from eval.html import to_html
from eval.markdown import to_markdown, to_table
from eval.plots import Line, bar_plot, line_plot
from eval.report import (
    Check,
    Convention,
    Curve,
    ErrorRow,
    Event,
    Generation,
    Measurement,
    QuantizedRow,
    Report,
    Size,
    SizePart,
    from_json,
    tail,
    to_json,
)
from eval.scores import TokenScores

HOSTILE = "</script><script>alert(1)</script><img src=x onerror='a()'>\"&`|[a](http://x) @all\x1b[31m\u202e\n# h"


def full(text="quickstart"):
    kl = np.random.default_rng(0).gamma(1, 0.1, 500).astype(np.float32)
    scores = TokenScores(kl, np.zeros(500, np.int32), {"parent": kl})
    return Report(
        name=text,
        convention=Convention("sliding", 512, 512, False, 9000, 20, text, "ab" * 32, 0),
        metrics=[
            Measurement("perplexity", "candidate", None, 21.5, 20.0, 23.0, 0.95, "", 9000, 20),
            Measurement("kl_mean", "candidate", "parent", 0.02, 0.01, 0.03, 0.95, "nats/token", 9000, 20),
            Measurement("kl_mean", text, "teacher", None, unit="nats/token"),
        ],
        tensors=[ErrorRow(f"{text}.{i}", 0.01 * i, 1e-5, 20.0, 0.1, 4096) for i in range(3)],
        layers=[ErrorRow(f"layer {i}", None if i == 1 else 0.01 * i, 1e-5, None, 0.1, 4096) for i in range(3)],
        quantization=[
            QuantizedRow(f"{text}.{i}", "gptq", 4096, 2304, 4, 64, 0.1, 9.0, 0.1, 19.5, float(i) or None, text)
            for i in range(3)
        ]
        + [QuantizedRow(text, "none", 64, 128, fallback=text)],
        size=Size([SizePart(text, 1000, 520), SizePart("embedding", 100, 200)]),
        tails=[tail(scores, "candidate", "parent")],
        curves=[
            Curve("distill", "loss", [0, 10, 20], [3.0, None, 1.0]),
            Curve("distill", "validation loss", [0, 20], [3.1, 1.5]),
            Curve("align", text, [1], [2.0]),
        ],
        generations=[Generation(text, {"parent": text, "candidate": ""})],
        stages=["distill", "quantize"],
        versions={"jax": "0.10", text: text},
        checks=[Check("reload", True, text), Check("manifest", None)],
        notes=[text],
    )


@pytest.mark.parametrize("report", [full(), full(HOSTILE), Report("bare")])
def test_a_report_survives_its_json(report):
    assert from_json(to_json(report)) == report


names = st.text(max_size=8)
metrics = st.tuples(names, names, st.none() | names, st.none() | st.floats())
answers = st.dictionaries(names, names, max_size=2)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(metrics, max_size=4, unique_by=lambda m: m[:3]),
    st.lists(st.tuples(names, answers), max_size=2),
    st.lists(st.floats(), max_size=5),
    answers,
)
def test_any_report_is_written_read_and_shown(metrics, generations, values, versions):
    report = Report(
        name=str(versions),
        metrics=[Measurement(*m) for m in metrics],
        generations=[Generation(*g) for g in generations],
        curves=[Curve("s", "loss", list(range(len(values))), values)],
        versions=versions,
    )
    text = to_json(report)
    read = from_json(text.encode())
    assert to_json(read) == text
    assert all(m.value is None or math.isfinite(m.value) for m in read.metrics)
    verdict = judge(read, Policy.built_in())
    assert verdict.exit_code == 3
    to_html(read, verdict).encode("utf-8")
    to_markdown(read, verdict).encode("utf-8")


def edited(**changes):
    return json.dumps(json.loads(to_json(full())) | changes)


def metric(**changes):
    row = json.loads(to_json(full()))["metrics"][1] | changes
    return edited(metrics=[row])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "report.json:1: not JSON"),
        ("[]", '"schema" must be "compress.report"'),
        ('{"schema": "other"}', '"schema" must be'),
        (edited(version=2), "version 2; this program reads version 1"),
        (edited(metrcs=[]), r"no key 'metrcs'; did you mean 'metrics'\?"),
        (edited(name=3), "report.json.name: expected a string, not 3"),
        (edited(metrics={}), "metrics: expected a list"),
        (edited(size={"parts": [{"name": "x", "weights": 1}]}), r"parts\[0\]: missing bytes"),
        (edited(size={"parts": [{"name": "x", "weights": -1, "bytes": 2}]}), "negative count"),
        (edited(curves=[{"stage": "a", "name": "b", "steps": [1], "values": []}]), "1 points but 0 values"),
        (edited(checks=[{"name": "x", "passed": 1}]), r"passed: expected true or false"),
        (metric(value="NaN"), r"metrics\[0\].value: expected a finite number \(or null\), not 'NaN'"),
        (metric(value=True), "expected a finite number"),
        (metric(value=math.nan), "NaN is not a number"),
        (metric(value=math.inf), "Infinity is not a number"),
        (metric().replace("0.02", "1e999"), "expected a finite number"),
        (metric(value=9.0), "low <= value <= high"),
        (metric(confidence=95), "0 < confidence < 1"),
        (metric(documents=1.5), "expected an integer"),
        (metric(documents=-3), "negative count"),
        (metric(tokens=10**30), "expected an integer"),
        (edited(metrics=json.loads(metric())["metrics"] * 2), "kl_mean of candidate against parent is there twice"),
        ('{"schema": "compress.report", "schema": 1}', "key 'schema' is doubled"),
        ("[" * 200_000, "nested too deeply"),
        ('{"schema": ' + "9" * 5000 + "}", "report.json: "),
        (b"\xff\xfe{}", "report.json: "),
    ],
)
def test_a_json_that_is_no_report_is_refused_in_one_line(text, message):
    with pytest.raises(EvidenceError, match=message) as caught:
        from_json(text)
    assert "\n" not in str(caught.value)


def test_a_report_is_bounded(monkeypatch):
    monkeypatch.setattr(schema, "MAX_BYTES", 100)
    with pytest.raises(EvidenceError, match="at most 100 are read"):
        from_json(to_json(full()))
    monkeypatch.undo()
    monkeypatch.setattr(schema, "MAX_ITEMS", 2)
    with pytest.raises(EvidenceError, match="at most 2 items"):
        from_json(to_json(full()))


def test_half_a_surrogate_pair_does_not_break_what_is_written():
    read = from_json(edited(name="a\ud800b"))
    assert read.name == "a?b"
    to_html(read, judge(read, Policy.built_in())).encode("utf-8")


def test_what_contradicts_itself_is_not_written():
    bad = dataclasses.replace(full(), metrics=[Measurement("kl_mean", "candidate", "parent", 0.5, 0.6, 0.7, 0.95)])
    with pytest.raises(EvidenceError, match="low <= value <= high"):
        to_json(bad)


class Page(html.parser.HTMLParser):
    """Collects a page's elements and attributes."""

    void = ("meta", "br", "hr", "img", "link", "input")

    def __init__(self, text):
        super().__init__()
        self.elements, self.attributes, self.open, self.shown = set(), set(), [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.shown.append(data)


@pytest.mark.parametrize("report", [full(), full(HOSTILE), Report("bare")])
def test_the_page_is_well_formed_and_refers_to_nothing_outside(report):
    text = to_html(report, judge(report, Policy.built_in()))
    page = Page(text)
    assert not page.open
    assert not page.elements & {
        "script",
        "link",
        "img",
        "iframe",
        "object",
        "embed",
        "a",
        "base",
        "form",
        "use",
        "image",
    }
    assert not {a for a in page.attributes if a.startswith("on")}
    assert not page.attributes & {"src", "href", "srcset", "action", "data", "xlink:href"}
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_what_strangers_wrote_is_shown_and_not_obeyed():
    report = full(HOSTILE)
    page = Page(to_html(report, judge(report, Policy.built_in())))
    assert any("<script>alert(1)</script>" in shown for shown in page.shown)


def test_the_verdict_comes_before_everything_else():
    report = full()
    verdict = judge(report, Policy.built_in())
    text = to_html(report, verdict)
    assert text.index(verdict.sentence()[:20]) < text.index("<h2>")
    assert "<svg" in text
    for section in ("Training", "Error of each layer", "Size", "KL divergence", "Answers side by side"):
        assert section in text


def test_markdown_keeps_a_strangers_text_in_its_cell():
    plain, hostile = (to_markdown(r, judge(r, Policy.built_in())) for r in (full(), full(HOSTILE)))
    assert len(hostile.splitlines()) == len(plain.splitlines())
    assert "<script" not in hostile
    assert "<img" not in hostile
    assert "@all" not in hostile
    assert "](http" not in hostile
    assert "\x1b" not in hostile
    bars = [line.replace("\\|", "").count("|") for line in hostile.splitlines()]
    assert bars == [line.count("|") for line in plain.splitlines()]


def test_the_table_always_has_its_five_rows():
    for report in (full(), Report("bare")):
        labels = [row[0] for row in to_table(report)]
        for label in ("perplexity", "KL to the parent", "KL to the teacher", "size against bf16"):
            assert label in labels
        assert any(label.startswith("quantization error") for label in labels)
    rows = {label: (value, interval) for label, value, interval in to_table(full())}
    assert rows["KL to the parent"] == ("0.02 nats/token", "95%: 0.01 to 0.03")
    assert rows["KL to the teacher"] == ("-", "")


@settings(max_examples=60, deadline=None)
@example([(0, 1.2e308)])
@example([(0, 5e-324), (1, 1e-323)])
@example([(0, -1.7e308), (1, 1.7e308)])
@given(st.lists(st.tuples(st.integers(-(2**60), 2**60), st.none() | st.floats()), max_size=6))
def test_a_plot_of_any_numbers_has_only_finite_coordinates(points):
    xs, ys = [x for x, _ in points], [y for _, y in points]
    drawn = line_plot([Line("a", xs, ys)], "x", "y") + bar_plot("b", [("c", y, "d") for y in ys])
    assert "nan" not in drawn
    assert "inf" not in drawn


def test_a_long_line_is_thinned_to_its_ends():
    drawn = line_plot([Line("a", range(100_000), [1.0] * 99_999 + [2.0])], "x", "y")
    assert drawn.count("L") < 400
    assert len(drawn) < 20_000


def test_what_guards_did_is_marked_on_the_plot_and_told_beneath():
    drawn = line_plot([Line("a", [0, 9], [1.0, 2.0])], "step", "loss", [(5, "<went back>")])
    assert drawn.count('class="mark"') == 1
    assert "&lt;went back&gt;" in drawn
    assert line_plot([], "step", "loss", [(5, "x")]) == ""
    curve = Curve("align", "loss", [1, 2], [1.0, 0.5], [Event(2, "stopped: far")])
    report = from_json(to_json(Report("r", curves=[curve])))
    page = to_html(report, judge(report, Policy.built_in()))
    assert "step 2: stopped: far" in page
