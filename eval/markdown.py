"""The report as text: a compact table for a terminal, and Markdown for a pull request.

Names, prompts and answers come from strangers: both escape what the reader's program would act on.
"""

import html
import re
from collections.abc import Sequence

from eval.gate import FAIL, INCONCLUSIVE, PASS, SKIPPED, WARN, Verdict
from eval.metrics import CANDIDATE, PARENT, TEACHER
from eval.report import Measurement, QuantizedRow, Report, Size, worst_first

_MARK = {PASS: "✅", WARN: "⚠️", FAIL: "❌", INCONCLUSIVE: "❔", SKIPPED: "–"}
_WORST, _FALLBACKS = 5, 20
_HEADLINES = (
    ("perplexity", CANDIDATE, None, "perplexity"),
    ("perplexity", PARENT, None, "perplexity of the parent"),
    ("perplexity", TEACHER, None, "perplexity of the teacher"),
    ("perplexity_increase", CANDIDATE, PARENT, "perplexity over the parent's"),
    ("kl_mean", CANDIDATE, PARENT, "KL to the parent"),
    ("kl_mean", CANDIDATE, TEACHER, "KL to the teacher"),
    ("top1_agreement", CANDIDATE, PARENT, "top-1 agreement with parent"),
    ("quantization_error", CANDIDATE, PARENT, "quantization error"),
    ("adapter_retained", CANDIDATE, None, "adapter retained"),
)


def to_table(report: Report) -> list[tuple[str, str, str]]:
    """Rows of (what, value, interval): perplexity, KL to parent and teacher, quantization error, size against bf16.

    The four of them are always there; what was not measured is '-'.
    """
    always = {"perplexity", "kl_mean", "quantization_error"}
    rows = []
    for name, model, baseline, label in _HEADLINES:
        found = report.find(name, model, baseline)
        if found:
            rows.append((label, show(found[0]), interval(found[0])))
        elif name in always and model == CANDIDATE:
            rows.append((label, "-", ""))
    size = report.size
    rows.append(
        ("size against bf16", f"{number(size.ratio, 'fraction')}, {size.bytes / 1e6:.3g} MB" if size else "-", "")
    )
    rows += [("bits a weight", f"{size.bits_per_weight:.3g}", "")] if size else []
    return rows


def to_markdown(report: Report, verdict: Verdict) -> str:
    """A comment for a pull request: the verdict, the rules, the headline numbers, and how they were measured."""
    lines = [f"## {_MARK[verdict.status]} {cell(report.name)}: {verdict.status}", ""]
    rules = [(f"{_MARK[o.status]} {o.status}", cell(o.subject), cell(o.why)) for o in verdict.outcomes]
    lines += _rows(("", "rule", "why"), rules)
    lines += _rows(("", "value", "interval"), [(cell(a), cell(b), cell(c)) for a, b, c in to_table(report)])
    if report.size:
        parts = [(cell(p.name), f"{p.weights:,}", f"{p.bytes:,}") for p in report.size.parts]
        lines += _rows(("part", "weights", "bytes"), parts)
    lines += _quantized(report.quantization)
    lines += [_convention(report), ""]
    for g in report.generations[:3]:
        answers = [(cell(name), cell(answer[:300])) for name, answer in g.outputs.items()]
        lines += [f"> {cell(g.prompt[:300])}", "", *_rows(("model", "answer"), answers)]
    return "\n".join(lines).rstrip() + "\n"


def _quantized(rows: Sequence[QuantizedRow]) -> list[str]:
    """The worst quantized weights, and what was not done as asked."""
    if not rows:
        return []
    head = ("worst weights", "method", "bits", "group", "output SQNR", "weight SQNR")
    worst = [
        (
            *(cell(r.name), cell(r.method), str(r.bits), str(r.group_size)),
            *(number(r.output_sqnr_db, "dB"), number(r.sqnr_db, "dB")),
        )
        for r in worst_first(rows)[:_WORST]
    ]
    fallbacks = [(cell(r.name), cell(r.fallback)) for r in rows if r.fallback]
    left = len(fallbacks) - _FALLBACKS
    lines = _rows(head, worst)
    lines += _rows(("not as asked", "why"), fallbacks[:_FALLBACKS]) if fallbacks else []
    return [*lines, f"{left} more are in report.json.", ""] if left > 0 else lines


def show(m: Measurement) -> str:
    """The value with its unit: a fraction as a percentage. 'missing' if there is none."""
    return number(m.value, m.unit)


def interval(m: Measurement) -> str:
    """'95%: 0.031 to 0.042', or nothing."""
    if m.low is None or m.high is None or m.confidence is None:
        return ""
    bare = "fraction" if m.unit == "fraction" else ""
    return f"{m.confidence:.0%}: {number(m.low, bare)} to {number(m.high, bare)}"


def number(x: float | None, unit: str = "") -> str:
    """A number as it is shown everywhere."""
    if x is None or x != x or x in (float("inf"), float("-inf")):
        return "missing"
    return f"{100 * x:.3g}%" if unit == "fraction" else f"{x:.4g} {unit}".rstrip()


def size_line(size: Size) -> str:
    share = number(size.ratio, "fraction")
    return f"{size.bytes / 1e6:.3g} MB, {share} of bf16, {size.bits_per_weight:.3g} bits a weight"


def printable(text: str) -> str:
    """Text without control characters, which a terminal would obey, and without those that reorder it."""
    return "".join(c if c.isprintable() else " " for c in text)


def cell(text: str) -> str:
    """Text as a Markdown table cell that shows it and nothing else: no markup, no mention, no link, no new row."""
    safe = html.escape(printable(text), quote=False).replace("@", "&#64;").replace("://", "&#58;//")
    return re.sub(r"([\\`*_{}\[\]()#+!|~$])", r"\\\1", safe.replace("&#", "\0")).replace("\0", "&#")


def convention_items(report: Report) -> list[tuple[str, str]]:
    """How perplexity was measured, as (what, value)."""
    c = report.convention
    if c is None:
        return []
    return [
        ("convention", c.name),
        ("window", f"{c.window} tokens"),
        ("stride", f"{c.stride} tokens"),
        ("BOS", "yes" if c.bos else "no"),
        ("scored", f"{c.tokens} tokens of {c.documents} documents"),
        ("a document is", c.document),
        ("data", c.data),
        ("sha256", c.data_sha256),
        ("seed", str(c.seed)),
    ]


def _convention(report: Report) -> str:
    items = convention_items(report)
    return "How: " + ("; ".join(f"{what} {cell(value)}" for what, value in items) or "not recorded") + "."


def _rows(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    rule = "|" + " --- |" * len(head)
    return ["| " + " | ".join(head) + " |", rule, *("| " + " | ".join(row) + " |" for row in rows), ""]
