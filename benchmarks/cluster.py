"""Rate of a cluster's member beside that of a standalone server.

    python -m benchmarks.cluster [--rounds 7 --seconds 1.5]

Ray runs on this machine and shares its cores with the clients. A standalone server and a member of a cluster, which serve the
same model, are loaded in random turns. The table has medians of requests a second, of the p99, of the server's processor time
for a request, and of the ratio to the standalone server's rate within a round.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.harness.loaded_server import LoadedServer
from benchmarks.harness.models import save_models
from benchmarks.harness.server_process import server_process
from halfserve.serve.benchmark.level import Load
from halfserve.serve.benchmark.measurement import Measurement
from tests.serve.ray_cluster.machines import SERVER, machines

CONCURRENCY, CONNECTIONS = 32, 4


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Loads of each.")] = 10,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of one load.")] = 2.0,
) -> None:
    """Load a standalone server and a member in turn."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        save_models(Path(folder))
        found = stack.enter_context(machines([1]))
        printed = found.done("run", folder, "--detach", "--first-port", "0", "--", "--lame-duck-seconds", "0")
        standalone = stack.enter_context(server_process(Path(folder)))
        member = printed.strip().rpartition("//")[2]
        places = {
            "standalone server": (standalone.address, standalone.process.pid),
            "member of a cluster": (member, found.place(SERVER)[0]),
        }
        servers = {name: stack.enter_context(LoadedServer(at, "affine", [pid])) for name, (at, pid) in places.items()}
        rates: dict[str, list[tuple[float, float, float]]] = {name: [] for name in servers}
        how = Measurement(seconds=seconds, warmup_s=0.2, connections=CONNECTIONS)
        for _ in track(range(rounds), description="measuring", console=Console(stderr=True)):
            for name in sorted(servers, key=lambda _: random.random()):  # noqa: S311  (no secret: what came before shall not matter)
                level, (spent_us,) = servers[name].measured(Load(concurrency=CONCURRENCY), how)
                rates[name].append((level.requests_per_second, level.percentile_ms(99), spent_us))
    first = rates["standalone server"]
    table = Table("server", "requests/s", "p99 ms", "us of the server", "against the first")
    for name, each in rates.items():
        rate, p99_ms, spent_us = (statistics.median(one[figure] for one in each) for figure in range(3))
        ratio = statistics.median(one[0] / other[0] for one, other in zip(each, first, strict=True))
        table.add_row(name, f"{rate:,.0f}", f"{p99_ms:.2f}", f"{spent_us:.0f}", f"{ratio:.3f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
