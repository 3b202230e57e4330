"""Small SVG plots for the report: lines over a number, and horizontal bars. Colours come from the page's style."""

import dataclasses
import math
from collections.abc import Sequence

from eval.markup import Markup, join, tag

MAX_POINTS = 400
"""Points of a line that are drawn; of a longer one, evenly spaced ones."""

_WIDTH, _HEIGHT = 640, 260
_LARGEST, _TINIEST = 1e300, 1e-200  # beyond these, the arithmetic of an axis leaves the floats
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 12, 12, 36


@dataclasses.dataclass(frozen=True)
class Line:
    """A named line; a None breaks it."""

    name: str
    xs: Sequence[int | float]
    ys: Sequence[float | None]


def line_plot(lines: Sequence[Line], x_name: str, y_name: str, marks: Sequence[tuple[int | float, str]] = ()) -> Markup:
    """Lines over a common x axis, with a legend if there are several. Empty without a point that can be drawn.

    `marks` are places on the x axis and what happened there.
    """
    drawn = [Line(line.name, *_thin(line.xs, line.ys)) for line in lines]
    xs = [float(x) for line in drawn for x, y in zip(line.xs, line.ys) if y is not None]
    xs += [float(x) for x, _ in marks] if xs else []
    ys = [y for line in drawn for y in line.ys if y is not None]
    if not xs:
        return Markup("")
    across, up = _Axis(xs, _LEFT, _WIDTH - _RIGHT), _Axis(ys, _HEIGHT - _BOTTOM, _TOP)
    parts = [_grid(across, up), _axis_names(x_name, y_name)]
    for x, text in marks[:MAX_POINTS]:
        at = f"{across(float(x)):.1f}"
        parts.append(tag("line", tag("title", text), x1=at, x2=at, y1=_TOP, y2=_HEIGHT - _BOTTOM, class_="mark"))
    for i, line in enumerate(drawn):
        # The page's style overrides fill and stroke; a viewer that has none for SVG still sees a line.
        style = {"class_": f"line c{i % 6}", "fill": "none", "stroke": "currentColor"}
        parts.append(tag("path", tag("title", line.name), d=_path(line, across, up), **style))
    figure = _svg(_HEIGHT, f"{y_name} over {x_name}", parts)
    if len(drawn) < 2:
        return figure
    names = [tag("span", tag("i", class_=f"key c{i % 6}"), line.name) for i, line in enumerate(drawn)]
    return join([figure, tag("p", *names, class_="legend")])


def bar_plot(name: str, bars: Sequence[tuple[str, int | float | None, str]]) -> Markup:
    """Horizontal bars of (label, value at least 0, text beside it), from zero; without a value only the text."""
    known = [value for _, value, _ in bars if value is not None and math.isfinite(value)]
    top = max(known, default=0.0) or 1.0
    parts = []
    for i, (label, value, text) in enumerate(bars):
        y = 4 + 24 * i
        width = 200 * (max(value, 0.0) / top) if value is not None and math.isfinite(value) else 0.0
        parts += [
            tag("text", _short(label), x=196, y=y + 14, class_="label", text_anchor="end"),
            tag("rect", tag("title", label), x=204, y=y, width=f"{width:.1f}", height=18, rx=2, class_="bar"),
            tag("text", text, x=f"{210 + width:.1f}", y=y + 14, class_="label"),
        ]
    return _svg(24 * len(bars) + 8, name, parts) if bars else Markup("")


class _Axis:
    """A linear map from values to pixels, with ticks at round numbers."""

    def __init__(self, values: Sequence[float], start: int, end: int):
        low, high = min(values), max(values)
        margin = (high - low) * 0.02
        if margin < _TINIEST:
            margin = max(abs(high) * 0.5, _TINIEST) if high else 1.0
        self.low, self.high, self.start, self.end = low - margin, high + margin, start, end

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        span = self.high - self.low
        power = 10.0 ** math.floor(math.log10(span / 4))
        step = next((power * m for m in (1, 2, 5, 10) if span / (power * m) <= 5), power * 10)
        first = math.ceil(self.low / step)
        return [step * (first + i) for i in range(6) if step * (first + i) <= self.high]


def _grid(across: _Axis, up: _Axis) -> Markup:
    parts = []
    for value in up.ticks():
        y = f"{up(value):.1f}"
        parts.append(tag("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y, class_="grid"))
        parts.append(
            tag("text", f"{value:.4g}", x=_LEFT - 6, y=f"{up(value) + 4:.1f}", class_="tick", text_anchor="end")
        )
    for value in across.ticks():
        at = {"x": f"{across(value):.1f}", "y": _HEIGHT - _BOTTOM + 16, "text_anchor": "middle"}
        parts.append(tag("text", f"{value:.6g}", class_="tick", **at))
    return join(parts)


def _axis_names(x_name: str, y_name: str) -> Markup:
    middle = (_HEIGHT - _BOTTOM + _TOP) // 2
    turned = {"transform": f"rotate(-90 12 {middle})", "text_anchor": "middle"}
    return join(
        [
            tag("text", x_name, x=(_WIDTH + _LEFT) // 2, y=_HEIGHT - 4, class_="tick", text_anchor="middle"),
            tag("text", y_name, x=12, y=middle, class_="tick", **turned),
        ]
    )


def _path(line: Line, across: _Axis, up: _Axis) -> str:
    out, pen = [], "M"
    for x, y in zip(line.xs, line.ys):
        if y is None:
            pen = "M"
            continue
        # A zero-length stroke with round caps: a point between two gaps still shows.
        out.append(f"{pen}{across(float(x)):.1f} {up(y):.1f}" + ("h0" if pen == "M" else ""))
        pen = "L"
    return "".join(out)


def _thin(xs: Sequence[int | float], ys: Sequence[float | None]) -> tuple[list[int | float], list[float | None]]:
    count = min(len(xs), len(ys))
    keep = range(count) if count <= MAX_POINTS else [i * (count - 1) // (MAX_POINTS - 1) for i in range(MAX_POINTS)]
    return [xs[i] for i in keep], [y if (y := ys[i]) is not None and abs(y) < _LARGEST else None for i in keep]


def _short(label: str) -> str:
    """The end of a long name tells more than its beginning."""
    return label if len(label) <= 24 else "…" + label[-23:]


def _svg(height: int, name: str, parts: Sequence[Markup]) -> Markup:
    return tag("svg", tag("title", name), *parts, viewBox=f"0 0 {_WIDTH} {height}", role="img", aria_label=name)
