"""report.html: one file that needs nothing else, with the verdict on top."""

from collections.abc import Sequence

from eval.gate import Verdict
from eval.markdown import convention_items, interval, number, show, size_line, to_table
from eval.markup import Markup, join, tag
from eval.plots import Line, bar_plot, line_plot
from eval.report import Curve, ErrorRow, QuantizedRow, Report, worst_first

MAX_GENERATIONS = 20
MAX_ROWS = 400

_WORST = 10

# The policy forbids the page to load anything, whatever a string in it says.
_HEAD = Markup(
    '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    '<meta name="color-scheme" content="light dark">'
)

_STYLE = Markup("""
:root{--bg:#fff;--fg:#1b1f24;--dim:#5b6570;--edge:#d8dee4;--soft:#f5f7f9;--bar:#4878a8;
--pass:#1a7f37;--warn:#9a6700;--fail:#cf222e;--inconclusive:#6e40aa;--skipped:#5b6570;
--c0:#2f6fb0;--c1:#c4572c;--c2:#2c8a57;--c3:#8b52a8;--c4:#a67c00;--c5:#3b8f98}
@media(prefers-color-scheme:dark){:root{--bg:#14181d;--fg:#e4e8ec;--dim:#9aa5b1;--edge:#343b44;--soft:#1c2229;
--bar:#6b9fd0;--pass:#4ac26b;--warn:#d4a72c;--fail:#ff7b72;--inconclusive:#b392f0;--skipped:#9aa5b1;
--c0:#6aa9e9;--c1:#f08a5d;--c2:#5cc48c;--c3:#c49ae0;--c4:#dcb543;--c5:#6cc5cf}}
body{background:var(--bg);color:var(--fg);font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:0 auto;padding:1rem}
h1{font-size:1.4rem;overflow-wrap:anywhere}h2{font-size:1.15rem;margin:2.2rem 0 .5rem}
.verdict{border-left:.5rem solid;padding:.6rem 1rem;background:var(--soft);font-size:1.1rem;overflow-wrap:anywhere}
.verdict b{font-size:1.5rem;text-transform:uppercase}
.pass{color:var(--pass)}.warn{color:var(--warn)}.fail{color:var(--fail)}.inconclusive{color:var(--inconclusive)}
.skipped,.dim{color:var(--dim)}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%}
th,td{text-align:left;vertical-align:top;padding:.3rem .6rem;border-bottom:1px solid var(--edge)}
th,td{overflow-wrap:break-word}
th{font-weight:600;color:var(--dim)}.status{font-weight:700;white-space:nowrap}
svg{width:100%;height:auto;max-width:46rem;display:block}
svg text{fill:var(--fg);font:12px system-ui,sans-serif}.tick{fill:var(--dim)!important}
.mark{stroke:currentColor;stroke-dasharray:4 3}
.grid{stroke:var(--edge)}.line{fill:none;stroke-width:2;stroke-linecap:round;stroke-linejoin:round}.bar{fill:var(--bar)}
.c0{stroke:var(--c0);background:var(--c0)}.c1{stroke:var(--c1);background:var(--c1)}
.c2{stroke:var(--c2);background:var(--c2)}.c3{stroke:var(--c3);background:var(--c3)}
.c4{stroke:var(--c4);background:var(--c4)}.c5{stroke:var(--c5);background:var(--c5)}
.legend span{margin-right:1.2rem}.key{display:inline-block;width:1rem;height:.3rem;margin-right:.4rem}
.answers{display:grid;grid-template-columns:repeat(auto-fit,minmax(15rem,1fr));gap:.6rem;margin-bottom:1.4rem}
.answers>div{background:var(--soft);padding:.5rem .7rem}
.text{white-space:pre-wrap;overflow-wrap:anywhere;margin:.2rem 0;font:14px/1.45 ui-monospace,monospace}
details{margin:.6rem 0}summary{cursor:pointer;color:var(--dim)}
""")


