"""A certificate as a terminal table with a verdict, and the texts that it shares with the HTML page."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from halfserve.export.half_types import HALF_TYPES

if TYPE_CHECKING:
    from halfserve.export.certificate.budget import ColumnKind, ErrorFigures
    from halfserve.export.certificate.certificate import Certificate
    from halfserve.export.certificate.verdicts import Accuracy, AdversarialVerdict, OutputVerdict, PrecisionVerdict

KEPT_SHOWN = 5
RANGES_SHOWN = 4
RISKS_SHOWN = 3


def certificate_table(certificate: Certificate) -> Group:
    """Render the figures of every output, and below them sizes, accuracy, conversion, adversarial samples and the verdict.

    Figures and verdicts in further precisions follow.
    """
    behind = f"against its float32 reference, {certificate.samples} samples"
    title = f"{certificate.model}: {HALF_TYPES[certificate.precision].short} {behind}"
    parts: list[RenderableType] = [_figures(title, certificate)]
    parts += [*(Text(line) for line in _facts(certificate)), _verdict(certificate)]
    for precision, verdict in certificate.precisions.items():
        title = f"{certificate.model}: computed in {HALF_TYPES[precision].short} {behind}"
        parts.append(_figures(title, verdict))
        parts += [*(Text(line) for line in (*_results(verdict), *_doubts(verdict))), _verdict(verdict)]
    return Group(*parts)


def _figures(title: str, verdict: PrecisionVerdict) -> Table:
    table = Table(title=Text(title), box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    table.add_column("output (run)", overflow="fold")
    for heading in ("error", "of\nscale", "ulp", "cosine", "NaN/inf", "agrees"):
        table.add_column(heading, justify="right", no_wrap=True)
    for output in verdict.outputs:
        table.add_row(*(Text(cell) for cell in _row(output)), style="red" if output.violations else None)
    return table


def _row(verdict: OutputVerdict) -> list[str]:
    figures = verdict.figures
    return [
        f"{verdict.name} ({verdict.execution})",
        f"{figures.max_abs_error:.2g}",
        f"{figures.max_scaled_error:.2g}",
        f"{figures.max_ulp:.0f}",
        f"{figures.cosine:.6f}",
        str(figures.non_finite),
        agreement_cell(figures),
    ]


def agreement_cell(figures: ErrorFigures) -> str:
    """Return the share of rows that agree; "none" where no row is evidence, "" where no row has a choice."""
    if figures.agreement is None:
        return "none" if figures.constant_rows else ""
    return f"{figures.agreement:.2%}"


def accuracy_text(accuracy: Accuracy) -> str:
    """Return the converted model's accuracy beside the reference's."""
    return f"{accuracy.rounded:.2%}, float32 {accuracy.reference:.2%}"


def sizes_text(certificate: Certificate) -> str:
    """Return the sizes that were tried of each dimension whose size may vary."""
    return "; ".join(f"{name} {', '.join(map(str, sizes))}" for name, sizes in certificate.sizes.items())


def origin_text(certificate: Certificate) -> str:
    """Return the hub, name, revision and commit of a model that was fetched; empty for a model from a disk."""
    return " ".join(f"{name} {value}" for name, value in certificate.origin.items())


def kind_lines(verdict: PrecisionVerdict) -> Iterator[str]:
    """Yield one line for each kind of columns: its columns, its scale and its largest error."""
    for output in verdict.outputs:
        yield from (f"{output.name} ({output.execution}): {_kind_line(output.figures, k)}" for k in output.figures.kinds)


def _kind_line(figures: ErrorFigures, kind: ColumnKind) -> str:
    ranges = [f"{first}" if first == last else f"{first}-{last}" for first, last in kind.columns[:RANGES_SHOWN]]
    more = f" and {len(kind.columns) - RANGES_SHOWN} more ranges" if len(kind.columns) > RANGES_SHOWN else ""
    return (
        f"columns {', '.join(ranges)}{more} on axis {figures.axis} reach {kind.scale:.3g}: error {kind.max_abs_error:.2g}, "
        f"{kind.max_scaled_error:.2g} of {kind.unit:.3g}, in column {kind.worst}"
    )


def _facts(certificate: Certificate) -> Iterator[str]:
    if certificate.reference_bytes:
        share = certificate.onnx_bytes / certificate.reference_bytes
        yield f"size      {certificate.onnx_bytes:,} bytes, {share:.0%} of float32's {certificate.reference_bytes:,}"
    if certificate.origin:
        yield f"origin    {origin_text(certificate)}"
    if certificate.sizes:
        yield f"tried     {sizes_text(certificate)}"
    yield from _results(certificate)
    yield from _conversion(certificate)
    yield from _doubts(certificate)
    for crash in certificate.probe.crashes:
        yield f"runtime   {crash}"


def _results(verdict: PrecisionVerdict) -> Iterator[str]:
    if verdict.accuracy is not None:
        yield f"accuracy  {accuracy_text(verdict.accuracy)}"
    for output in verdict.outputs:
        for figure in output.task:
            yield f"task      {figure.name} {figure.value:.6f} ({output.execution}; least {figure.least:g})"
    yield from (f"kinds     {line}" for line in kind_lines(verdict))


def _doubts(verdict: PrecisionVerdict) -> Iterator[str]:
    yield from _edges(verdict)
    for risk in verdict.risks[:RISKS_SHOWN]:
        yield f"sums      {risk}; safe where sums are float32"
    if len(verdict.risks) > RISKS_SHOWN:
        yield f"sums      and {len(verdict.risks) - RISKS_SHOWN} more"
    for note in verdict.notes:
        yield f"note      {note}"


def _conversion(certificate: Certificate) -> Iterator[str]:
    conversion = certificate.conversion
    if conversion is None:
        return
    names = [node["name"] for node in conversion.get("kept", ())] or conversion.get("fp32_modules", [])
    more = f" and {len(names) - KEPT_SHOWN} more" if len(names) > KEPT_SHOWN else ""
    yield f"kept fp32 {', '.join(names[:KEPT_SHOWN]) or 'none'}{more}"
    yield f"rounding  {', '.join(f'{count} {name}' for name, count in conversion.get('ledger', {}).items())}"


def _edges(verdict: PrecisionVerdict) -> Iterator[str]:
    lines = worst_verdicts(verdict)
    within = [line for line in lines if line.factor is None and line.note is None]
    if within:
        broken = [line.case for line in within if line.violations]
        passed = [line.case for line in within if not line.violations]
        yield f"edges     {', '.join(passed) or 'none'} within budget" + (f"; not {', '.join(broken)}" if broken else "")
    if verdict.headroom is not None:
        yield f"headroom  holds up to {verdict.headroom:g} times the samples' magnitude"


def _verdict(verdict: PrecisionVerdict) -> Text:
    if verdict.passed:
        return Text("verdict   within budget", style="green")
    texts = verdict.violations or ["nothing was compared"]
    return Text("\n".join(f"verdict   over budget: {text}" for text in texts), style="red")


def worst_verdicts(verdict: PrecisionVerdict) -> list[AdversarialVerdict]:
    """For each adversarial case in order, the verdict that is over budget, or the one with the largest scaled error."""
    worst: dict[str, AdversarialVerdict] = {}
    for line in verdict.adversarial:
        if line.case not in worst or _rank(line) > _rank(worst[line.case]):
            worst[line.case] = line
    return list(worst.values())


def _rank(line: AdversarialVerdict) -> tuple[bool, float]:
    error = line.figures.max_scaled_error if line.figures else 0.0
    return bool(line.violations), error if math.isfinite(error) else -1.0
