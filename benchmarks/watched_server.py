"""A server that switches observability on and off under load, and measures the time it spends either way.

    python -m benchmarks.watched_server MODEL.onnx FOLDER '{"log": 100, "traces": 1000}'

Started by benchmarks.observability. Prints its ports as JSON, then "scrape" whenever its metrics should be read, and, when its
input has ended, the measured times.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from benchmarks.request_cost import loaded, one_row
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.model_statistics import StageHistograms
from halfserve.serve.http.http_options import HttpOptions
from halfserve.serve.observability.observability import Observability
from halfserve.serve.observability.observe_options import AccessLog, ObserveOptions
from halfserve.serve.protocol.service import Service
from halfserve.serve.server import start_http
from halfserve.serve.transports.nghttp2.server import Nghttp2Server

PLAIN_S, OBSERVED_S = 0.03, 0.09  # lengths of the windows; periodic work must be spread over many of them
WARM_UP_S = 1.0  # time under load before the first window
REQUEST = "request.bin"  # one framed request, beside the log and the traces
SCRAPE_EVERY_S = 5.0  # Prometheus asks every 15 to 60

keep_histogram = StageHistograms.add


@dataclass(frozen=True)
class Watching:
    """Kinds of observability of a server.

    Attributes:
        histograms: whether latency histograms by stage are kept.
        scraped: whether its metrics are scraped.
        log: one answer in `log` gets a line in the access log; 0 for none.
        traces: one request in `traces` is traced; 0 for none.
    """

    histograms: bool = False
    scraped: bool = False
    log: int = 0
    traces: int = 0


@dataclass(frozen=True)
class Window:
    """A short time in which nothing is switched.

    Attributes:
        requests: number of answered requests.
        loop_ns: processor time of the event loop's thread, in nanoseconds.
        wall_ns: length in nanoseconds.
    """

    requests: int
    loop_ns: int
    wall_ns: int


@dataclass
class Account:
    """Measured times.

    Attributes:
        plain: windows without observability; each is next to the window at the same index of `observed`.
        observed: windows with all of it.
        threads_ns: processor time of all other threads, in nanoseconds.
    """

    plain: list[Window] = field(default_factory=list)
    observed: list[Window] = field(default_factory=list)
    threads_ns: int = 0


def switch(observability: Observability, watching: Watching) -> None:
    """Switch to exactly these kinds of observability."""
    setattr(StageHistograms, "add", keep_histogram if watching.histograms else _keep_nothing)  # noqa: B010  (mypy minds "=")
    log = AccessLog.ALL if watching.log == 1 else AccessLog.SAMPLED if watching.log else AccessLog.OFF
    observability.update_logs({"access_log": log.value, "access_log_every": max(1, watching.log)})
    level = "TIMESTAMPS" if watching.traces else "OFF"
    observability.update_traces("", {"trace_level": [level], "trace_rate": [str(max(1, watching.traces))]})


def _keep_nothing(histograms: StageHistograms, done: object) -> None:
    """Replaces StageHistograms.add, and does nothing."""


class Turns:
    """Alternates windows with and without observability."""

    def __init__(self, model: Model, observability: Observability, watching: Watching) -> None:
        self._model = model
        self._observability = observability
        self._watching = watching
        self._is_observed = False
        self._scraped_s = 0.0
        self._windows_to_warm_up = 2 * round(WARM_UP_S / (PLAIN_S + OBSERVED_S))
        self._start_account()
        self._begin()

    def _start_account(self) -> None:
        self._threads_before_ns = time.process_time_ns() - time.thread_time_ns()
        self.account = Account()

    def _begin(self) -> None:
        switch(self._observability, self._watching if self._is_observed else Watching())
        if self._is_observed and self._watching.scraped and time.monotonic() - self._scraped_s > SCRAPE_EVERY_S:
            self._scraped_s = time.monotonic()
            print("scrape", flush=True)
        self._before = self._now()
        asyncio.get_running_loop().call_later(OBSERVED_S if self._is_observed else PLAIN_S, self._end)

    def _end(self) -> None:
        window = Window(*(now - before for now, before in zip(self._now(), self._before, strict=True)))
        (self.account.observed if self._is_observed else self.account.plain).append(window)
        self.account.threads_ns = time.process_time_ns() - time.thread_time_ns() - self._threads_before_ns
        self._is_observed = not self._is_observed
        if self._windows_to_warm_up and window.requests:
            self._windows_to_warm_up -= 1
            if not self._windows_to_warm_up:
                self._start_account()
        self._begin()

    def _now(self) -> tuple[int, int, int]:
        return self._model.statistics.totals.success.count, time.thread_time_ns(), time.monotonic_ns()


async def _serve(path: Path, folder: Path, watching: Watching) -> None:
    try:
        model = loaded(path)
    except ModelLoadError as error:
        raise SystemExit(str(error)) from None
    (folder / REQUEST).write_bytes(one_row(model))
    core = InferenceCore([model])
    observe = ObserveOptions(access_log_file=folder / "access.log", trace_to=str(folder / "traces.json"))
    service = Service(core, server_version="0", observe=observe)
    transport = Nghttp2Server(service, "127.0.0.1", 0)
    grpc_port = await transport.start()
    rest = await start_http(core, service, "127.0.0.1", HttpOptions(port=0, metrics_port=0))
    assert rest is not None  # noqa: S101  (for the type checker)
    gc.freeze()
    print(json.dumps({"grpc": grpc_port, "metrics": rest.metrics_port}), flush=True)
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, over.set)
    turns = Turns(model, service.observability, watching)
    await over.wait()
    service.observability.close()
    print(json.dumps(asdict(turns.account)), flush=True)
    await asyncio.gather(transport.stop(0.1), rest.stop(0.1), core.drain())


def main(
    model: Path,
    folder: Annotated[Path, typer.Argument(help="For the log and the traces.")],
    watching: Annotated[str, typer.Argument(help="Fields of Watching, as JSON.")],
) -> None:
    """Serve until the input ends."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(model, folder, Watching(**json.loads(watching))))


if __name__ == "__main__":
    typer.run(main)