def to_html(report: Report, verdict: Verdict) -> str:
    """The page: the verdict and why, the numbers, the plots, the answers, and how it was measured."""
    title = f"{verdict.status}: {report.name}"
    body = [
        tag("h1", report.name),
        _verdict(verdict),
        _section("Numbers", _table(("", "value", "interval"), to_table(report))),
        _section("Training", *_curves(report.curves)),
        _section("Error of each layer's output", *_errors(report.layers, "layer")),
        _section("Error of each tensor", *_errors(report.tensors, "tensor")),
        _section("Quantized weights", *_quantized(report.quantization)),
        _section("Size", *_size(report)),
        _section("KL divergence, from the median to the worst token", *_tails(report)),
        _section("Answers side by side", *_generations(report)),
        _section("Checks of the artifact", *_checks(report)),
        _section("All metrics", *_metrics(report)),
        _section("How this was measured", *_how(report)),
    ]
    head = tag("head", _HEAD, tag("title", title), tag("style", _STYLE))
    return "<!doctype html>\n" + tag("html", head, tag("body", *body), lang="en") + "\n"


def _verdict(verdict: Verdict) -> Markup:
    line = tag("div", tag("b", verdict.status), tag("div", verdict.sentence(), style="color:var(--fg)"))
    rules = [(tag("span", o.status, class_=f"status {o.status}"), o.subject, o.why) for o in verdict.outcomes]
    return join([tag("div", line, class_=f"verdict {verdict.status}"), _table(("", "rule", "why"), rules)])


def _section(name: str, *content: Markup) -> Markup:
    """A heading with its content; nothing if there is no content."""
    inside = join(content)
    return tag("section", tag("h2", name), inside) if inside else inside


def _table(head: tuple[str, ...], rows: Sequence[Sequence[object]]) -> Markup:
    top = tag("tr", *(tag("th", name) for name in head))
    body = [tag("tr", *(tag("td", value) for value in row)) for row in rows[:MAX_ROWS]]
    left = len(rows) - len(body)
    more = tag("p", f"{left} more rows are in report.json.", class_="dim") if left else ""
    return join([tag("div", tag("table", top, *body), class_="scroll"), more])


def _curves(curves: Sequence[Curve]) -> list[Markup]:
    """A plot for each stage's losses (names that say loss), and a folded one for each of its other curves."""
    out = []
    for stage in dict.fromkeys(curve.stage for curve in curves):
        mine = [curve for curve in curves if curve.stage == stage]
        losses = [c for c in mine if "loss" in c.name]
        others = [c for c in mine if "loss" not in c.name]
        events = [event for c in losses for event in c.events]
        marks = [(event.step, event.text) for event in events]
        plots = [line_plot([_line(c) for c in losses], "step", "loss", marks)] if losses else []
        plots += [tag("p", f"step {event.step}: {event.text}", class_="dim") for event in events[:MAX_ROWS]]
        folded = [join([tag("h4", c.name), line_plot([_line(c)], "step", c.name)]) for c in others]
        more = tag("details", tag("summary", f"{len(folded)} more"), *folded) if folded else ""
        out.append(join([tag("h3", stage), *plots, more]))
    return out


def _line(curve: Curve) -> Line:
    return Line(curve.name, curve.steps, curve.values)


def _errors(rows: Sequence[ErrorRow], what: str) -> list[Markup]:
    """The relative error in order, then the worst, then all as a table."""
    if not rows:
        return []
    # An error that is not finite is the worst there is.
    ranked = sorted(rows, key=lambda row: (row.relative_mse is not None, -(row.relative_mse or 0.0)))[:_WORST]
    line = Line("relative MSE", range(len(rows)), [row.relative_mse for row in rows])
    bars = [(row.name, row.relative_mse, number(row.relative_mse, "fraction")) for row in ranked]
    numbers = [
        (r.name, number(r.relative_mse), number(r.mse), number(r.sqnr_db, "dB"), number(r.max_abs)) for r in rows
    ]
    table = _table((what, "relative MSE", "MSE", "SQNR", "largest"), numbers)
    return [
        line_plot([line], f"{what}, in order", "relative MSE"),
        tag("h3", "Worst first"),
        bar_plot(f"the worst {what}s", bars),
        tag("details", tag("summary", f"All {len(rows)}"), table),
    ]


