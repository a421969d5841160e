"""Findings as they come in: the same line doing the same thing again is counted, not listed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from export.leaks.finding import SEVERITIES, Finding, Severity
from export.leaks.places import Place

Key = tuple[str, str | None, int | None, str]


@dataclass
class Log:
    """Findings by kind and line."""

    findings: dict[Key, Finding] = field(default_factory=dict)

    def add(self, kind: str, severity: Severity, place: Place | None, module: str, symptom: str, fix: str) -> Key:
        """Note a finding; the first symptom at a line stays unless a later one is worse.

        Returns:
            What `forget` takes.
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
            worse = SEVERITIES.index(severity) < SEVERITIES.index(before.severity)
            finding = replace(finding if worse else before, module=before.module, times=before.times + 1)
        self.findings[key] = finding
        return key

    def forget(self, key: Key) -> None:
        """Take a finding back."""
        self.findings.pop(key, None)

    def sorted(self) -> tuple[Finding, ...]:
        """The findings, worst first, then by file and line."""
        return tuple(
            sorted(
                self.findings.values(),
                key=lambda found: (
                    SEVERITIES.index(found.severity),
                    found.file or "",
                    found.line or 0,
                    found.module,
                    found.kind,
                ),
            )
        )
