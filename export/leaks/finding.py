"""What was found: one finding per line of the user's code, and the report that holds them."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One place where the model's dtype or its numbers are at risk in float16.

    Attributes:
        kind: What it is, as one word: a key of `export.leaks.kinds.KINDS`, which says what each means.
        severity: "error" (wrong numbers or a crash), "warning" (slower or less exact), "note" (harmless here, worth knowing).
        file: The user's own file, relative where it lies under the working directory or among the installed packages; None
            where only torch's own code is involved.
        line: The line in it, from 1; None with `file`.
        source: That line's text, without its indentation.
        module: Dotted name of the module that was running, the first one if several ("" is the outermost).
        symptom: What happens in float16, with the number.
        fix: The word to write instead.
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
        """`file:line`, or the module where there is no such line."""
        if self.file is not None:
            return f"{self.file}:{self.line}"
        return f"({self.module or 'the model'})"


@dataclass(frozen=True, kw_only=True)
class LeakReport:
    """Everything that was found, worst first, then by file and line.

    Attributes:
        model: The class of the outermost module.
        findings: One for each kind and line.
    """

    model: str
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """What gives wrong numbers or a crash."""
        return self._of("error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """What is slower or less exact."""
        return self._of("warning")

    @property
    def notes(self) -> tuple[Finding, ...]:
        """What is harmless with these inputs."""
        return self._of("note")

    @property
    def clean(self) -> bool:
        """Whether there are neither errors nor warnings."""
        return not self.errors and not self.warnings

    def to_json(self) -> dict[str, Any]:
        """The report as JSON's own types."""
        counts = Counter(finding.severity for finding in self.findings)
        return {
            "model": self.model,
            "clean": self.clean,
            "counts": {severity: counts[severity] for severity in SEVERITIES},
            "findings": [asdict(finding) for finding in self.findings],
        }

    def __str__(self) -> str:
        lines = [f"{f.severity}: {f.where}: {f.kind}: {f.symptom} (fix: {f.fix})" for f in self.findings]
        return "\n".join(lines) or f"{self.model}: no dtype leaks"

    def _of(self, severity: Severity) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == severity)
