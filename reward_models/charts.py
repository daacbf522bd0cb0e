"""Small inline SVG charts for the report: no images, no scripts, colours from the page's style sheet.

Drawn about as wide as a phone, so that their lettering keeps its size in one column or in four.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 320, 184
_LEFT, _RIGHT, _TOP, _BOTTOM = 42, 12, 10, 34


def number(value: float | int | None) -> str:
    """Three significant digits, no exponent where a reader would not expect one."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}".replace("-", "−")
    digits = 3 if abs(value) < 100 else 4
    text = f"{value:.{digits}g}" if 1e-3 <= abs(value) < 1e5 else f"{value:.2e}"
    return text.replace("-", "−")


def ticks(low: int | float, high: int | float, count: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) that cover the range with about `count` steps."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


@dataclass(frozen=True)
class _Axes:
    x: tuple[int | float, int | float]
    y: tuple[int | float, int | float]

    def at(self, x: int | float, y: int | float) -> str:
        return f"{self.px(x):.1f},{self.py(y):.1f}"

    def px(self, x: int | float) -> float:
        return _LEFT + (x - self.x[0]) / (self.x[1] - self.x[0]) * (WIDTH - _LEFT - _RIGHT)

    def py(self, y: int | float) -> float:
        return HEIGHT - _BOTTOM - (y - self.y[0]) / (self.y[1] - self.y[0]) * (HEIGHT - _TOP - _BOTTOM)

    def frame(self, x_label: str) -> Iterable[str]:
        base = HEIGHT - _BOTTOM
        for y in ticks(*self.y):
            kind = "zero" if y == 0 else "grid"
            yield f'<path class="{kind}" d="M{_LEFT},{self.py(y):.1f}H{WIDTH - _RIGHT}"/>'
            yield f'<text class="tick end" x="{_LEFT - 6}" y="{self.py(y) + 3.5:.1f}">{number(y)}</text>'
        for x in ticks(*self.x):
            yield f'<text class="tick mid" x="{self.px(x):.1f}" y="{base + 14}">{number(x)}</text>'
        yield f'<text class="tick end" x="{WIDTH - _RIGHT}" y="{HEIGHT - 5}">{escape(x_label)}</text>'


Point = tuple[int | float, int | float]
LINES = 6  # that a chart can tell apart: by colour, and by dashes for print and the colour-blind
SPOTS = 120  # points of a line that say their value


@dataclass(frozen=True)
class Series:
    """One line: a name for the legend, its points, and a band around it as (x, low, high)."""

    name: str
    points: Sequence[Point]
    band: Sequence[tuple[int | float, int | float, int | float]] = ()


