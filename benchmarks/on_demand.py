"""Models on demand under load: 50 models of which 10 fit, requests by Zipf's law, every answer checked.

    python -m benchmarks.on_demand

Two servers run on the same repository: one loads models on demand within a bound of memory, the other has loaded all models.
The clients ask them in turns of some seconds with the same mixture of models; the rank of a model is random, and its share of
the requests is proportional to 1 / rank. A client pauses at random between two requests. Loads are read from the server's log:
a request waited if its model was loaded between its start and its end. Exits with 1 if an answer was wrong, a request failed,
or the models took more memory than the bound.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, closing, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Column, Table

from benchmarks.harness.models import save_shift
from benchmarks.harness.process_watch import Sample, watch
from benchmarks.harness.server_process import ServerProcess, server_process
from halfserve import AsyncClient, ClientError

HIDDEN = 4096  # values per row within a model, whose weights take 1 MiB
SAMPLE_S = 0.2
TIMEOUT_S = 60.0
SPARE_S = 0.002  # the log has times in whole milliseconds
LOADED = re.compile(r"loaded and tried out")
LOADED_BYTES = re.compile(rb"^halfserve_loaded_model_bytes (\S+)$", re.MULTILINE)
PERCENTILES = (50, 99, 100)


@dataclass(frozen=True)
class Asked:
    """One request that was answered."""

    model: str
    began_s: float  # wall-clock time
    took_s: float


@dataclass
class Results:
    """What the clients saw of one server."""

    answered: list[Asked] = field(default_factory=list)
    wrong: int = 0
    errors: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Traffic:
    """The requests of all clients together.

    Attributes:
        models: names of the models; the answer of number i is 2 x + i.
        shares: share of each model in the requests.
        pause_s: mean pause of a client between an answer and its next request.
    """

    models: list[str]
    shares: np.ndarray[Any, np.dtype[np.float64]]
    pause_s: float

    async def send(self, clients: list[AsyncClient], seconds: float, seed: int, results: Results) -> None:
        """Ask a server for some time."""
        await asyncio.gather(*(self._ask(client, seconds, [seed, number], results) for number, client in enumerate(clients)))

    async def _ask(self, client: AsyncClient, seconds: float, seed: list[int], results: Results) -> None:
        random = np.random.default_rng(seed)
        ends_s = time.monotonic() + seconds
        while time.monotonic() < ends_s:
            await asyncio.sleep(random.exponential(self.pause_s))
            number = int(random.choice(len(self.models), p=self.shares))
            x = random.integers(-100, 100, (1, 64)).astype(np.float16)
            began_s, started = time.time(), time.perf_counter()
            try:
                answer = await client.infer(self.models[number], {"x": x})
            except ClientError as error:
                results.errors[f"{type(error).__name__}: {error}"[:200]] += 1
                continue
            results.answered.append(Asked(self.models[number], began_s, time.perf_counter() - started))
            results.wrong += not np.array_equal(answer["y"], 2 * x + np.float16(number))


async def in_turns(traffic: Traffic, servers: Mapping[str, Results], count: int, turns: int, window_s: float) -> None:
    """Ask servers, given by their addresses, in turns, each by `count` clients with a connection of their own."""
    async with AsyncExitStack() as stack:
        clients = {
            address: [
                await stack.enter_async_context(AsyncClient(address, retries=0, timeout_s=TIMEOUT_S)) for _ in range(count)
            ]
            for address in servers
        }
        for turn in range(turns):
            for address, results in servers.items():
                await traffic.send(clients[address], window_s, turn, results)


@dataclass(frozen=True)
class Loads:
    """The loads in a server's log: their times by model."""

    times: dict[str, list[float]]

    @classmethod
    def read(cls, log: str) -> Loads:
        """Parse a log of JSON lines."""
        times: dict[str, list[float]] = {}
        for line in log.splitlines():
            entry = json.loads(line) if line.startswith("{") else {}
            if LOADED.search(entry.get("message", "")):
                times.setdefault(entry["model"], []).append(datetime.fromisoformat(entry["time"]).timestamp())
        return cls(times)

    def waited(self, asked: Asked) -> bool:
        """Return whether a request waited for a load of its model."""
        began_s, ended_s = asked.began_s - SPARE_S, asked.began_s + asked.took_s + SPARE_S
        return any(began_s <= loaded_s <= ended_s for loaded_s in self.times.get(asked.model, ()))


