"""A certificate as people read it: one table and a verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from export.certificate.certificate import Certificate, OutputVerdict


def certificate_table(certificate: Certificate) -> Group:
    """The figures of every output, and below them sizes, accuracy, what stayed float32 and the verdict."""
    title = f"{certificate.model}: fp16 against its float32 reference, {certificate.samples} samples"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1), pad_edge=False)
    table.add_column("output")
    table.add_column("run")
    for heading in ("error", "of scale", "ulp", "cosine", "NaN/inf", "agreement"):
        table.add_column(heading, justify="right", no_wrap=True)
    for verdict in certificate.outputs:
        table.add_row(*_row(verdict), style="red" if verdict.violations else None)
    return Group(table, *(Text(line) for line in _facts(certificate)), _verdict(certificate))


def _row(verdict: OutputVerdict) -> list[str]:
    figures = verdict.figures
    return [
        verdict.name,
        verdict.execution,
        f"{figures.max_abs_error:.2g}",
        f"{figures.max_scaled_error:.2g}",
        f"{figures.max_ulp:.0f}",
        f"{figures.cosine:.6f}",
        str(figures.non_finite),
        "" if figures.agreement is None else f"{figures.agreement:.2%}",
    ]


def _facts(certificate: Certificate) -> list[str]:
    lines = []
    if certificate.reference_bytes:
        share = certificate.onnx_bytes / certificate.reference_bytes
        lines.append(f"size      {certificate.onnx_bytes:,} bytes, {share:.0%} of float32's {certificate.reference_bytes:,}")
    if certificate.accuracy is not None:
        lines.append(f"accuracy  {certificate.accuracy.rounded:.2%}, float32 {certificate.accuracy.reference:.2%}")
    if certificate.conversion is not None:
        kept = ", ".join(certificate.conversion["fp32_modules"]) or "none"
        ledger = ", ".join(f"{count} {name}" for name, count in certificate.conversion["ledger"].items())
        lines += [f"kept fp32 {kept}", f"rounding  {ledger}"]
    lines += [f"runtime   {crash}" for crash in certificate.probe.crashes]
    return lines


def _verdict(certificate: Certificate) -> Text:
    if certificate.passed:
        return Text("verdict   within budget", style="green")
    return Text("\n".join(f"verdict   over budget: {text}" for text in certificate.violations), style="red")
