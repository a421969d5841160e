"""Results of a run: printed lines for each check, JSON, and JUnit's XML for CI systems."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from xml.sax.saxutils import quoteattr

from halfserve.conformance.checks import CheckResult, Outcome


def summary(results: Sequence[CheckResult]) -> str:
    """Return the counts of each outcome."""
    counts = Counter(result.outcome for result in results)
    return ", ".join(f"{counts[outcome]} {outcome.value}" for outcome in Outcome)


def lines(result: CheckResult) -> str:
    """Return a check's lines: its outcome and name, its clause, and the reason."""
    below = [result.clause, *([result.reason] if result.reason else [])]
    return "\n".join([f"{result.outcome.value:12}{result.name}", *(f"{'':12}{text}" for text in below)])


def as_json(target: str, results: Sequence[CheckResult]) -> str:
    """Return the results as a JSON object."""
    counts = Counter(result.outcome.value for result in results)
    values = {"target": target, "counts": counts, "checks": [asdict(result) for result in results]}
    return json.dumps(values, indent=1) + "\n"


def as_junit(target: str, results: Sequence[CheckResult]) -> str:
    """Return the results as a JUnit test suite; a check that is not offered is skipped."""
    counts = Counter(result.outcome for result in results)
    head = (
        f'<testsuite name={quoteattr(f"Open Inference Protocol, {target}")} tests="{len(results)}" '
        f'failures="{counts[Outcome.FAIL]}" skipped="{counts[Outcome.NOT_OFFERED]}">'
    )
    cases = []
    for result in results:
        case = f'<testcase classname={quoteattr(result.clause)} name={quoteattr(result.name)} time="{result.seconds}"'
        kind = {Outcome.FAIL: "failure", Outcome.NOT_OFFERED: "skipped"}.get(result.outcome)
        printable = "".join(letter if letter.isprintable() else "?" for letter in result.reason)
        cases.append(f"{case}/>" if kind is None else f"{case}><{kind} message={quoteattr(printable)}/></testcase>")
    return "\n".join(['<?xml version="1.0" encoding="UTF-8"?>', head, *cases, "</testsuite>", ""])