@dataclass
class Memory:
    """Memory of a server over time."""

    samples: list[Sample] = field(default_factory=list)
    loaded: list[float] = field(default_factory=list)  # bytes of the loaded models, by its metrics

    @property
    def resident_mib(self) -> float:
        return max((sample.resident_mb for sample in self.samples), default=0.0)

    @contextmanager
    def watched(self, server: ServerProcess, *, has_metric: bool) -> Iterator[None]:
        """Take samples during the block."""
        stop = threading.Event()
        threads = [threading.Thread(target=watch, args=(server.process.pid, SAMPLE_S, stop, self.samples))]
        if has_metric:
            threads.append(threading.Thread(target=self._scrape, args=(server.http_address, stop)))
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    def _scrape(self, address: str, stop: threading.Event) -> None:
        connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
        with closing(connection):
            while not stop.wait(SAMPLE_S):
                connection.request("GET", "/metrics")
                found = LOADED_BYTES.search(connection.getresponse().read())
                if found is not None:
                    self.loaded.append(float(found[1]))


def main(
    seconds: Annotated[float, typer.Option(min=1, help="Time for which each server is asked.")] = 300.0,
    window_s: Annotated[float, typer.Option("--window", min=0.5, help="Seconds of each turn.")] = 10.0,
    count: Annotated[int, typer.Option("--models", min=2, help="Number of models.")] = 50,
    fitting: Annotated[int, typer.Option(min=1, help="Number of models that fit into the bound.")] = 10,
    clients: Annotated[int, typer.Option(min=1, help="Number of clients.")] = 16,
    rate: Annotated[float, typer.Option(min=1, help="Requests a second of all clients, if no request waited.")] = 200.0,
) -> None:
    """Compare a server that loads models on demand with one that has loaded all."""
    ranks = np.random.default_rng(0).permutation(count) + 1
    shares = (1 / ranks) / (1 / ranks).sum()
    traffic = Traffic([f"model_{number}" for number in range(count)], shares, clients / rate)
    demand, whole = Results(), Results()
    memory, whole_memory = Memory(), Memory()
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder, "models")
        for number, name in enumerate(traffic.models):
            save_shift(repository, name, number, HIDDEN)
        size = (repository / traffic.models[0] / "1" / "model.onnx").stat().st_size
        bound_mib = fitting * size / 2**20 + 0.5
        common = ("--log-format", "json")
        on_demand = ("--load-on-demand", "--max-loaded-mib", f"{bound_mib:.0f}")
        with (
            server_process(repository, *on_demand, *common, cache=Path(folder, "cache")) as server,
            server_process(repository, *common, cache=Path(folder, "cache")) as other,
            memory.watched(server, has_metric=True),
            whole_memory.watched(other, has_metric=False),
        ):
            servers, turns = {server.address: demand, other.address: whole}, max(1, round(seconds / window_s))
            asyncio.run(in_turns(traffic, servers, clients, turns, window_s))
            loads = Loads.read(server.log_text())
    _print(demand, whole, loads)
    peak_mib = max(memory.loaded, default=math.inf) / 2**20
    print(f"{sum(map(len, loads.times.values()))} loads; peak of loaded models {peak_mib:.1f} MiB of {bound_mib:.0f} MiB")
    print(f"resident {memory.resident_mib:.0f} MB, ", end="")
    print(f"with all loaded {whole_memory.resident_mib:.0f} MB")
    for error, times in (demand.errors + whole.errors).most_common():
        print(f"{times} x {error}")
    if demand.wrong or whole.wrong or demand.errors or whole.errors or peak_mib > bound_mib:
        raise SystemExit(1)


def _print(demand: Results, whole: Results, loads: Loads) -> None:
    waited = [asked for asked in demand.answered if loads.waited(asked)]
    loaded = [asked for asked in demand.answered if not loads.waited(asked)]
    table = Table(
        Column("requests", no_wrap=True),
        "answered",
        "wrong",
        "lost",
        *(f"p{q} ms" if q < 100 else "longest ms" for q in PERCENTILES),
    )
    table.add_row("on demand: all", *_counts(demand), *_milliseconds(demand.answered))
    table.add_row("of loaded models", str(len(loaded)), "", "", *_milliseconds(loaded))
    table.add_row("that waited for a load", str(len(waited)), "", "", *_milliseconds(waited))
    table.add_row("all models loaded", *_counts(whole), *_milliseconds(whole.answered))
    Console().print(table)


def _counts(results: Results) -> tuple[str, str, str]:
    return str(len(results.answered)), str(results.wrong), str(results.errors.total())


def _milliseconds(asked: Iterable[Asked]) -> list[str]:
    took_ms = [one.took_s * 1e3 for one in asked]
    return [f"{np.percentile(took_ms, q):.1f}" for q in PERCENTILES] if took_ms else ["-"] * len(PERCENTILES)


if __name__ == "__main__":
    typer.run(main)
