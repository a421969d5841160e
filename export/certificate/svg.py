"""Two small plots as inline SVG: how errors are distributed, and the model's values against the reference's."""

from __future__ import annotations

import math
from collections.abc import Sequence

from export.certificate.escaping import escaped, quoted
from export.certificate.verdicts import Plot

WIDTH, HEIGHT = 360, 220
LEFT, RIGHT, TOP, BOTTOM = 60, 22, 12, 36


def histogram(plot: Plot, limit: float | None, title: str) -> str:
    """Errors in units of the output's scale, on a logarithmic axis, counted on another; a line at the budget's limit.

    Args:
        plot: The data.
        limit: The largest error allowed, in the same units; None for none.
        title: What it shows, for screen readers and as a tooltip.
    """
    low, high = plot.edges[0], plot.edges[-1]
    tallest = math.log10(max(plot.counts) + 1) or 1.0
    bars = []
    for start, end, count in zip(plot.edges, plot.edges[1:], plot.counts, strict=False):
        height = math.log10(count + 1) / tallest * (HEIGHT - TOP - BOTTOM)
        x, right = _x(start, low, high), _x(end, low, high)
        if count:
            bars.append(
                f'<rect class="bar" x="{x:.1f}" y="{HEIGHT - BOTTOM - height:.1f}" width="{right - x - 1:.1f}" '
                f'height="{height:.1f}"><title>{count} values</title></rect>'
            )
    ticks = [(value, f"1e{value}") for value in range(math.ceil(low), math.floor(high) + 1, 2)]
    marks = [_tick_x(_x(value, low, high), text) for value, text in ticks]
    if limit is not None and limit > 0 and low <= math.log10(limit) <= high:
        x = _x(math.log10(limit), low, high)
        marks.append(f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    top = f'<text x="{LEFT - 6}" y="{TOP + 8}" text-anchor="end">{max(plot.counts)}</text>'
    return _svg(title, [*bars, *marks, top, _label("error / output's scale")])


def scatter(plot: Plot, title: str) -> str:
    """The model's values over the reference's, with the line on which they are equal."""
    values = [*plot.reference, *plot.candidate]
    low, high = min(values), max(values)
    if low == high:
        low, high = low - 1, high + 1
    diagonal = (
        f'<line class="equal" x1="{_x(low, low, high):.1f}" y1="{_y(low, low, high):.1f}" '
        f'x2="{_x(high, low, high):.1f}" y2="{_y(high, low, high):.1f}"/>'
    )
    dots = [
        f'<circle class="dot" cx="{_x(x, low, high):.1f}" cy="{_y(y, low, high):.1f}" r="2"/>'
        for x, y in zip(plot.reference, plot.candidate, strict=True)
    ]
    ticks = [_tick_x(_x(value, low, high), f"{value:.2g}") for value in (low, high)]
    sides = [
        f'<text x="{LEFT - 6}" y="{_y(value, low, high) + 4:.1f}" text-anchor="end">{value:.2g}</text>' for value in (low, high)
    ]
    return _svg(title, [diagonal, *dots, *ticks, *sides, _label("float32 (across) and fp16 (up)")])


def _svg(title: str, parts: Sequence[str]) -> str:
    axes = (
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>'
        f'<line class="axis" x1="{LEFT}" x2="{LEFT}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label={quoted(title)}>'
        f"<title>{escaped(title)}</title>{axes}{''.join(parts)}</svg>"
    )


def _tick_x(x: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{escaped(text)}</text>'


def _label(text: str) -> str:
    return (
        f'<text class="label" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{escaped(text)}</text>'
    )


def _x(value: float, low: float, high: float) -> float:
    return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)


def _y(value: float, low: float, high: float) -> float:
    return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)
