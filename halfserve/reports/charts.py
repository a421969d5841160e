"""Charts of a report as SVG of a phone's width. Their colours follow the page's theme; the legend below wraps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

from halfserve.reports.page import escaped, quoted

WIDTH, HEIGHT = 360, 240
LEFT, RIGHT, TOP, BOTTOM = 46, 16, 24, 38
COLOURS = 7  # of series; one more is grey
GREY = 7
MOST_TICKS = 7
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis of a chart.

    Attributes:
        label: Name and unit.
        low: The value at its start; above 0 on a logarithmic axis.
        high: The value at its end, larger than `low`.
        ticks: Values with their texts.
        logarithmic: Whether equal distances are equal ratios.
    """

    label: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    logarithmic: bool = False

    @classmethod
    def linear(cls, label: str, values: Iterable[float], *, from_zero: bool = True) -> Self:
        """Return an axis over these values whose ticks are round numbers."""
        known = [value for value in values if math.isfinite(value)] or [0.0]
        low, high = (min(0.0, *known) if from_zero else min(known)), max(known)
        if low == high:
            low, high = (0.0, 1.0) if from_zero and low == 0 else (low - 1, high + 1)
        step = _round_step((high - low) / (MOST_TICKS - 2))
        first, last = math.floor(low / step), math.ceil(high / step)
        ticks = [(number * step, _short(number * step)) for number in range(first, last + 1)]
        return cls(label=label, low=first * step, high=last * step, ticks=ticks)

    @classmethod
    def log(cls, label: str, values: Iterable[float], *, base: int = 10, ticks: Sequence[float] = ()) -> Self:
        """Return a logarithmic axis over the positive ones of these values; its ticks are powers of `base` unless given."""
        known = [value for value in (*values, *ticks) if math.isfinite(value) and value > 0] or [1.0]
        low, high = min(known), max(known)
        if not ticks:
            first, last = math.floor(math.log(low, base) + 1e-9), math.ceil(math.log(high, base) - 1e-9)
            first, last = (first, last) if first < last else (first - 1, last + 1)  # a flat curve is in the middle
            stride = math.ceil((last - first + 1) / MOST_TICKS)
            ticks = [float(base) ** power for power in range(first, last + 1, stride)]
            low, high = float(base) ** first, float(base) ** last
            if base == 10 and last - first == 1:
                ticks = [ticks[0], 2 * ticks[0], 5 * ticks[0], ticks[-1]]
        elif low == high:
            low, high = low / 2, high * 2
        texts = [(tick, power_text(tick, base)) for tick in ticks[:: math.ceil(len(ticks) / (MOST_TICKS + 1))]]
        return cls(label=label, low=low, high=high, ticks=texts, logarithmic=True)

    def share(self, value: float) -> float:
        """Return where a value is along the axis: 0 at its start, 1 at its end, NaN for a value without a place."""
        if not self.logarithmic:
            return (value - self.low) / (self.high - self.low)
        if not value > 0:
            return math.nan
        return math.log(value / self.low) / math.log(self.high / self.low)