def _quantized(rows: Sequence[QuantizedRow]) -> list[Markup]:
    """What was not done as asked, then every weight, worst first."""
    if not rows:
        return []
    fallbacks = [(row.name, row.fallback) for row in rows if row.fallback]
    head = ("weight", "method", "bits", "group", "bytes", "output SQNR", "weight SQNR", "not as asked")
    table = _table(
        head,
        [
            (
                *(r.name, r.method, r.bits, r.group_size, f"{r.bytes:,}"),
                *(number(r.output_sqnr_db, "dB"), number(r.sqnr_db, "dB")),
                r.fallback or "",
            )
            for r in worst_first(rows)
        ],
    )
    listed = [tag("h3", "Not as asked"), _table(("weight", "why"), fallbacks)] if fallbacks else []
    return [*listed, tag("h3", "Worst first"), tag("details", tag("summary", f"All {len(rows)}"), table)]


def _size(report: Report) -> list[Markup]:
    if report.size is None:
        return []
    bars: list[tuple[str, int | float | None, str]] = []
    for part in report.size.parts[:MAX_ROWS]:
        bits = 8 * part.bytes / part.weights if part.weights else float("nan")
        bars.append((part.name, part.bytes, f"{part.bytes / 1e6:.3g} MB, {number(bits)} bits a weight"))
    return [tag("p", size_line(report.size)), bar_plot("size by part", bars)]


def _tails(report: Report) -> list[Markup]:
    out = []
    for t in report.tails[:MAX_ROWS]:
        bars = [(_level(level), value, number(value, "nats")) for level, value in zip(t.levels, t.values)]
        out.append(tag("h3", f"{t.model} against {t.baseline}"))
        out.append(bar_plot(f"KL of {t.model} against {t.baseline}", bars[:MAX_ROWS]))
    return out


def _level(level: float) -> str:
    return "maximum" if level == 1 else "median" if level == 0.5 else f"{100 * level:.4g}% of tokens below"


def _generations(report: Report) -> list[Markup]:
    out = []
    for g in report.generations[:MAX_GENERATIONS]:
        answers = [
            tag("div", tag("strong", name), tag("div", text or "(nothing)", class_="text"))
            for name, text in g.outputs.items()
        ]
        out += [tag("div", g.prompt, class_="text dim"), tag("div", *answers, class_="answers")]
    left = len(report.generations) - MAX_GENERATIONS
    return [*out, tag("p", f"{left} more are in report.json.", class_="dim")] if left > 0 else out


def _checks(report: Report) -> list[Markup]:
    said = {True: ("pass", "pass"), False: ("fail", "fail"), None: ("not made", "inconclusive")}
    rows = []
    for check in report.checks:
        word, style = said[check.passed]
        rows.append((tag("span", word, class_=f"status {style}"), check.name, check.detail))
    return [_table(("", "check", "detail"), rows)] if rows else []


def _metrics(report: Report) -> list[Markup]:
    rows = [
        (m.name, m.model, m.baseline or "", show(m), interval(m), m.tokens or "", m.documents or "")
        for m in report.metrics
    ]
    head = ("metric", "model", "against", "value", "interval", "tokens", "documents")
    table = _table(head, rows)
    return [tag("details", tag("summary", f"All {len(rows)}"), table)] if rows else []


def _how(report: Report) -> list[Markup]:
    rows = [*convention_items(report), ("stages that ran", ", ".join(report.stages) or "none")]
    rows += [(f"version of {name}", version) for name, version in report.versions.items()]
    rows += [("note", note) for note in report.notes]
    return [_table(("", ""), rows)]
