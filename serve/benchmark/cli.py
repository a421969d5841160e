"""`halfserve bench`."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import typer

from serve.benchmark import cli_options as opt
from serve.benchmark.campaign import Campaign, carry_out, default_processes
from serve.benchmark.contestant import RequestOptions
from serve.benchmark.errors import BenchmarkArgumentError, BenchmarkError
from serve.benchmark.load.links import MAX_CONNECTIONS
from serve.benchmark.loads import Load, parse_concurrencies, parse_rates
from serve.benchmark.measurement import Measurement
from serve.benchmark.progress import ProgressBar
from serve.benchmark.reports.report import Report
from serve.benchmark.reports.tables import tables
from serve.benchmark.reports.writers import Files
from serve.benchmark.request_inputs import parse_parameters, parse_shapes
from serve.benchmark.sweep import Goal
from serve.benchmark.termination import sigterm_as_interrupt
from serve.client import InferenceClientError
from serve.client.commands.connection_options import (
    ADDRESS,
    AsJson,
    Credentials,
    takes_credentials,
)
from serve.client.commands.console import PipedConsole, printable
from serve.client.commands.input_arguments import InputArgumentError, read_inputs

EXIT_CODES: dict[type[Exception], int] = {
    BenchmarkArgumentError: 2,
    InputArgumentError: 2,
    BenchmarkError: 1,
    InferenceClientError: 1,
    OSError: 1,
}
PATIENCE_S = 10.0  # with what is asked beside the load


@takes_credentials
def bench(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="The model; requests go to several in turn.")],
    *,
    address: opt.Address = ADDRESS,
    credentials: Credentials,
    version: opt.Version = "",
    concurrency: opt.Concurrency = None,
    rate: opt.Rate = None,
    arrivals: opt.ArrivalsChoice = "poisson",
    seconds: opt.Seconds = 2.0,
    requests: opt.RequestCount = None,
    until_stable: opt.UntilStable = False,
    warmup: opt.Warmup = 0.5,
    max_latency_ms: opt.MaxLatencyMs = None,
    percentile: opt.Percentile = 99.0,
    goodput_ms: opt.GoodputMs = None,
    against: opt.Against = None,
    rounds: opt.Rounds = 5,
    batch_size: opt.BatchSize = "1",
    shape: opt.Shape = None,
    parameter: opt.Parameter = None,
    inputs: opt.Inputs = None,
    data: opt.DataSource = "random",
    streaming: opt.Streaming = False,
    shared_memory: opt.SharedMemory = "none",
    processes: opt.Processes = None,
    connections: opt.Connections = None,
    timeout: opt.Timeout = 30.0,
    output: opt.OutputFile = None,
    csv: opt.CsvFile = None,
    html: opt.HtmlFile = None,
    hgrm: opt.HgrmFile = None,
    plot: opt.PlotFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure a server's throughput and latency under rising load.

    Without --input and --data, the requests hold random numbers in the model's shape, the same ones in every run.
    Latency at a --rate counts from when a request was to be sent, so a server that stalls cannot hide it.
    --max-latency-ms searches between the lowest and the highest load given; a single load is doubled until it fails.

    Example: halfserve bench digits --concurrency 1,4,16,64 --output bench.json --html bench.html

    Example: halfserve bench digits --rate 500 --max-latency-ms 5

    Example: halfserve bench digits --against digits_fp32
    """
    goal = None if max_latency_ms is None else Goal(percent=percentile, max_ms=max_latency_ms)
    given, zeros = _data(inputs or [], data)
    most = default_processes()
    used = processes or min(most, connections or most)
    campaign = Campaign(
        address=address,
        models=models,
        against=[_contestant(text, address) for text in against or []],
        loads=_loads(concurrency, rate, searching=goal is not None),
        how=Measurement(
            seconds=None if requests else seconds,
            requests=requests,
            until_stable=until_stable,
            warmup_s=warmup,
            timeout_s=timeout,
            arrivals=arrivals,
            connections=connections or used,
            percent=percentile,
            goodput_ms=goodput_ms,
        ),
        options=RequestOptions(
            shapes=parse_shapes(shape or []),
            given=given,
            zeros=zeros,
            parameters=parse_parameters(parameter or []),
            version=version,
            streaming=streaming,
            shared_memory=shared_memory == "system",
            processes=used,
            timeout_s=max(timeout, PATIENCE_S),
            tls=credentials.tls(),
            token=credentials.token(),
            metadata=credentials.metadata(),
        ),
        batch_sizes=parse_concurrencies(batch_size, "--batch-size"),
        goal=goal,
        rounds=rounds,
        command=_command(sys.argv[1:]),
    )
    _check(campaign)
    with sigterm_as_interrupt():
        _run(campaign, Files(output=output, csv=csv, html=html, hgrm=hgrm, plot=plot), as_json=as_json)