class Chart:
    """A chart with two axes.

    Points of which a coordinate is NaN or infinite are left out. A series without a name is not in the legend.
    """

    def __init__(self, title: str, x: Axis, y: Axis) -> None:
        self._title, self._x, self._y = title, x, y
        self._parts: list[str] = []
        self._legend: list[str] = []

    def curve(self, name: str, points: Iterable[Point], series: int, *, dashed: bool = False, dots: bool = False) -> None:
        """Join points by lines; a point that is left out is a gap."""
        path, gap = "", True
        placed = [self._place(point) for point in points]
        for place in placed:
            path += "" if place is None else f"{'M' if gap else 'L'}{place[0]:.1f},{place[1]:.1f}"
            gap = place is None
        kind = _series(series)
        self._parts.append(f'<g class="{kind}"><path class="curve{" dashed" if dashed else ""}" d="{path}"/>')
        self._parts += [_dot(place, 3) for place in placed if dots and place is not None]
        self._parts.append("</g>")
        self._named(name, kind + " dashes" * dashed)

    def steps(self, name: str, points: Sequence[Point], series: int) -> None:
        """Draw horizontal lines from each point to the place of the next one."""
        corners = [corner for (x, y), (after, _) in pairwise(points) for corner in ((x, y), (after, y))]
        self.curve(name, [*corners, *points[-1:]], series)

    def dots(self, name: str, points: Iterable[Point], series: int, *, radius: float = 3, faint: bool = False) -> None:
        """Draw a dot for each point."""
        drawn = [_dot(place, radius) for place in map(self._place, points) if place is not None]
        self._parts.append(f'<g class="{_series(series)}{" faint" if faint else ""}">{"".join(drawn)}</g>')
        self._named(name, f"{_series(series)} dots")

    def bar(self, start: float, end: float, height: float, title: str) -> None:
        """Draw a bar between two places of the x axis, from the x axis up."""
        (x, y), (right, _) = self._at(start, height), self._at(end, height)
        self._parts.append(
            f'<rect class="filled s0" x="{x:.1f}" y="{y:.1f}" width="{max(right - x - 1, 0.5):.1f}" '
            f'height="{HEIGHT - BOTTOM - y:.1f}"><title>{escaped(title)}</title></rect>'
        )

    def text(self, point: Point, text: str) -> None:
        """Write above a point."""
        place = self._place(point)
        if place is not None:
            self._parts.append(_text(place[0], place[1] - 7, text, "middle"))

    def limit(self, *, name: str, x: float | None = None, y: float | None = None) -> None:
        """Draw a dashed line across the chart at a value of one axis, where the axis has that value."""
        share = self._x.share(x) if x is not None else self._y.share(math.nan if y is None else y)
        if not 0 <= share <= 1:
            return
        ends = ((share, 0.0), (share, 1.0)) if x is not None else ((0.0, share), (1.0, share))
        self._parts.append(_segment("limit", *(_pixels(*end) for end in ends)))
        self._named(name, "limits")

    def diagonal(self) -> None:
        """Draw the line on which both coordinates are equal; both axes have the same range."""
        self._parts.append(_segment("equal", _pixels(0, 0), _pixels(1, 1)))

    def figure(self) -> str:
        """Return the chart as an element of a page."""
        legend = f'<ul class="legend">{"".join(self._legend)}</ul>' if self._legend else ""
        return (
            f'<figure><figcaption>{escaped(self._title)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f"aria-label={quoted(self._title)}>{''.join([*self._frame(), *self._parts])}</svg>{legend}</figure>"
        )

    def _named(self, name: str, kind: str) -> None:
        if name:
            self._legend.append(_key(name, kind))

    def _frame(self) -> Iterable[str]:
        for value, text in self._y.ticks:
            share = self._y.share(value)
            yield _segment("grid" if share else "axis", _pixels(0, share), _pixels(1, share))
            yield _text(LEFT - 6, _pixels(0, share)[1] + 4, text, "end")
        yield _segment("axis", _pixels(0, 0), _pixels(1, 0))
        for value, text in self._x.ticks:
            yield _text(_pixels(self._x.share(value), 0)[0], HEIGHT - BOTTOM + 14, text, "middle")
        yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5, self._x.label, "middle")
        yield _text(2, 11, self._y.label, "start")

    def _place(self, point: Point) -> Point | None:
        place = self._at(*point)
        return place if all(map(math.isfinite, place)) else None

    def _at(self, x: float, y: float) -> Point:
        return _pixels(self._x.share(x), self._y.share(y))


def stacked_bars(title: str, parts: Sequence[str], rows: Sequence[tuple[str, Sequence[float]]], unit: str) -> str:
    """Return a horizontal bar for each row, made of its parts, with the sum beside it; of any number of rows and long names."""
    longest = max((sum(sizes) for _, sizes in rows), default=0) or 1.0
    lines = []
    for name, sizes in rows:
        start, drawn = 0.0, []
        for series, size in enumerate(sizes):
            drawn.append(
                f'<rect class="filled {_series(series)}" x="{start:.2f}" width="{100 * size / longest:.2f}" height="10"/>'
            )
            start += 100 * size / longest
        said = ", ".join(f"{part} {size:.3g} {unit}" for part, size in zip(parts, sizes, strict=True))
        bar = f'<svg viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label={quoted(said)}>'
        bar += f"<title>{escaped(said)}</title>{''.join(drawn)}</svg>"
        lines.append(f"<span>{escaped(name)}</span>{bar}<span>{sum(sizes):.3g} {escaped(unit)}</span>")
    legend = "".join(_key(part, f"{_series(series)} dots") for series, part in enumerate(parts))
    return (
        f'<figure><figcaption>{escaped(title)}</figcaption><div class="bars">{"".join(lines)}</div>'
        f'<ul class="legend">{legend}</ul></figure>'
    )


def charts(figures: Iterable[str]) -> str:
    """Return figures beside each other where there is room; nothing without any."""
    content = "".join(figures)
    return f'<div class="charts">{content}</div>' if content else ""


def _series(number: int) -> str:
    return f"s{number if number == GREY else number % COLOURS}"


def _pixels(x: float, y: float) -> Point:
    return LEFT + x * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y * (HEIGHT - TOP - BOTTOM)


def _dot(place: Point, radius: float) -> str:
    return f'<circle class="filled" cx="{place[0]:.1f}" cy="{place[1]:.1f}" r="{radius:g}"/>'


def _segment(kind: str, start: Point, end: Point) -> str:
    return f'<line class="{kind}" x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escaped(text)}</text>'


def _key(name: str, kind: str) -> str:
    return f'<li><span class="key {kind}"></span>{escaped(name)}</li>'


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _short(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{value:,.6g}"


def power_text(value: float, base: int = 10) -> str:
    """Return a number; a very small or large power of the base as that power."""
    if 1e-3 <= value < 1e4:
        return f"{value:.6g}"
    exponent = round(math.log(value, base))
    return f"{base}{str(exponent).translate(SUPERSCRIPTS)}" if math.isclose(float(base) ** exponent, value) else _short(value)
