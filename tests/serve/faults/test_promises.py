"""Faults in docs/explanation/reliability.md name tests, its commands exist, and only listed modules read the wall clock."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "explanation" / "reliability.md").read_text(encoding="utf-8")


def test_every_fault_names_a_test() -> None:
    faults = TEXT.partition("## Faults")[2].partition("## ")[0]
    rows = [line for line in faults.splitlines() if line.startswith("|")][2:]
    assert len(rows) == len(re.findall(r"^\|.*\| tests/\S+\.py::\w+ \|$", faults, re.MULTILINE)) >= 20


def test_the_commands_exist() -> None:
    programs, files = (
        set(re.findall(r"python -m (benchmarks\.\w+)", TEXT)),
        set(re.findall(r"pytest (?:-\S+ )*(tests/\S+\.py)", TEXT)),
    )
    assert "tests/end_to_end/test_soak.py" in files
    assert [program for program in programs if find_spec(program) is None] == []
    assert [file for file in files if not (ROOT / file).is_file()] == []


WALL_CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"}


# Modules that show the time. Any other module that reads the wall clock may decide something by it.
TELLERS = {
    "serve/benchmark/benchmark_report.py",
    "serve/engine/precision_guard/tally.py",
    "serve/engine/model_statistics.py",
    "serve/http/page/model_history.py",
    # When Ray was called, beside the times of its log files: a clock that jumps makes a message name another cause.
    "serve/fleet/launch/ray_cluster.py",
    "serve/fleet/launch/ray_failures.py",
    "serve/http/page/page_state.py",
    "serve/observability/access_log.py",
    "serve/observability/capture.py",
    "serve/observability/tracing.py",
    "serve/startup_report.py",
    "serve/tuning/tuning_report.py",
    "serve/storage/file_cache.py",  # which copies were used last, across restarts: a clock that jumps removes others first
    "serve/security/token_command.py",  # `halfserve token --expires 90d`
    # Tokens expire at a time of day: a clock that jumps expires them early or late, until it is right again.
    "serve/security/security.py",
    "serve/security/tokens.py",
    "serve/security/tls.py",  # the warning before a certificate expires
}


def wall_clocks(path: Path) -> Iterator[str]:
    """The wall clocks that a file reads, under any imported name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield from WALL_CLOCKS & {f"{node.value.id}.{node.attr}"}
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from WALL_CLOCKS & {f"time.{alias.name}" for alias in node.names}


def test_the_wall_clock_is_only_displayed() -> None:
    askers = {
        str(path.relative_to(ROOT / "halfserve"))
        for path in (ROOT / "halfserve" / "serve").rglob("*.py")
        if any(wall_clocks(path))
    }
    assert askers == TELLERS
