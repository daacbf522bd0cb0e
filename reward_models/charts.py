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


def ticks(low: int | float, high: int | float, count: int = 4) -> list[float]:
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


@dataclass(frozen=True)
class Series:
    """One line: a name for the legend and its points."""

    name: str
    points: Sequence[tuple[int | float, int | float]]


def line_chart(series: Sequence[Series], *, label: str, x_label: str = "step") -> Markup:
    """Up to three lines over a common x; each point says its value when pointed at."""
    series = [
        Series(one.name, [(x, y) for x, y in one.points if math.isfinite(x) and math.isfinite(y)]) for one in series
    ]
    points = [point for one in series for point in one.points]
    if not points:
        return Markup("")
    axes = _Axes(_range(x for x, _ in points), _range((y for _, y in points), pad=0.08))
    body = list(axes.frame(x_label))
    for i, one in enumerate(series):
        if len(one.points) > 1:
            path = " ".join(axes.at(x, y) for x, y in one.points)
            body.append(f'<polyline class="line s{i}" points="{path}"/>')
        radius = 2.5 if len(one.points) <= 40 else 1.2
        for x, y in one.points:
            says = escape(f"{one.name}, {x_label} {number(x)}: {number(y)}")
            body.append(
                f'<circle class="dot s{i}" cx="{axes.px(x):.1f}" cy="{axes.py(y):.1f}" r="{radius}">'
                f"<title>{says}</title></circle>"
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
