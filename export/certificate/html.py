"""A certificate as one self-contained HTML page with inline SVG plots: no host, no script, no other file.

The page is also well-formed XML. Names come from untrusted models, so all text is escaped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from halfserve.export.certificate.budget import unit_of
from halfserve.export.certificate.certificate import Certificate
from halfserve.export.certificate.table import (
    accuracy_text,
    agreement_cell,
    kind_lines,
    origin_text,
    sizes_text,
    worst_verdicts,
)
from halfserve.export.certificate.verdicts import OutputVerdict, Plot, PrecisionVerdict
from halfserve.export.half_types import HALF_TYPES

TENSORS_SHOWN = 50
_BROKEN = ' class="broken"'
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1d2733; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin-top: 2rem; break-after: avoid; }
table { border-collapse: collapse; width: 100%; font-size: 0.88rem; } tr { break-inside: avoid; }
th, td { text-align: left; padding: 0.25rem 0.6rem; border-bottom: 1px solid #dde3ea; vertical-align: top;
  overflow-wrap: anywhere; }
th { color: #5a6878; font-weight: 600; } td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
.verdict { padding: 0.6rem 1rem; border-radius: 6px; font-weight: 600; margin: 1rem 0; }
.passed { background: #e2f4e8; color: #17633a; } .failed { background: #fce6e4; color: #9b1c13; }
tr.broken td { color: #9b1c13; } .plots { display: flex; flex-wrap: wrap; gap: 1rem; }
figure { margin: 0; flex: 1 1 20rem; max-width: 30rem; break-inside: avoid; } figcaption { font-size: 0.85rem; color: #5a6878; }
svg text { font-size: 11px; fill: #5a6878; } .axis { stroke: #9aa7b5; } .bar { fill: #3f7cc4; }
.dot { fill: #3f7cc4; opacity: 0.6; }
.equal { stroke: #9aa7b5; stroke-dasharray: 4 3; } .limit { stroke: #c8372d; stroke-dasharray: 4 3; }
code { font-size: 0.82rem; overflow-wrap: anywhere; }
"""
WIDTH, HEIGHT = 360, 220
LEFT, RIGHT, TOP, BOTTOM = 60, 22, 12, 36
# Characters that XML 1.0 forbids: control characters, lone surrogates and two non-characters.
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def certificate_page(certificate: Certificate) -> str:
    """Render the page: verdict, figures and plots of outputs, adversarial samples, levels, conversion, versions."""
    title = escaped(f"{certificate.model}: {HALF_TYPES[certificate.precision].short} certificate")
    body = "\n".join(part for part in _sections(certificate) if part)
    return (
        '<!DOCTYPE html>\n<html lang="en" xmlns="http://www.w3.org/1999/xhtml">\n'
        '<head><meta charset="utf-8"/><meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{title}</title>\n<style>{STYLE}</style></head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _sections(certificate: Certificate) -> Iterator[str]:
    half = HALF_TYPES[certificate.precision]
    yield f"<h1>{escaped(certificate.model)}</h1>"
    made = escaped(certificate.created_utc)
    yield f"<p>{half.short} against its float32 reference, {certificate.samples} samples, {made}</p>"
    yield _verdict(certificate)
    yield _section("Outputs", _outputs(certificate.outputs))
    yield _section("Kinds of columns", _list([*kind_lines(certificate)]))
    yield _section("Errors", _plots(certificate))
    yield _section("At the edge", _edges(certificate))
    yield _section("Optimisation levels of ONNX Runtime", _levels(certificate))
    yield _section("Sums that outgrow float16", _risks(certificate))
    yield _section("Notes", _list(certificate.notes))
    for precision, verdict in certificate.precisions.items():
        parts = (
            _verdict(verdict),
            _outputs(verdict.outputs),
            _list([*kind_lines(verdict)]),
            _edges(verdict),
            _list(verdict.notes),
        )
        yield _section(f"Computed in {precision}", "".join(parts))
    yield from _conversion(certificate.conversion or {})
    yield _section("Model and libraries", _facts(certificate))


def _verdict(verdict: PrecisionVerdict) -> str:
    if verdict.passed:
        return '<p class="verdict passed">Within budget</p>'
    return f'<div class="verdict failed">Over budget{_list(verdict.violations or ["nothing was compared"])}</div>'


def _outputs(outputs: Sequence[OutputVerdict]) -> str:
    names = ("output", "run", "max error", "mean error", "of scale", "scale", "ulp", "cosine", "NaN/inf", "agreement")
    rows = []
    for verdict in outputs:
        f = verdict.figures
        numbers = (f.max_abs_error, f.mean_abs_error, f.max_scaled_error, f.scale, f.max_ulp)
        cells = (*(f"{number:.3g}" for number in numbers), f"{f.cosine:.6f}", str(f.non_finite), agreement_cell(f))
        rows.append(((verdict.name, verdict.execution, *cells), bool(verdict.violations)))
    return _table(names, rows, text_columns=2)


def _plots(certificate: Certificate) -> str:
    figures = []
    for verdict in certificate.outputs:
        if verdict.plot is None:
            continue
        name = f"{verdict.name} ({verdict.execution})"
        limit = certificate.budget.max_scaled_error
        if certificate.budget.max_abs_error is not None:
            limit = certificate.budget.max_abs_error / unit_of(verdict.figures)
        drawn = (histogram(verdict.plot, limit, f"errors of {name}"), scatter(verdict.plot, f"values of {name}"))
        figures += [f"<figure>{svg}<figcaption>{escaped(name)}</figcaption></figure>" for svg in drawn]
    return f'<div class="plots">{"".join(figures)}</div>' if figures else ""


def _edges(verdict: PrecisionVerdict) -> str:
    rows = []
    for line in worst_verdicts(verdict):
        error = "" if line.figures is None else f"{line.figures.max_abs_error:.3g}"
        outcome = line.note or "; ".join(line.violations) or "within budget"
        rows.append(((line.case, line.execution, line.output, outcome, error), bool(line.violations) and line.factor is None))
    table = _table(("samples", "run", "output", "outcome", "max error"), rows, text_columns=4)
    if verdict.headroom is None:
        return table
    return table + f"<p>Headroom: holds up to {verdict.headroom:g} times the samples' magnitude.</p>"


def _levels(certificate: Certificate) -> str:
    rows = []
    for level in certificate.levels:
        error = "" if level.max_scaled_error is None else f"{level.max_scaled_error:.3g}"
        rows.append(((level.provider, level.level, level.trouble or "sound", error), level.trouble is not None))
    return _table(("provider", "level", "outcome", "of scale"), rows, text_columns=3)


def _risks(certificate: Certificate) -> str:
    broken = certificate.accumulators == "float16"
    rows = [((r.node, r.op_type, r.module or "", r.what, f"{r.reach:.3g}"), broken) for r in certificate.risks]
    return _table(("node", "operator", "module", "what", "reaches"), rows, text_columns=4)


def _conversion(conversion: dict[str, Any]) -> Iterator[str]:
    share, dtype = "", escaped(str(conversion.get("dtype", "float16")))
    if "fp16_nodes" in conversion and "float_nodes" in conversion:
        share = f"<p>{conversion['fp16_nodes']} of {conversion['float_nodes']} float nodes compute in {dtype}.</p>"
    yield _section("Kept in float32", share + (_kept(conversion.get("kept", ())) or _modules(conversion)))
    repairs = [((_text(entry.get("pass_name")), _text(entry.get("text"))), False) for entry in conversion.get("repairs", ())]
    yield _section("Repairs", _table(("pass", "what was done"), repairs, text_columns=2))
    yield _section("What rounding did to weights", _ledger(conversion))


def _kept(nodes: Sequence[dict[str, Any]]) -> str:
    columns = {"name": "node", "op_type": "operator", "module": "module", "source": "source line"}
    columns |= {"reason": "reason", "cost": "cost"}
    used = [key for key in columns if any(node.get(key) is not None for node in nodes)]
    rows = [([_text(node.get(key)) for key in used], False) for node in nodes]
    return _table([columns[key] for key in used], rows, text_columns=len(columns))


def _modules(conversion: dict[str, Any]) -> str:
    reasons = conversion.get("fp32_reasons", {})
    rows = [((_text(name), _text(reasons.get(name))), False) for name in conversion.get("fp32_modules", ())]
    return _table(("module", "reason"), rows, text_columns=2)


def _ledger(conversion: dict[str, Any]) -> str:
    total = ", ".join(f"{count} {name}" for name, count in conversion.get("ledger", {}).items())
    rows = []
    for tensor in conversion.get("tensors", ())[:TENSORS_SHOWN]:
        counts = tensor.get("ledger", tensor)
        cells = [_text(counts.get(name)) for name in ("overflow", "flushed", "subnormal")]
        rows.append(((_text(tensor.get("name")), _text(tensor.get("elements")), *cells), False))
    table = _table(("tensor", "elements", "overflow", "flushed", "subnormal"), rows, text_columns=1)
    return (f"<p>In all: {escaped(total)}.</p>" if total else "") + table


def _facts(certificate: Certificate) -> str:
    facts = {"SHA-256 of the file": certificate.onnx_sha256, "SHA-256 of the graph": certificate.graph_sha256}
    facts["size"] = f"{certificate.onnx_bytes:,} bytes"
    if certificate.reference_bytes:
        facts["size"] += f", {certificate.onnx_bytes / certificate.reference_bytes:.0%} of float32's"
    facts["origin"] = origin_text(certificate)
    facts["sizes tried"] = sizes_text(certificate)
    if certificate.accuracy is not None:
        facts["accuracy"] = accuracy_text(certificate.accuracy)
    limits = vars(certificate.budget).items()
    facts["budget"] = ", ".join(f"{name} {value:g}" for name, value in limits if value is not None)
    facts["sums"] = f"{certificate.accumulators} accumulators"
    rows = [((name, value), False) for name, value in {**facts, **certificate.versions}.items() if value]
    return _table((), rows, text_columns=2)


def _section(title: str, content: str) -> str:
    return f"<h2>{escaped(title)}</h2>\n{content}" if content else ""


def _table(names: Sequence[str], rows: Iterable[tuple[Sequence[str], bool]], *, text_columns: int) -> str:
    """Render a table whose columns after the first `text_columns` are numbers; rows marked True are over budget."""
    lines = [_line("td", cells, text_columns, broken=broken) for cells, broken in rows]
    if not lines:
        return ""
    head = f"<thead>{_line('th', names, text_columns)}</thead>" if names else ""
    return f"<table>{head}<tbody>{''.join(lines)}</tbody></table>"


def _line(tag: str, cells: Sequence[str], text_columns: int, *, broken: bool = False) -> str:
    kinds = ["" if index < text_columns else ' class="number"' for index in range(len(cells))]
    shown = "".join(f"<{tag}{kind}>{escaped(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
    return f"<tr{_BROKEN if broken else ''}>{shown}</tr>"


def _list(texts: Sequence[str]) -> str:
    items = "".join(f"<li>{escaped(text)}</li>" for text in texts)
    return f"<ul>{items}</ul>" if items else ""


def _text(value: object) -> str:
    return "" if value is None else str(value)


def histogram(plot: Plot, limit: float | None, title: str) -> str:
    """Histogram of errors in units of the output's scale, both axes logarithmic, with a line at the limit.

    Args:
        plot: The data.
        limit: The largest allowed error in the same units; None for no line.
        title: Accessible name and tooltip.
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
    """Scatter plot of the converted model's values over the reference's, with the line of equality."""
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
    return _svg(title, [diagonal, *dots, *ticks, *sides, _label("float32 (across) and converted (up)")])


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


def escaped(text: str) -> str:
    """Escape text for an element's content; forbidden characters become U+FFFD."""
    return escape(_FORBIDDEN.sub("\ufffd", text))


def quoted(text: str) -> str:
    """Escape text as an attribute's value, including the quotes."""
    return quoteattr(_FORBIDDEN.sub("\ufffd", text))
