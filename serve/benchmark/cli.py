"""`halfserve bench`."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import typer

from serve.benchmark.campaign import Campaign, carry_out, default_processes
from serve.benchmark.contestant import RequestOptions
from serve.benchmark.errors import BenchmarkArgumentError, BenchmarkError
from serve.benchmark.load.links import MAX_CONNECTIONS
from serve.benchmark.load.order import Arrivals
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
from serve.client.console import PipedConsole
from serve.client.input_arguments import InputArgumentError, read_inputs
from serve.client.tls import Tls

EXIT_CODES: dict[type[Exception], int] = {
    BenchmarkArgumentError: 2,
    InputArgumentError: 2,
    BenchmarkError: 1,
    InferenceClientError: 1,
    OSError: 1,
}
LARGEST = 1e8  # of seconds and milliseconds; infinity has no place in JSON, nor in a clock
PATIENCE_S = 10.0  # with what is asked beside the load
DEFAULT_CONCURRENCIES = "1,2,4,8,16,32,64"


def _finite(number: float | None) -> float | None:
    """The number of an option as it is, if there is an end to it."""
    if number is not None and not number <= LARGEST:
        raise typer.BadParameter(f"expected a number up to {LARGEST:.0f}, not {number:g}")
    return number


def bench(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="The model; requests go to several in turn.")],
    *,
    address: Annotated[str, typer.Option(help="HOST:PORT of the server's gRPC port.")] = "127.0.0.1:8001",
    tls: Annotated[bool, typer.Option("--tls", help="Encrypt the connection.")] = False,
    tls_authorities: Annotated[Path | None, typer.Option(help="PEM file of whom to trust; implies --tls.")] = None,
    tls_certificate: Annotated[Path | None, typer.Option(help="PEM file with our certificate; implies --tls.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file with its private key.")] = None,
    tls_server_name: Annotated[str | None, typer.Option(help="In the server's certificate, if not the host.")] = None,
    metadata: Annotated[list[str] | None, typer.Option(help="NAME=VALUE of every call, such as a token.")] = None,
    version: Annotated[str, typer.Option(help="The model's version; without it, the server's choice.")] = "",
    concurrency: Annotated[
        str | None, typer.Option(help=f"Requests in flight: 1,4,16 or 1:64:x2. Without it {DEFAULT_CONCURRENCIES}.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Requests per second instead, sent whether earlier ones are answered or not.")
    ] = None,
    arrivals: Annotated[Arrivals, typer.Option(help="How the requests of a rate follow each other.")] = "poisson",
    seconds: Annotated[
        float, typer.Option(help="Length of each level, or of a window of it.", callback=_finite, min=0.01)
    ] = 2.0,
    requests: Annotated[int | None, typer.Option(help="End each level after so many requests instead.", min=1)] = None,
    until_stable: Annotated[
        bool, typer.Option("--until-stable", help="Measure windows of --seconds until three agree within 10 %.")
    ] = False,
    warmup: Annotated[float, typer.Option(help="Seconds of unmeasured load before each level.", callback=_finite, min=0)] = 0.5,
    max_latency_ms: Annotated[
        float | None,
        typer.Option(help="Find the highest load that keeps --percentile within this.", callback=_finite, min=0.001),
    ] = None,
    percentile: Annotated[
        float, typer.Option(help="Of the latency, to be kept or stable.", callback=_finite, min=1, max=100)
    ] = 99.0,
    goodput_ms: Annotated[
        float | None, typer.Option(help="Count what is answered within this too.", callback=_finite, min=0.001)
    ] = None,
    against: Annotated[
        list[str] | None, typer.Option(help="HOST:PORT/MODEL, or MODEL of the same server, to compare with, in turn.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Rounds of a comparison.", min=1)] = 5,
    batch_size: Annotated[str, typer.Option(help="Rows per request: 1 or 1,8,32.")] = "1",
    shape: Annotated[
        list[str] | None, typer.Option(help="NAME:SIZES without the batch size, for variable sizes; several take turns.")
    ] = None,
    parameter: Annotated[list[str] | None, typer.Option(help="NAME=VALUE of every request, such as priority=1.")] = None,
    inputs: Annotated[list[str] | None, typer.Option("--input", help="NAME=FILE.npy with rows to send, or JSON.")] = None,
    data: Annotated[str, typer.Option(help="Other inputs: random, zeros, or FILE.npz.")] = "random",
    streaming: Annotated[bool, typer.Option("--streaming", help="Over ModelStreamInfer.")] = False,
    shared_memory: Annotated[
        Literal["none", "system"], typer.Option(help="Leave tensors in memory that the server reads.")
    ] = "none",
    processes: Annotated[
        int | None, typer.Option(help="Processes that generate the load; without it, what the machine gives.", min=1)
    ] = None,
    connections: Annotated[int | None, typer.Option(help="To the server; without it, one per process.", min=1)] = None,
    timeout: Annotated[float, typer.Option(help="Deadline of each request, in seconds.", callback=_finite, min=0.001)] = 30.0,
    output: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write a line per level to this CSV file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write one page with tables and plots.")] = None,
    hgrm: Annotated[Path | None, typer.Option(help="Write latency distributions as HdrHistogram's text.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw throughput and latency into this PNG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
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
    used = processes or default_processes()
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
            tls=_tls(tls, tls_authorities, tls_certificate, tls_key, tls_server_name),
            metadata=dict(_name_and_value(text) for text in metadata or []),
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
    text = concurrency or ("1" if searching else DEFAULT_CONCURRENCIES)
    return [Load(concurrency=number) for number in parse_concurrencies(text)]


def _data(inputs: list[str], data: str) -> tuple[dict[str, object], bool]:
    """The inputs given by name, and whether the others are zeros."""
    if data in ("random", "zeros"):
        return read_inputs(inputs), data == "zeros"
    if not data.endswith(".npz"):
        raise BenchmarkArgumentError(f"--data {data}: expected random, zeros or the name of a .npz file")
    return read_inputs([*inputs, data]), False


def _tls(
    asked: bool, authorities: Path | None, certificate: Path | None, key: Path | None, server_name: str | None
) -> Tls | None:
    if not (asked or authorities or certificate or key or server_name):
        return None
    return Tls(authorities=authorities, certificate=certificate, key=key, server_name=server_name)


def _name_and_value(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise BenchmarkArgumentError(f"--metadata {text}: expected NAME=VALUE, such as authorization=...")
    return name, value


def _command(arguments: Sequence[str]) -> str:
    """The command line, without the values of metadata: a token has no place in a report."""
    shown = [
        re.sub(r"=.*", "=...", argument, flags=re.DOTALL) if before == "--metadata" else argument
        for before, argument in pairwise(["", *arguments])
    ]
    return shlex.join(["halfserve", *(re.sub(r"(?s)^(--metadata=[^=]*=).*", r"\1...", argument) for argument in shown)])


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
    most = MAX_CONNECTIONS * campaign.options.processes
    if campaign.how.connections > most:
        raise BenchmarkArgumentError(
            f"--connections {campaign.how.connections}: expected at most {most}, {MAX_CONNECTIONS} for each of --processes"
        )
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
        typer.echo(line, err=True)
