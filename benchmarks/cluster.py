"""Rate of a cluster's member beside a standalone server, and beside the same model in Ray Serve at its fastest settings.

    python -m benchmarks.cluster [--rounds 7 --seconds 1.5]

Ray runs on this machine and shares its cores with the clients. A standalone server, a member of a cluster, and Ray Serve (gRPC
and HTTP to the replica itself without a proxy, and handles) are loaded in random turns. The table has medians of requests a
second, of the p99, of the processor time of the server or replica for a request, and of the ratio to the standalone server's
rate within a round.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.harness.models import save_models
from benchmarks.harness.server_process import server_process
from benchmarks.processes import processor_us
from benchmarks.ray_serve_peer import ANSWER, CONCURRENCY, ROW, THROUGHPUT_OPTIMIZED, Ways, ask_grpc
from halfserve.serve.benchmark.level import Load
from halfserve.serve.benchmark.load_target import LoadTarget, RequestSettings
from halfserve.serve.benchmark.measurement import Measurement, measure
from tests.serve.ray_cluster.machines import SERVER, Machines, machines

Rate = tuple[float, float, float]  # requests/s, 99th percentile in ms, the server's processor time for a request in us


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Loads of each.")] = 10,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of one load.")] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Load a standalone server, a member, and Ray Serve's own ways in turn."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        save_models(Path(folder))
        found = stack.enter_context(machines([2], THROUGHPUT_OPTIMIZED))
        # first, because this starts Ray Serve's ports
        peer = stack.enter_context(_peer(found, Path(folder, "affine", "1", "model.onnx")))
        printed = found.done("run", folder, "--detach", "--first-port", "0", "--", "--lame-duck-seconds", "0")
        standalone = stack.enter_context(server_process(Path(folder)))
        member, member_pid = printed.strip().rpartition("//")[2], found.place(SERVER)[0]
        ways = {
            "standalone server": stack.enter_context(_Halfserve(standalone.address, standalone.process.pid)).run,
            "member of a cluster": stack.enter_context(_Halfserve(member, member_pid)).run,
            "Ray Serve, direct gRPC": peer.grpc,
            "Ray Serve, direct HTTP": peer.http,
            "Ray Serve, handle": peer.handle,
        }
        rates: dict[str, list[Rate]] = {name: [] for name in ways}
        for _ in track(range(rounds), description="measuring", console=Console(stderr=True)):
            for name in sorted(ways, key=lambda _: random.random()):  # noqa: S311  (no secret: what came before shall not matter)
                rates[name].append(ways[name](seconds))
    first = next(iter(rates.values()))
    medians = {
        name: {
            "requests_s": statistics.median(one[0] for one in each),
            "p99_ms": statistics.median(one[1] for one in each),
            "processor_us": statistics.median(one[2] for one in each),
            "ratio": statistics.median(one[0] / other[0] for one, other in zip(each, first, strict=True)),
        }
        for name, each in rates.items()
    }
    if as_json:
        print(json.dumps({"medians": medians, "rounds": rates}))
        return
    table = Table("way", "requests/s", "p99 ms", "us of the server", "against the first")
    for name, row in medians.items():
        spent = f"{row['processor_us']:.0f}"
        table.add_row(name, f"{row['requests_s']:,.0f}", f"{row['p99_ms']:.2f}", spent, f"{row['ratio']:.3f}")
    Console().print(table)


class _Halfserve(LoadTarget):
    """A load generator that is connected to a server."""

    def __init__(self, address: str, pid: int) -> None:
        super().__init__(address, ["affine"], RequestSettings())
        self._pid = pid

    def run(self, seconds: float) -> Rate:
        spent_us, answered = processor_us(self._pid), self._answered()
        level = measure(self.bench, Load(concurrency=CONCURRENCY), Measurement(seconds=seconds, warmup_s=0.2, connections=4))
        spent_us = processor_us(self._pid) - spent_us
        return level.requests_per_second, level.percentile_ms(99), spent_us / (self._answered() - answered)

    def _answered(self) -> int:
        return sum(one.inference_stats.success.count for one in self.client.statistics("affine"))


class _Peer:
    """Ray Serve with the same model."""

    def __init__(self, process: subprocess.Popen[str], ways: Ways) -> None:
        self._process = process
        self._ways = ways

    def grpc(self, seconds: float) -> Rate:
        """Call the replica itself by gRPC: raw bytes in the smallest message."""
        return self._rate(seconds, lambda: asyncio.run(ask_grpc(self._ways.grpc, seconds)))

    def handle(self, seconds: float) -> Rate:
        """Call through a handle in another process, as a deployment that calls another one does."""

        def ask() -> list[float]:
            print(seconds, file=self._process.stdin, flush=True)
            spent_s: list[float] = json.loads(_line(self._process))
            return spent_s

        return self._rate(seconds, ask)

    def http(self, seconds: float) -> Rate:
        """Call the replica itself over HTTP, with persistent connections and raw bytes, so that no time goes into JSON."""
        return self._rate(seconds, partial(self._ask_http, seconds))

    def _rate(self, seconds: float, ask: Callable[[], list[float]]) -> Rate:
        spent_us = processor_us(self._ways.pid)
        answered_s = ask()
        spent_us = processor_us(self._ways.pid) - spent_us
        return len(answered_s) / seconds, float(np.percentile(answered_s, 99)) * 1e3, spent_us / len(answered_s)

    def _ask_http(self, seconds: float) -> list[float]:
        spent_s: list[float] = []
        ends_s = time.perf_counter() + seconds
        threads = [threading.Thread(target=self._keep_asking, args=(ends_s, spent_s)) for _ in range(CONCURRENCY)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return spent_s

    def _keep_asking(self, ends_s: float, spent_s: list[float]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._ways.http, timeout=60)
        while (began_s := time.perf_counter()) < ends_s:
            connection.request("POST", "/peer", ROW.tobytes())
            answer = connection.getresponse()
            if answer.read() != ANSWER:
                raise SystemExit(f"Ray Serve answers wrongly, with {answer.status}")
            spent_s.append(time.perf_counter() - began_s)
        connection.close()


def _line(process: subprocess.Popen[str]) -> str:
    return "" if process.stdout is None else process.stdout.readline()


@contextmanager
def _peer(found: Machines, model: Path) -> Iterator[_Peer]:
    command = [sys.executable, "-m", "benchmarks.ray_serve_peer", str(model)]
    environment = {**found.environment(found.nodes[0]), "RAY_ADDRESS": found.address}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            if not (line := _line(process)):
                raise SystemExit("Ray Serve does not start the peer")
            yield _Peer(process, Ways(**json.loads(line)))
        finally:
            process.kill()


if __name__ == "__main__":
    typer.run(main)
