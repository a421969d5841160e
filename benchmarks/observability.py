"""Cost of observability: processor time per request of one server, observed and not, in turn.

    python -m benchmarks.observability model.onnx

Needs h2load (Debian's package nghttp2-client). Processes of one program differ by up to a fifth from start to start, and loads
of one process by some percent: more than the effect. So a server under one long load repeatedly switches observability on for
90 ms and off for 30: log and traces as LogSettings and TraceSetting do, the latency histograms in a way that operators cannot,
and its metrics are scraped only while it is observed. This separates the time of its event loop; the time of its other threads,
which write log and traces later, counts entirely as cost of observability. The results are differences of the sums, with 95 %
intervals from resampling the pairs of windows. "nothing" compares two equal settings.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.watched_server import REQUEST, Watching

VARIANTS = {
    "nothing": Watching(),
    "histograms": Watching(histograms=True),
    "histograms, scraped": Watching(histograms=True, scraped=True),
    "log of 1 in 100": Watching(log=100),
    "traces of 1 in 1000": Watching(traces=1000),
    "all of these": Watching(histograms=True, scraped=True, log=100, traces=1000),
    "log of every request": Watching(log=1),
    "traces of 1 in 50": Watching(traces=50),
}
RESAMPLES = 1000
app = typer.Typer(add_completion=False, help=__doc__)


@dataclass(frozen=True)
class Spent:
    """Pairs of windows, not observed and observed.

    Attributes:
        requests: numbers of requests, shape (pairs, 2).
        loop_us: processor time of the event loop's thread in microseconds, shape (pairs, 2).
        wall_us: wall time in microseconds, shape (pairs, 2).
        threads_us: processor time of the other threads in microseconds, spread over the pairs, shape (pairs, 1).
    """

    requests: np.ndarray[Any, Any]
    loop_us: np.ndarray[Any, Any]
    wall_us: np.ndarray[Any, Any]
    threads_us: np.ndarray[Any, Any]

    def costs(self, pairs: slice | np.ndarray[Any, Any] = slice(None)) -> tuple[float, float, float]:
        """Processor microseconds of an unobserved request, and observing's effect on them and on the rate, in percent."""
        requests = self.requests[pairs].sum(axis=0)
        plain, observed = self.loop_us[pairs].sum(axis=0) / requests
        observed += self.threads_us[pairs].sum() / requests[1]
        slow, slower = self.wall_us[pairs].sum(axis=0) / requests
        return float(plain), 100 * float(observed / plain - 1), 100 * float(slow / slower - 1)


def spent(model: Path, watching: Watching, seconds: int, streams: int) -> Spent:
    """Start a server and load it for `seconds` seconds."""
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "benchmarks.watched_server", str(model), name, json.dumps(asdict(watching))]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None  # noqa: S101  (for the type checker)
            assert process.stdout is not None  # noqa: S101  (see above)
            line = process.stdout.readline()
            if not line:
                raise SystemExit("the server did not start; its message is above")
            ports = json.loads(line)
            lines: list[str] = []
            listener = threading.Thread(target=_listen, args=(process.stdout, ports["metrics"], lines))
            listener.start()
            _load(f"127.0.0.1:{ports['grpc']}", Path(name) / REQUEST, seconds, streams)
            process.stdin.close()
            listener.join()
    return pairs_of(json.loads(lines[-1]))


def _listen(lines: Sequence[str], metrics_port: int, rest: list[str]) -> None:
    for line in lines:
        if line == "scrape\n":
            with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics") as answer:
                answer.read()
        else:
            rest.append(line)


