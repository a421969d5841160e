"""A sweep as a table and as bench.json.

bench.json holds one object:

- "model", "version", "address"; "provider": what the server computes with, null if it does not say
- "batch_size": rows per request; "date": ISO 8601, UTC; "command"
- "machine": {"platform", "cpus", "python"} of the load generator
- "levels": one per concurrency, in the order measured:
    - "concurrency": requests in flight
    - "requests": answered with success; "errors": failed; "errors_by_status": {gRPC status: count}
    - "seconds", "requests_per_second", "rows_per_second"
    - "latency_ms": {"p50", "p90", "p99", "max", "mean"} of the answered ones
    - "mean_batch_size": rows per batch in the server
    - "server_ms": {"queue", "compute"}: means per request

Where the server keeps no statistics, "mean_batch_size", "queue" and "compute" are null.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from serve.benchmark.level import Level
from serve.benchmark.server_statistics import ServerTotals
from serve.client.atomic_file import written_whole

LATENCY_HEADINGS = ("p50\nms", "p99\nms", "max\nms")
SERVER_HEADINGS = ("mean\nbatch", "queue\nms", "compute\nms")


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was measured, where and how.

    Attributes:
        model: the model's name.
        version: the version that answered.
        address: the server's.
        provider: what the server computes with, such as "CUDAExecutionProvider"; None if it does not say.
        batch_size: rows per request.
        command: the command line.
        levels: one per concurrency, in the order measured.
    """

    model: str
    version: str
    address: str
    provider: str | None
    batch_size: int
    command: str
    levels: Sequence[Level]

    def to_json(self) -> dict[str, Any]:
        """The object of bench.json, as this module's docstring describes it."""
        return {
            "model": self.model,
            "version": self.version,
            "address": self.address,
            "provider": self.provider,
            "batch_size": self.batch_size,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": self.command,
            "machine": {"platform": platform.platform(), "cpus": os.cpu_count(), "python": platform.python_version()},
            "levels": [level.to_json() for level in self.levels],
        }

    def table(self) -> Table:
        """One line per level, for a terminal of 80 columns."""
        rows = "" if self.batch_size == 1 else f", {self.batch_size} rows a request"
        title = f"{self.model} version {self.version} on {self.provider or self.address}{rows}"
        table = Table(title=title, box=box.SIMPLE_HEAD, padding=0, show_edge=False)
        per_row = ["rows/s"] if self.batch_size > 1 else []
        for heading in ("in\nflight", "requests\n/s", *per_row, *LATENCY_HEADINGS, *SERVER_HEADINGS, "errors"):
            table.add_column(heading, justify="right", no_wrap=True)
        for level in self.levels:
            table.add_row(*_cells(level))
        return table

    def warnings(self) -> list[str]:
        """What makes figures of this report doubtful, a line each."""
        return [
            f"warning: at concurrency {level.concurrency} the server answered {level.server.requests} requests, of which"
            f" {level.requests} were ours: someone else is asking it, and the batch sizes and server times are theirs too"
            for level in self.levels
            if level.server is not None and level.server.requests > level.requests + sum(level.errors.values())
        ]


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Write bench.json.

    Raises:
        OSError: the file cannot be written; what stood there stays.
    """
    with written_whole(path) as file:
        file.write(json.dumps(report, indent=2, allow_nan=False).encode() + b"\n")


def _cells(level: Level) -> list[str]:
    latency, server = level.latency, level.server or ServerTotals()
    errors = ", ".join(f"{count} {code}" for code, count in level.errors.items()) or "0"
    per_row = [f"{level.requests_per_second * level.batch_size:.0f}"] if level.batch_size > 1 else []
    return [
        str(level.concurrency),
        f"{level.requests_per_second:.0f}",
        *per_row,
        *(f"{value:.2f}" for value in (latency.p50, latency.p99, latency.max)),
        *("-" if value is None else f"{value:.2f}" for value in (server.mean_batch_size, server.queue_ms, server.compute_ms)),
        errors,
    ]
