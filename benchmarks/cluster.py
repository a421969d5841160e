"""Measures a cluster: overhead on the data path, speed of scaling, and the effect of faults on clients.

    python -m benchmarks.cluster data-path
    python -m benchmarks.cluster scaling
    python -m benchmarks.cluster faults --times 20
    python -m benchmarks.cluster faults --only "machine cut off" --only "head restarted"
    python -m benchmarks.cluster models

Ray runs on this machine, as several machines where needed; all share its cores with the clients. Data path: a standalone
server and a cluster member are loaded in turn, A B A B ..., and beside them the same model in Ray Serve at its fastest
settings: gRPC and HTTP to the replica itself without a proxy, and handles. The results are medians, also of the ratio within a
round. Faults: each client sends one request after the other, checks each answer, and retries as `Client("cluster://...")` does;
the time is until as many members serve as before. Machines are cut off where network namespaces can be made (as root), and the
head is restarted where redis-server is installed. Models: 100 of them, of which a member holds 40; the clients choose by Zipf's
law. Their favourites change halfway; then a client uses a single member.

At the end, ModelStatistics is compared with the clients' counts. Exits with 1 if a client saw an error or a wrong answer, or if
the counts differ by more than the unavoidable uncertainty: answers that were sent but not received, and counts that a lost
machine had not reported.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.clustering.faults import FAULTS, Sums, cluster_under_load, idle_cluster, left_out, scale_up, sums
from benchmarks.clustering.machines import SERVER, Machines, machines
from benchmarks.clustering.many_models import many_models
from benchmarks.clustering.ray_serve_peer import ANSWER, CONCURRENCY, ROW, THROUGHPUT_OPTIMIZED, Ways, ask_grpc
from benchmarks.harness.models import save_models
from benchmarks.harness.server_process import server_process
from benchmarks.harness.tally import Tally
from benchmarks.processes import processor_us
from halfserve.serve.benchmark.level import Load
from halfserve.serve.benchmark.load_target import LoadTarget, RequestSettings
from halfserve.serve.benchmark.measurement import Measurement, measure

app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None)
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Rate = tuple[float, float, float]  # requests/s, 99th percentile in ms, the server's processor time for a request in us


@app.command()
def data_path(
    rounds: Annotated[int, typer.Option(min=1, help="Loads of each.")] = 10,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of one load.")] = 2.0,
    as_json: AsJson = False,
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


@app.command()
def scaling(
    clients: Annotated[int, typer.Option(min=1, help="That keep one member busy.")] = 8, as_json: AsJson = False
) -> None:
    """Double the load, and remove it again."""
    with tempfile.TemporaryDirectory() as folder, cluster_under_load(Path(folder), clients=1) as cluster:
        up_s, down_s = scale_up(cluster, clients)
    _print({"up_s": round(up_s, 1), "down_s": round(down_s, 1)}, cluster.tally, as_json=as_json)
    _end(cluster.tally)


@app.command()
def faults(
    times: Annotated[int, typer.Option(min=1, help="Of each fault.")] = 20,
    clients: Annotated[int, typer.Option(min=1, help="That ask one thing after the other.")] = 4,
    only: Annotated[list[str] | None, typer.Option(help=f"Of these: {', '.join(FAULTS)}.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Cause every fault on a cluster under load, repeatedly; then compare the counts of the clients and the cluster.

    If something fails, the results until then are still printed.
    """
    for name in only or ():
        if name not in FAULTS:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(FAULTS)}", param_hint="--only")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout` also cleans up, and keeps the results so far
    say = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder, idle_cluster(Path(folder)) as cluster:
        cannot = left_out(cluster)
        chosen = {name: cause for name, cause in FAULTS.items() if name in (only or FAULTS) and name not in cannot}
        for name in {*(only or FAULTS)} & {*cannot}:
            say.print(f"left out: {name}, as {cannot[name]}", highlight=False)
        seconds: dict[str, list[float]] = {name: [] for name in chosen}
        counts: dict[str, Sums] = {}
        try:
            with cluster.clients(clients):
                for number in range(times):
                    for name, cause in chosen.items():
                        seconds[name].append(cause(cluster))
                        say.print(f"{number + 1} of {times}: {name}, {seconds[name][-1]:.1f} s", highlight=False)
                        cluster.wait_for_answers()
            counts = sums(cluster)
        finally:
            figures: dict[str, Any] = {
                name: {"median_s": round(statistics.median(each), 2), "largest_s": round(max(each), 2), "times": len(each)}
                for name, each in seconds.items()
                if each
            }
            figures["counted"] = {model: {**asdict(found), "difference": found.difference} for model, found in counts.items()}
            _print(figures, cluster.tally, as_json=as_json)
    _end(cluster.tally, is_right=all(found.is_explained for found in counts.values()))


@app.command()
def models(
    models: Annotated[int, typer.Option(min=1, help="In the repository.")] = 100,
    members: Annotated[int, typer.Option(min=2, help="Servers.")] = 4,
    models_per_member: Annotated[int, typer.Option(min=1, help="That one server may hold.")] = 40,
    seconds: Annotated[float, typer.Option(min=1, help="Of load.")] = 90.0,
    clients: Annotated[int, typer.Option(min=1, help="That ask one thing after the other.")] = 4,
    as_json: AsJson = False,
) -> None:
    """Serve more models than a member holds; most requests are for few of them, later for few others."""
    with tempfile.TemporaryDirectory() as folder:
        figures = many_models(
            Path(folder), models=models, members=members, most=models_per_member, seconds=seconds, clients=clients
        )
    print(json.dumps(figures) if as_json else "\n".join(f"{key}: {value}" for key, value in figures.items()))
    raise typer.Exit(1 if figures["wrong_or_lost"] or figures["counted_otherwise"] else 0)


def _print(figures: dict[str, Any], tally: Tally, *, as_json: bool) -> None:
    counted = tally.counted()
    answers = {"answered": sum(counted.answered.values()), "wrong_or_lost": counted.wrongs, "first_of_them": counted.wrong}
    if as_json:
        print(json.dumps(figures | answers), flush=True)
    else:
        Console().print("\n".join(f"{key}: {value}" for key, value in (figures | answers).items()), highlight=False)


def _end(tally: Tally, *, is_right: bool = True) -> None:
    raise typer.Exit(0 if is_right and not tally.counted().wrongs else 1)


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
    command = [sys.executable, "-m", "benchmarks.clustering.ray_serve_peer", str(model)]
    environment = {**found.environment(found.nodes[0]), "RAY_ADDRESS": found.address}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            if not (line := _line(process)):
                raise SystemExit("Ray Serve does not start the peer")
            yield _Peer(process, Ways(**json.loads(line)))
        finally:
            process.kill()


if __name__ == "__main__":
    app()