def _run(campaign: Campaign, files: Files, *, as_json: bool) -> None:
    writers = files.writers()
    with ProgressBar() as bar:
        report, ending = carry_out(campaign, bar)
    if report.levels:
        for write in writers:
            write(report)
        _show(report, as_json=as_json)
    if ending is not None:
        raise ending


def _loads(concurrency: str | None, rate: str | None, *, searching: bool) -> list[Load]:
    if rate is not None:
        if concurrency is not None:
            raise BenchmarkArgumentError("--concurrency and --rate are two kinds of load; expected one of them")
        return [Load(rate=number) for number in parse_rates(rate)]
    text = concurrency or ("1" if searching else opt.DEFAULT_CONCURRENCIES)
    return [Load(concurrency=number) for number in parse_concurrencies(text)]


def _data(inputs: list[str], data: str) -> tuple[dict[str, object], bool]:
    """The inputs given by name, and whether the others are zeros."""
    if data in ("random", "zeros"):
        return read_inputs(inputs), data == "zeros"
    if not data.endswith(".npz"):
        raise BenchmarkArgumentError(f"--data {data}: expected random, zeros or the name of a .npz file")
    try:
        return read_inputs([*inputs, data]), False
    except InputArgumentError as error:
        raise BenchmarkArgumentError(str(error).replace(f"--input {data}:", f"--data {data}:")) from None


def _command(arguments: Sequence[str]) -> str:
    """The command line, without the values of headers: a password has no place in a report."""
    shown = [
        re.sub(r":.*", ":...", argument, flags=re.DOTALL) if before == "--header" else argument
        for before, argument in pairwise(["", *arguments])
    ]
    return shlex.join(["halfserve", *(re.sub(r"(?s)^(--header=[^:]*:).*", r"\1...", argument) for argument in shown)])


def _contestant(text: str, address: str) -> tuple[str, str]:
    """(address, model) of an --against."""
    place, slash, model = text.partition("/")
    if not slash and text:
        return address, text
    if ":" not in place or not model:
        raise BenchmarkArgumentError(f"--against {text}: expected HOST:PORT/MODEL, or MODEL of the same server")
    return place, model


def _check(campaign: Campaign) -> None:
    """Raise for options that exclude each other."""
    asked, least = campaign.how.connections, campaign.options.processes
    most = MAX_CONNECTIONS * least
    if asked > most:
        raise BenchmarkArgumentError(
            f"--connections {asked}: expected at most {most}, {MAX_CONNECTIONS} for each of --processes"
        )
    if asked < least:
        raise BenchmarkArgumentError(f"--connections {asked}: expected {least} at least, one for each of --processes")
    several = len(campaign.batch_sizes) > 1
    if campaign.how.until_stable and campaign.how.requests is not None:
        raise BenchmarkArgumentError("--until-stable and --requests both say when to end; expected one of them")
    if campaign.goal and (campaign.against or several):
        raise BenchmarkArgumentError("--max-latency-ms searches on one server with one --batch-size; leave the others out")
    if campaign.against and (several or len(campaign.models) > 1):
        raise BenchmarkArgumentError("--against compares one model with one --batch-size; expected one of each")


def _show(report: Report, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report.to_json(), allow_nan=False))
    else:
        console = PipedConsole()
        for table in tables(report):
            console.print(table)
        for line in report.failures():
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        if report.goal and report.best:
            level = report.best
            console.print(f"{report.goal.text}: up to {level.load.text}, {level.requests_per_second:,.0f} requests/s")
    for line in report.doubts():
        typer.echo(printable(line), err=True)
