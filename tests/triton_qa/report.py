"""The table of a run: per suite how many methods pass, and each method that fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.triton_qa.runner import Method


@dataclass(frozen=True, kw_only=True)
class SuiteReport:
    """Outcomes of a suite's methods on each server ("here", "triton")."""

    suite: str
    methods: dict[str, list[Method]]

    def counts(self) -> dict[str, int]:
        """Return how many methods there are, how many pass on Triton, and how those end here."""
        triton = {method.name for method in self.methods.get("triton", ()) if method.outcome == "passed"}
        here = self.methods.get("here", [])
        judged = [method for method in here if method.name in triton or "triton" not in self.methods]
        failed = [method for method in judged if method.outcome == "failed"]
        return {
            "methods": len(here or self.methods["triton"]),
            "triton": len(triton),
            "here": sum(method.outcome == "passed" for method in judged),
            "text": sum(method.is_text for method in failed),
            "failed": sum(not method.is_text for method in failed),
            "skipped": sum(method.outcome == "skipped" for method in judged),
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> SuiteReport:
        """Return the report that `as_json` gave."""
        found = {server: [Method(**method) for method in methods] for server, methods in values["methods"].items()}
        return cls(suite=values["suite"], methods=found)

    def as_json(self) -> dict[str, Any]:
        """Return the report as values of JSON."""
        return {
            "suite": self.suite,
            "counts": self.counts(),
            "methods": {server: [asdict(method) for method in methods] for server, methods in self.methods.items()},
        }


def show(reports: Sequence[SuiteReport], *, has_methods: bool = True) -> None:
    """Print a line for each suite, their sum, and the methods that fail here."""
    total: dict[str, int] = {}
    for report in reports:
        counts = report.counts()
        total = {key: total.get(key, 0) + value for key, value in counts.items()}
        print(_line(report.suite, counts), flush=True)
        if not has_methods:
            continue
        for server, methods in report.methods.items():
            for method in methods:
                if method.outcome == "failed":
                    kind = "text" if method.is_text else "FAIL"
                    print(f"    {server:6} {kind} {method.name} ({method.seconds:.0f} s): {method.error[:300]}", flush=True)
    if not has_methods:
        print(_line("in all", total))


def _line(name: str, counts: dict[str, int]) -> str:
    return f"{name:34}" + "".join(f"  {key} {value:4}" for key, value in counts.items())
