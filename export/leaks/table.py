"""A leak report as people read it: worst first, each with its line and the word that mends it."""

from __future__ import annotations

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from export.leaks.finding import SEVERITIES, Finding, LeakReport, Severity

COLOURS: dict[Severity, str] = {"error": "bold red", "warning": "yellow", "note": "dim"}
MEANINGS: dict[Severity, str] = {
    "error": "wrong numbers or a crash",
    "warning": "slower or less exact",
    "note": "harmless here",
}


def leak_table(report: LeakReport) -> Group:
    """One table for each severity that occurs, and a line with the totals."""
    tables = [_table(severity, [f for f in report.findings if f.severity == severity]) for severity in SEVERITIES]
    return Group(*(table for table in tables if table is not None), Text(f"{report.model}: {totals(report)}"))


def totals(report: LeakReport) -> str:
    """`2 errors, 1 warning`, or `no dtype leaks`."""
    counts = {"error": len(report.errors), "warning": len(report.warnings), "note": len(report.notes)}
    parts = [f"{count} {name}{'s' if count > 1 else ''}" for name, count in counts.items() if count]
    return ", ".join(parts) if not report.clean else ", ".join(["no dtype leaks", *parts])


def _table(severity: Severity, findings: list[Finding]) -> Table | None:
    if not findings:
        return None
    title = Text(f"{severity}s ({MEANINGS[severity]})", style=COLOURS[severity])
    table = Table(title=title, title_justify="left", box=box.SIMPLE, show_lines=False, pad_edge=False)
    table.add_column("where", overflow="fold", ratio=4)
    table.add_column("what happens in float16", overflow="fold", ratio=6)
    table.add_column("fix", overflow="fold", ratio=2, style="bold")
    for finding in findings:
        where = Text(finding.where)
        if finding.source:
            where.append(f"\n{finding.source}", style="dim")
        if finding.module:
            where.append(f"\nin {finding.module}{f', {finding.times} times' if finding.times > 1 else ''}", style="dim")
        table.add_row(where, Text(finding.symptom), Text(finding.fix))
    return table
