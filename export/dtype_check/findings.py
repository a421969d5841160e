"""Findings of the dtype check, one for each line and kind, and the report that holds them."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from halfserve.export.half_types import HalfName

if TYPE_CHECKING:  # source_lines imports torch, which takes seconds
    from halfserve.export.dtype_check.source_lines import SourceLine

Severity = Literal["error", "warning", "note"]
Key = tuple[str, str | None, int | None, str]  # kind, file, line, and the module where there is no line

# In the order of reports: meaning, and the colour of the table's title.
SEVERITIES: dict[Severity, tuple[str, str]] = {
    "error": ("wrong numbers or a crash", "bold red"),
    "warning": ("slower or less exact", "yellow"),
    "note": ("harmless here", "dim"),
}
RANKS = {severity: rank for rank, severity in enumerate(SEVERITIES)}

KINDS = {
    "attribute": "a tensor assigned as an attribute, not registered: .half(), .to(device) and state_dict skip it",
    "autocast": "an autocast region inside forward",
    "complex": "a complex buffer: it has no float16 form, and ONNX has none at all",
    "constant": "a number beyond float16's range: a mask of -1e9, finfo(torch.float32).min",
    "crash": "the float16 model raises an exception that is not about mixed dtypes",
    "epsilon": "a number that float16 rounds to 0 or holds with few digits",
    "export": "torch.export cannot capture the float16 model, so nothing was compared",
    "export_dtype": "the captured graph has another dtype than eager mode",
    "factory": "torch.zeros and its like without dtype",
    "hard_coded_dtype": "dtype=torch.float32, or a cast to it, where nothing asks for float32",
    "infinite_mask": "-inf as a mask",
    "integer_promotion": "arithmetic that turns whole numbers into float32",
    "kept": "a weight that stays float32, read outside of its own module's forward",
    "kept_float32": "a buffer or parameter that float16 cannot hold; to_half keeps it",
    "not_reached": "a leak in a line that the inputs did not reach",
    "numbers": "a function that makes float32 out of Python's numbers",
    "numpy": "an array that enters as float32 or float64",
    "outermost_table": "a table that must stay float32, in the outermost module",
    "outside": "a float32 tensor that is global, or made where torch does not show it",
    "overflow": "finite numbers that become infinite or NaN",
    "position": "positions or angles that float16 cannot tell apart",
    "round_trip": "values that leave torch for numpy or Python",
    "squares": "a sum or mean of squares in float16",
    "upcast": "float16 raised to float32 and not rounded back",
    "variance": "E[x^2] - E[x]^2 in float16",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line where the model's dtype or its numbers are at risk in half precision.

    Attributes:
        kind: A key of `KINDS`.
        severity: "error" (wrong numbers or a crash), "warning" (slower or less exact), "note" (harmless here, worth knowing).
        file: The user's file, relative to the working directory or to the installed packages where it lies there; None where
            only torch's own code is involved.
        line: The line in it, from 1; None with `file`.
        source: The line's text, without its indentation.
        module: Dotted name of the module that was running, the first one if several ("" is the outermost).
        symptom: The effect in the half type, with the number.
        fix: The code to write instead.
        times: How many times the line did it in one run.
    """

    kind: str
    severity: Severity
    file: str | None
    line: int | None
    source: str
    module: str
    symptom: str
    fix: str
    times: int = 1

    @property
    def where(self) -> str:
        """`file:line`, or the module where there is no line."""
        return f"({self.module or 'the model'})" if self.file is None else f"{self.file}:{self.line}"


