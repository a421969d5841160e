"""A certificate as one HTML page: verdict, figures, error plots, adversarial samples, conversion and versions, with the words
that it uses explained where it uses them. It is HTML and well-formed XML; every name from the model is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
from halfserve.export.certificate.verdicts import Plot, PrecisionVerdict
from halfserve.export.certificate.words import ABOUT, LEDGER_WORDS, budget_lines, figure_words, run_words
from halfserve.export.half_types import HALF_TYPES, HalfName
from halfserve.reports.charts import Axis, Chart, charts, power_text
from halfserve.reports.page import bullets, definitions, escaped, paragraph, report_page, section, table

TENSORS_SHOWN = 50


def certificate_page(certificate: Certificate) -> str:
    """Render the page: verdict, figures and plots of outputs, adversarial samples, levels, conversion, versions."""
    return report_page(f"{certificate.model}: {HALF_TYPES[certificate.precision].short} certificate", _sections(certificate))


def _sections(certificate: Certificate) -> Iterator[str]:
    half = HALF_TYPES[certificate.precision]
    yield f"<h1>Precision certificate of {escaped(certificate.model)}</h1>"
    about = f"{half.short} against its float32 reference, {certificate.samples} samples, {certificate.created_utc}"
    yield paragraph(about, "quiet")
    yield verdict_part(certificate, certificate.advice)
    yield section("Outputs", outputs_part(certificate, certificate.precision), ABOUT["outputs"])
    yield section("Kinds of columns", bullets(kind_lines(certificate)), ABOUT["kinds"])
    yield section("Errors", errors_part(certificate), ABOUT["errors"])
    yield section("At the edge", _edges(certificate), ABOUT["edges"])
    yield section("Optimisation levels of ONNX Runtime", _levels(certificate), ABOUT["levels"])
    yield section("Sums that outgrow float16", _risks(certificate), ABOUT["risks"])
    yield section("Notes", bullets(certificate.notes))
    for precision, verdict in certificate.precisions.items():
        parts = (
            verdict_part(verdict),
            outputs_part(verdict, precision, explained=False),
            bullets(kind_lines(verdict)),
            _edges(verdict),
            bullets(verdict.notes),
        )
        yield section(f"Computed in {precision}", "".join(parts), ABOUT["precision"])
    yield from _conversion(certificate.conversion or {})
    yield section("Model and libraries", _facts(certificate))


def verdict_part(verdict: PrecisionVerdict, advice: str = "") -> str:
    """Return the verdict, with the limits that were kept, or what is beyond them and the advice on it."""
    if verdict.passed:
        return f'<p class="verdict passed">Within budget</p>{bullets(budget_lines(verdict))}'
    broken = bullets(verdict.failures or ["nothing was compared"])
    why = paragraph(f"Cause and cure: {advice}.") if advice else ""
    limits = paragraph("The budget:") + bullets(budget_lines(verdict))
    return f'<div class="verdict failed">Over budget{broken}</div>{why}{limits}'


def outputs_part(verdict: PrecisionVerdict, precision: HalfName, *, explained: bool = True) -> str:
    """Return the table of the outputs' figures; `explained` adds its words."""
    names = ("output", "run", "max error", "of scale", "agreement", "NaN/inf", "mean error", "scale", "ulp", "cosine")
    rows = []
    for output in verdict.outputs:
        f = output.figures
        judged = (f"{f.max_abs_error:.3g}", f"{f.max_scaled_error:.3g}", agreement_cell(f), str(f.non_finite))
        others = (f"{f.mean_abs_error:.3g}", f"{f.scale:.3g}", f"{f.max_ulp:,.0f}", f"{f.cosine:.6f}")
        rows.append((output.name, output.execution, *judged, *others))
    broken = [index for index, output in enumerate(verdict.outputs) if output.violations]
    words = {**run_words(verdict, precision), **figure_words(verdict, precision)} if rows and explained else {}
    return table(names, rows, numbers=range(2, len(names)), broken=broken) + definitions(words)


def errors_part(certificate: Certificate) -> str:
    """Return a histogram of errors and a scatter plot of values for each output that has data for them."""
    figures = []
    for verdict in certificate.outputs:
        if verdict.plot is None:
            continue
        name = f"{verdict.name} ({verdict.execution})"
        limit = certificate.budget.max_scaled_error
        if certificate.budget.max_abs_error is not None:
            limit = certificate.budget.max_abs_error / unit_of(verdict.figures)
        figures += [histogram(verdict.plot, limit, f"{name}: its errors"), scatter(verdict.plot, f"{name}: its values")]
    return charts(figures)


def _edges(verdict: PrecisionVerdict) -> str:
    rows: list[tuple[str, ...]] = []
    broken = []
    for line in worst_verdicts(verdict):
        error = "" if line.figures is None else f"{line.figures.max_abs_error:.3g}"
        outcome = line.note or "; ".join(line.violations) or "within budget"
        if line.violations and line.factor is None:
            broken.append(len(rows))
        rows.append((line.case, outcome, line.execution, line.output, error))
    shown = table(("samples", "outcome", "run", "output", "max error"), rows, numbers=[4], broken=broken)
    if verdict.headroom is None:
        return shown
    return shown + paragraph(
        f"Headroom: holds up to {verdict.headroom:g} times the samples' magnitude. The answers stayed within these limits with "
        "the samples' numbers multiplied by up to this factor."
    )