def _load(address: str, body: Path, seconds: int, streams: int) -> None:
    path = f"http://{address}/inference.GRPCInferenceService/ModelInfer"
    headers = ["-H", "content-type: application/grpc", "-H", "te: trailers"]
    size = [f"-D{seconds}", "--warm-up-time=1", "-c4", f"-m{streams}", "-d", str(body)]
    done = subprocess.run(["h2load", "-t1", *size, *headers, path], capture_output=True, text=True, check=False)
    good, bad = re.search(r"([1-9]\d*) succeeded", done.stdout), re.search(r" ([1-9]\d*) failed", done.stdout)
    if good is None or bad is not None:
        raise SystemExit(f"h2load failed:\n{done.stdout[-1000:]}{done.stderr[-500:]}")


def pairs_of(account: dict[str, Any]) -> Spent:
    """The pairs of windows during the load."""
    count = min(len(account["plain"]), len(account["observed"]))  # the load may have ended between the two windows of a pair
    windows = [account[kind][:count] for kind in ("plain", "observed")]
    requests, loop, wall = (
        np.array([[window[name] for window in kind] for kind in windows], np.float64).T
        for name in ("requests", "loop_ns", "wall_ns")
    )
    loaded = (requests > np.median(requests, axis=0) / 4).all(axis=1)
    threads = np.full((loaded.sum(), 1), account["threads_ns"] / 1e3 / loaded.sum())
    return Spent(requests[loaded], loop[loaded] / 1e3, wall[loaded] / 1e3, threads)


def _together(parts: Sequence[Spent]) -> Spent:
    names = ("requests", "loop_us", "wall_us", "threads_us")
    return Spent(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def told(all_spent: Spent) -> dict[str, Any]:
    """Results with their intervals, in microseconds and percent."""
    generator = np.random.default_rng(0)
    count = len(all_spent.requests)
    drawn = np.array([all_spent.costs(generator.integers(0, count, count)) for _ in range(RESAMPLES)])
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0).tolist()
    plain, more, rate = all_spent.costs()
    return {
        "plain_us": plain,
        "processor_percent": {"value": more, "low": low[1], "high": high[1]},
        "rate_percent": {"value": rate, "low": low[2], "high": high[2]},
        "pairs": count,
    }


def _percent(figure: dict[str, float]) -> str:
    return f"{figure['value']:+.1f} % ({figure['low']:+.1f} to {figure['high']:+.1f})"


@app.command()
def main(
    model: Annotated[
        Path,
        typer.Argument(exists=True, dir_okay=False, help="An .onnx file; a small one, so that the server is what is measured."),
    ],
    starts: Annotated[int, typer.Option(min=1, help="Servers, for each way of being observed.")] = 3,
    seconds: Annotated[int, typer.Option(min=2, help="That each of them is loaded.")] = 15,
    streams: Annotated[int, typer.Option(min=1, help="Requests in flight on each of the four connections.")] = 8,
    only: Annotated[str, typer.Option(help="Ways of being observed whose names hold this text, and nothing.")] = "",
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure what each way of being observed costs."""
    if shutil.which("h2load") is None:
        raise SystemExit("h2load is not installed; install Debian's package nghttp2-client")
    if not any(only in name for name in VARIANTS):
        raise SystemExit(f"no way of being observed holds {only!r}; there are: {'; '.join(VARIANTS)}")
    chosen = {name: watching for name, watching in VARIANTS.items() if only in name or watching == Watching()}
    parts: dict[str, list[Spent]] = {name: [] for name in chosen}
    for _ in track(range(starts), description="measuring", console=Console(stderr=True)):
        for name, watching in chosen.items():
            parts[name].append(spent(model.resolve(), watching, seconds, streams))
    figures = {name: told(_together(own)) for name, own in parts.items()}
    if as_json:
        print(json.dumps(figures))
        return
    table = Table("observed by", "us a request without", "processor time", "requests a second", "pairs")
    for name, row in figures.items():
        costs = (_percent(row["processor_percent"]), _percent(row["rate_percent"]))
        table.add_row(name, f"{row['plain_us']:.2f}", *costs, str(row["pairs"]))
    Console().print(table)


if __name__ == "__main__":
    app()