@dataclass(frozen=True, kw_only=True)
class LeakReport:
    """All findings of one model, worst first, then by file and line.

    Attributes:
        model: The class of the outermost module.
        dtype: The type that it was checked in.
        findings: The findings, one for each kind and line.
    """

    model: str
    dtype: HalfName = "float16"
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Findings that give wrong numbers or a crash."""
        return self._of("error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """Findings that cost speed or exactness."""
        return self._of("warning")

    @property
    def notes(self) -> tuple[Finding, ...]:
        """Findings that are harmless with these inputs."""
        return self._of("note")

    @property
    def clean(self) -> bool:
        """Whether there are neither errors nor warnings."""
        return not self.errors and not self.warnings

    def to_json(self) -> dict[str, Any]:
        """Return the report in JSON's own types."""
        counts = Counter(finding.severity for finding in self.findings)
        return {
            "model": self.model,
            "dtype": self.dtype,
            "clean": self.clean,
            "counts": {severity: counts[severity] for severity in SEVERITIES},
            "findings": [asdict(finding) for finding in self.findings],
        }

    def __str__(self) -> str:
        lines = [f"{f.severity}: {f.where}: {f.kind}: {f.symptom} (fix: {f.fix})" for f in self.findings]
        return "\n".join(lines) or f"{self.model}: no dtype leaks"

    def _of(self, severity: Severity) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == severity)


@dataclass
class FindingLog:
    """Findings by kind and line; a repetition is counted, not listed again."""

    findings: dict[Key, Finding] = field(default_factory=dict)

    def add(self, kind: str, severity: Severity, place: SourceLine | None, module: str, symptom: str, fix: str) -> Key:
        """Add a finding; the first symptom of a line stays unless a later one is worse.

        Returns:
            The finding's key, for `remove`.
        """
        finding = Finding(
            kind=kind,
            severity=severity,
            file=place.file if place else None,
            line=place.line if place else None,
            source=place.source if place else "",
            module=module,
            symptom=symptom,
            fix=fix,
        )
        key = (kind, finding.file, finding.line, module if place is None else "")
        before = self.findings.get(key)
        if before is not None:
            worse = RANKS[severity] < RANKS[before.severity]
            finding = replace(finding if worse else before, module=before.module, times=before.times + 1)
        self.findings[key] = finding
        return key

    def remove(self, key: Key) -> None:
        self.findings.pop(key, None)

    def sorted(self) -> tuple[Finding, ...]:
        """Return the findings, worst first, then by file and line."""
        order = sorted(self.findings.values(), key=lambda f: (RANKS[f.severity], f.file or "", f.line or 0, f.module, f.kind))
        return tuple(order)


def leak_table(report: LeakReport) -> Group:
    """Return one table for each severity that occurs, and a line with the totals."""
    tables = [_table(severity, findings, report.dtype) for severity in SEVERITIES if (findings := report._of(severity))]  # noqa: SLF001  (the same module)
    return Group(*tables, Text(f"{report.model}: {totals(report)}"))


def totals(report: LeakReport) -> str:
    """`2 errors, 1 warning`, or `no dtype leaks`."""
    counts = {"error": len(report.errors), "warning": len(report.warnings), "note": len(report.notes)}
    parts = [f"{count} {name}{'s' if count > 1 else ''}" for name, count in counts.items() if count]
    return ", ".join(parts) if not report.clean else ", ".join(["no dtype leaks", *parts])


def _table(severity: Severity, findings: tuple[Finding, ...], dtype: HalfName) -> Table:
    meaning, colour = SEVERITIES[severity]
    title = Text(f"{severity}s ({meaning})", style=colour)
    table = Table(title=title, title_justify="left", box=box.SIMPLE, show_lines=False, pad_edge=False)
    table.add_column(f"where, what happens in {dtype}, and the fix", overflow="fold")
    for finding in findings:
        where = Text(finding.where)
        if finding.source:
            where.append(f"\n{finding.source}", style="dim")
        if finding.module:
            where.append(f"\nin {finding.module}{f', {finding.times} times' if finding.times > 1 else ''}", style="dim")
        where.append(f"\n  {finding.symptom}\n  fix: ")
        where.append(finding.fix, style="bold")
        table.add_row(where)
    return table
