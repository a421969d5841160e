"""The options of `halfserve bench`, by the heading that its help shows them under."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from serve.benchmark.load.order import Arrivals

LARGEST = 1e8  # of seconds and milliseconds; infinity has no place in JSON, nor in a clock
DEFAULT_CONCURRENCIES = "1,2,4,8,16,32,64"


def _finite(number: float | None) -> float | None:
    """The number of an option as it is, if there is an end to it."""
    if number is not None and not number <= LARGEST:
        raise typer.BadParameter(f"expected a number up to {LARGEST:.0f}, not {number:g}")
    return number


Address = Annotated[str, typer.Option(help="HOST:PORT of the server's gRPC port.", rich_help_panel="Connection")]

_load = partial(typer.Option, rich_help_panel="Load")

Concurrency = Annotated[str | None, _load(help=f"Requests in flight: 1,4,16 or 1:64:x2. Without it {DEFAULT_CONCURRENCIES}.")]
Rate = Annotated[str | None, _load(help="Requests per second instead, sent whether earlier ones are answered or not.")]
ArrivalsChoice = Annotated[Arrivals, _load(help="How the requests of a rate follow each other.")]
Seconds = Annotated[float, _load(help="Length of each level, or of a window of it.", callback=_finite, min=0.01)]
RequestCount = Annotated[int | None, _load(help="End each level after so many requests instead.", min=1)]
UntilStable = Annotated[bool, _load("--until-stable", help="Measure windows of --seconds until three agree within 10 %.")]
Warmup = Annotated[float, _load(help="Seconds of unmeasured load before each level.", callback=_finite, min=0)]
Processes = Annotated[int | None, _load(help="Processes that generate the load; without it, what the machine gives.", min=1)]
Connections = Annotated[int | None, _load(help="To the server, more where these are full; without it, one per process.", min=1)]
Timeout = Annotated[float, _load(help="Deadline of each request, in seconds.", callback=_finite, min=0.001)]

_comparing = partial(typer.Option, rich_help_panel="Searching and comparing")

MaxLatencyMs = Annotated[
    float | None,
    _comparing(help="Find the highest load that keeps --percentile within this.", callback=_finite, min=0.001),
]
Percentile = Annotated[float, _comparing(help="Of the latency, to be kept or stable.", callback=_finite, min=1, max=100)]
GoodputMs = Annotated[float | None, _comparing(help="Count what is answered within this too.", callback=_finite, min=0.001)]
Against = Annotated[
    list[str] | None, _comparing(help="HOST:PORT/MODEL, or MODEL of the same server, to compare with, in turn.")
]
Rounds = Annotated[int, _comparing(help="Rounds of a comparison.", min=1)]

_requests = partial(typer.Option, rich_help_panel="Requests")

Version = Annotated[str, _requests(help="The model's version; without it, the server's choice.")]
BatchSize = Annotated[str, _requests(help="Rows per request: 1 or 1,8,32.")]
Shape = Annotated[
    list[str] | None, _requests(help="NAME:SIZES without the batch size, for variable sizes; several take turns.")
]
Parameter = Annotated[list[str] | None, _requests(help="NAME=VALUE of every request, such as priority=1.")]
Inputs = Annotated[list[str] | None, _requests("--input", help="NAME=FILE.npy with rows to send, or JSON.")]
DataSource = Annotated[str, _requests(help="Other inputs: random, zeros, or FILE.npz.")]
Streaming = Annotated[bool, _requests("--streaming", help="Over ModelStreamInfer.")]
SharedMemory = Annotated[Literal["none", "system"], _requests(help="Leave tensors in memory that the server reads.")]

_report = partial(typer.Option, rich_help_panel="Report")

OutputFile = Annotated[Path | None, _report(help="Write the figures to this JSON file.")]
CsvFile = Annotated[Path | None, _report(help="Write a line per level to this CSV file.")]
HtmlFile = Annotated[Path | None, _report(help="Write one page with tables and plots.")]
HgrmFile = Annotated[Path | None, _report(help="Write latency distributions as HdrHistogram's text.")]
PlotFile = Annotated[Path | None, _report(help="Draw throughput and latency into this PNG file.")]