def _levels(certificate: Certificate) -> str:
    rows = []
    for level in certificate.levels:
        error = "" if level.max_scaled_error is None else f"{level.max_scaled_error:.3g}"
        rows.append((level.provider, level.level, level.trouble or "sound", error))
    broken = [index for index, level in enumerate(certificate.levels) if level.trouble is not None]
    return table(("provider", "level", "outcome", "of scale"), rows, numbers=[3], broken=broken)


def _risks(certificate: Certificate) -> str:
    rows = [(r.node, r.op_type, r.module or "", r.what, f"{r.reach:.3g}") for r in certificate.risks]
    broken = range(len(rows) if certificate.accumulators == "float16" else 0)
    return table(("node", "operator", "module", "what", "reaches"), rows, numbers=[4], broken=broken)


def _conversion(conversion: dict[str, Any]) -> Iterator[str]:
    share, dtype = "", str(conversion.get("dtype", "float16"))
    if "fp16_nodes" in conversion and "float_nodes" in conversion:
        share = paragraph(f"{conversion['fp16_nodes']} of {conversion['float_nodes']} float nodes compute in {dtype}.")
    kept = _kept(conversion.get("kept", ())) or _modules(conversion)
    yield section("Kept in float32", share + kept, ABOUT["kept"] if kept else "")
    repairs = [(_text(entry.get("pass_name")), _text(entry.get("text"))) for entry in conversion.get("repairs", ())]
    yield section("Repairs", table(("pass", "what was done"), repairs), ABOUT["repairs"])
    yield section("What rounding did to weights", _ledger(conversion))


def _kept(nodes: Sequence[Mapping[str, Any]]) -> str:
    columns = {"name": "node", "op_type": "operator", "module": "module", "source": "source line"}
    columns |= {"reason": "reason", "cost": "cost"}
    used = [key for key in columns if any(node.get(key) is not None for node in nodes)]
    return table([columns[key] for key in used], [[_text(node.get(key)) for key in used] for node in nodes])


def _modules(conversion: dict[str, Any]) -> str:
    reasons = conversion.get("fp32_reasons", {})
    rows = [(_text(name), _text(reasons.get(name))) for name in conversion.get("fp32_modules", ())]
    return table(("module", "reason"), rows)


def _ledger(conversion: dict[str, Any]) -> str:
    total = ", ".join(f"{count} {name}" for name, count in conversion.get("ledger", {}).items() if count)
    rows = []
    rounded = [tensor for tensor in conversion.get("tensors", ()) if tensor.get("action") != "kept"]
    for tensor in rounded[:TENSORS_SHOWN]:
        counts = tensor.get("ledger", tensor)
        cells = [_text(counts.get(name)) for name in LEDGER_WORDS]
        rows.append((_text(tensor.get("name")), _text(tensor.get("elements")), *cells))
    shown = table(("tensor", "elements", *LEDGER_WORDS), rows, numbers=range(1, 5))
    content = paragraph(f"In all: {total}." if total else "") + shown
    return content and content + definitions(LEDGER_WORDS)


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
    return definitions({name: value for name, value in {**facts, **certificate.versions}.items() if value})


def _text(value: object) -> str:
    return "" if value is None else str(value)


def histogram(plot: Plot, limit: float | None, title: str) -> str:
    """Histogram of errors in units of the output's scale, both axes logarithmic, with a line at the limit.

    Args:
        plot: The data.
        limit: The largest allowed error in the same units; None for no line.
        title: The chart's title.
    """
    low, high = plot.edges[0], plot.edges[-1]
    powers = range(math.ceil(low), math.floor(high) + 1)
    errors = Axis(label="error / output's scale", low=low, high=high, ticks=[(n, power_text(10.0**n)) for n in powers[::2]])
    most = max(10, *plot.counts)
    counts = [0, *(10**n for n in range(math.ceil(math.log10(most)) + 1))]
    values = Axis(label="values", low=0, high=_height(counts[-1]), ticks=[(_height(n), f"{n:,}") for n in counts])
    chart = Chart(title, errors, values)
    for start, end, count in zip(plot.edges, plot.edges[1:], plot.counts, strict=False):
        if count:
            chart.bar(start, end, _height(count), f"{count} values")
    if limit is not None and limit > 0:
        chart.limit(name=f"limit, {limit:.3g}", x=math.log10(limit))
    return chart.figure()


def _height(count: int) -> float:
    return math.log10(count + 1)


def scatter(plot: Plot, title: str) -> str:
    """Scatter plot of the converted model's values over the reference's, with the line of equality."""
    values = [*plot.reference, *plot.candidate]
    across, up = (Axis.linear(label, values, from_zero=False) for label in ("float32's value", "converted"))
    chart = Chart(title, across, up)
    chart.diagonal()
    chart.dots("", zip(plot.reference, plot.candidate, strict=True), 0, radius=2, faint=True)
    return chart.figure()