def line_chart(series: Sequence[Series], *, label: str, x_label: str = "step") -> Markup:
    """Up to `LINES` lines over a common x; each point says its value when pointed at."""
    series = [_finite(one) for one in series]
    points = [point for one in series for point in one.points]
    edges = [y for one in series for _, *ends in one.band for y in ends]
    if not points:
        return Markup("")
    axes = _Axes(_range(x for x, _ in points), _range([*(y for _, y in points), *edges], pad=0.08))
    body = list(axes.frame(x_label))
    for i, one in enumerate(series):
        if len(one.band) > 1:
            upper = [axes.at(x, high) for x, _, high in one.band]
            lower = [axes.at(x, low) for x, low, _ in reversed(one.band)]
            body.append(f'<polygon class="band s{i}" points="{" ".join(upper + lower)}"/>')
    for i, one in enumerate(series):
        if len(one.points) > 1:
            path = " ".join(axes.at(x, y) for x, y in one.points)
            body.append(f'<polyline class="line s{i}" points="{path}"/>')
        spoken = one.points[:: -(-len(one.points) // SPOTS) or 1]
        drawn = len(one.points) <= 40 // len(series)  # dots fill the dashes by which lines are told apart in print
        body += _dots(spoken, axes, i, one.name, x_label, 2.5 if drawn else 0)
    return _svg(label, body)


def _finite(series: Series) -> Series:
    points = [point for point in series.points if all(map(math.isfinite, point))]
    return Series(series.name, points, [edge for edge in series.band if all(map(math.isfinite, edge))])


def _dots(points: Iterable[Point], axes: _Axes, i: int, name: str, x_label: str, radius: int | float) -> Iterable[str]:
    """Marks that say their value; radius 0 draws nothing but still says it."""
    kind = "dot" if radius else "spot"
    for x, y in points:
        says = escape(f"{name}, {x_label} {number(x)}: {number(y)}")
        place = f'cx="{axes.px(x):.1f}" cy="{axes.py(y):.1f}" r="{radius or 3}"'
        yield f'<circle class="{kind} s{i}" {place}><title>{says}</title></circle>'


def scatter_chart(points: Sequence[Point], line: tuple[float, float] | None, *, label: str, x_label: str) -> Markup:
    """Points, and the straight line of a slope and an intercept where there is one."""
    ends = []
    if line is not None:
        ends = [(x, line[0] * x + line[1]) for x in (min(x for x, _ in points), max(x for x, _ in points))]
    axes = _Axes(_range((x for x, _ in points), pad=0.03), _range((y for _, y in [*points, *ends]), pad=0.06))
    body = [*axes.frame(x_label), *_dots(points, axes, 0, "score", x_label, 1.8)]
    if ends:
        body.append(f'<polyline class="line s1" points="{" ".join(axes.at(x, y) for x, y in ends)}"/>')
    return _svg(label, body)


def histogram(counts: Sequence[tuple[int, int, int]], *, label: str, x_label: str) -> Markup:
    """Bars of (first, last, how many) over whole numbers, as shares of all."""
    total = sum(count for *_, count in counts) or 1
    axes = _Axes((counts[0][0] - 0.5, counts[-1][1] + 0.5), (0.0, 1.08 * max(count for *_, count in counts) / total))
    body = list(axes.frame(x_label))
    for first, last, count in counts:
        left, right, top = axes.px(first - 0.5), axes.px(last + 0.5), axes.py(count / total)
        says = f"{first if first == last else f'{first} to {last}'}: {count} ({100 * count / total:.0f} %)"
        body.append(
            f'<rect class="bin" x="{left + 0.5:.1f}" y="{top:.1f}" width="{max(right - left - 1, 0.6):.1f}" '
            f'height="{HEIGHT - _BOTTOM - top:.1f}"><title>{escape(says)}</title></rect>'
        )
    return _svg(label, body)


def location_chart(
    points: Sequence[tuple[float, float, int]],
    curve: Callable[[float], float],
    *,
    label: str,
    band: Callable[[float], float] | None = None,
) -> Markup:
    """Points (location, value, rewards behind it) with the fitted curve; `band` shades curve ± band."""
    places = [(i + 1) / 100 for i in range(100)]
    smallest = min((p for p, *_ in points), default=0.02)
    places = [p for p in places if p >= min(smallest, 0.9)] or [1.0]
    half = band or (lambda p: 0.0)
    edges = [curve(p) + sign * half(p) for p in places for sign in (-1, 1)]
    values = [value for _, value, _ in points]
    axes = _Axes((0.0, 1.0), _range([*edges, *values], pad=0.06))
    body = list(axes.frame("location in the answer (1 = its end)"))
    if band is not None:
        upper = [axes.at(p, curve(p) + half(p)) for p in places]
        lower = [axes.at(p, curve(p) - half(p)) for p in reversed(places)]
        body.append(f'<polygon class="band" points="{" ".join(upper + lower)}"/>')
    largest = max((count for *_, count in points), default=1)
    for p, value, count in points:
        radius = 1.2 + 2.3 * math.sqrt(count / largest)
        says = f"location {number(p)}: {number(value)}"
        body.append(
            f'<circle class="dot s0" cx="{axes.px(p):.1f}" cy="{axes.py(value):.1f}" r="{radius:.1f}">'
            f"<title>{escape(says)} ({count} rewards)</title></circle>"
        )
    body.append(f'<polyline class="line s1" points="{" ".join(axes.at(p, curve(p)) for p in places)}"/>')
    return _svg(label, body)


def _range(values: Iterable[int | float], pad: float = 0.0) -> tuple[int | float, int | float]:
    held = list(values)
    low, high = min(held), max(held)
    if high - low < 1e-9 * max(1.0, abs(high)):
        half = max(abs(high) * 0.1, 0.5)
        return low - half, high + half
    return low - pad * (high - low), high + pad * (high - low)


def _svg(label: str, body: Iterable[str]) -> Markup:
    """`body` is markup made above; every piece of text in it has been escaped there."""
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">'
    return Markup(head + "".join(body) + "</svg>")
