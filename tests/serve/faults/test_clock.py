"""Nothing but the end of a token is decided by the wall clock, which may jump; the other tests here run under one that does."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SERVE = Path(__file__).parents[3] / "serve"
WALL_CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"}
# Who tells people what time it is. A file that is not in this list and asks may decide something by the answer.
TELLERS = {
    "benchmark/reports/report.py",
    "engine/precision_guard/tally.py",
    "engine/figures/statistics.py",
    "http/page/history.py",
    "http/page/state.py",
    "observability/access_log.py",
    "observability/tracer.py",
    "security/cli.py",  # `halfserve token --expires 90d`
    # Ends of tokens, which are times of day: a clock that jumps ends them early or late, until it is right again.
    "security/security.py",
    "security/tokens.py",
    "security/tls.py",  # a certificate's days, of which only the warning depends on it
}


def wall_clocks(path: Path) -> Iterator[str]:
    """The wall clocks that a file asks, by whatever name it imports them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield from WALL_CLOCKS & {f"{node.value.id}.{node.attr}"}
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from WALL_CLOCKS & {f"time.{alias.name}" for alias in node.names}


def test_the_wall_clock_is_for_telling_people() -> None:
    askers = {str(path.relative_to(SERVE)) for path in SERVE.rglob("*.py") if any(wall_clocks(path))}
    assert askers == TELLERS
