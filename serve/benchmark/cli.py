"""`halfserve bench`."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from protos.inference_pb2 import ModelInferRequest
from serve.benchmark.errors import BenchmarkArgumentError, BenchmarkError
from serve.benchmark.level import Level
from serve.benchmark.load_generator import LoadGenerator
from serve.benchmark.report import Report, write_json
from serve.benchmark.request_inputs import RequestPlan, parse_shapes
from serve.benchmark.sweep import Sweep, run_sweep
from serve.client import InferenceClient, InferenceClientError
from serve.client.atomic_file import checked_output
from serve.client.display import provider_of
from serve.client.input_arguments import InputArgumentError, fitted_inputs, read_inputs

EXIT_CODES: dict[type[Exception], int] = {
    BenchmarkArgumentError: 2,
    InputArgumentError: 2,
    BenchmarkError: 1,
    InferenceClientError: 1,
    OSError: 1,
}


def bench(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    *,
    address: Annotated[str, typer.Option(help="HOST:PORT of the server's gRPC port.")] = "127.0.0.1:8001",
    version: Annotated[str, typer.Option(help="The model's version; without it, the server's choice.")] = "",
    concurrency: Annotated[str, typer.Option(help="Requests in flight, one level for each number.")] = "1,2,4,8,16,32,64",
    seconds: Annotated[float, typer.Option(help="Length of each level.", min=0.01)] = 2.0,
    requests: Annotated[int | None, typer.Option(help="End each level after so many requests instead.", min=1)] = None,
    warmup: Annotated[float, typer.Option(help="Seconds of unmeasured load before each level.", min=0)] = 0.5,
    batch_size: Annotated[int, typer.Option(help="Rows per request.", min=1)] = 1,
    shape: Annotated[list[str] | None, typer.Option(help="NAME:SIZES without the batch size, for variable sizes.")] = None,
    inputs: Annotated[list[str] | None, typer.Option("--input", help="NAME=FILE.npy with rows to send, or JSON.")] = None,
    processes: Annotated[int, typer.Option(help="Processes that generate the load.", min=1)] = 1,
    timeout: Annotated[float, typer.Option(help="Deadline of each request, in seconds.", min=0.001)] = 30.0,
    output: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw throughput and latency into this PNG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure a server's throughput and latency at rising concurrency.

    Without --input, the requests hold random numbers in the model's shape, the same ones in every run.

    Example: halfserve bench digits --concurrency 1,4,16,64 --output bench.json --plot bench.png
    """
    writers = _writers(output, plot)
    sweep = Sweep(
        model=model,
        version=version,
        batch_size=batch_size,
        concurrencies=parse_concurrencies(concurrency),
        seconds=None if requests else seconds,
        requests=requests,
        warmup_s=warmup,
        timeout_s=timeout,
    )
    shapes, given = parse_shapes(shape or []), read_inputs(inputs or [])
    with InferenceClient(address, timeout_s=timeout) as client:
        messages, report = _prepared(client, sweep, shapes=shapes, given=given)
        with LoadGenerator(address, messages, processes=processes) as generator:
            levels, failure = _measured(sweep, client, generator)
    report = replace(report, levels=levels)
    if levels:
        for write in writers:
            write(report)
        _show(report, as_json=as_json)
    if failure is not None:
        raise failure


def parse_concurrencies(text: str) -> list[int]:
    """Read "1,2,4".

    Raises:
        BenchmarkArgumentError: it is no such list, or a number is below 1.
    """
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise BenchmarkArgumentError(f"--concurrency {text}: expected numbers above 0 with commas between, such as 1,4,16")
    return [int(part) for part in parts]


def _writers(output: Path | None, plot: Path | None) -> list[Callable[[Report], None]]:
    """What is to be done with the report; whatever would stop it is found now, not after the measurement."""
    writers: list[Callable[[Report], None]] = []
    if output is not None:
        json_path = checked_output(output, "--output")
        writers.append(lambda report: write_json(json_path, report.to_json()))
    if plot is not None:
        from serve.benchmark.plot import write_plot  # noqa: PLC0415  (matplotlib is an extra, and slow to load)

        plot_path = checked_output(plot, "--plot")
        writers.append(lambda report: write_plot(plot_path, report))
    return writers


def _prepared(
    client: InferenceClient, sweep: Sweep, *, shapes: dict[str, list[int]], given: dict[str, Any]
) -> tuple[list[bytes], Report]:
    """The requests to send, one of which the server has answered, and a report that has no levels yet."""
    metadata, config = client.model_metadata(sweep.model, sweep.version), client.model_config(sweep.model, sweep.version)
    fitted, notes = fitted_inputs(given, metadata)
    for note in notes:
        typer.echo(note, err=True)
    plan = RequestPlan(
        metadata=metadata,
        max_batch_size=config.max_batch_size,
        batch_size=sweep.batch_size,
        shapes=shapes,
        given=fitted,
        version=sweep.version,
    )
    messages = plan.serialized()
    # What the server has against a request is said before any load, and in its own words.
    answer = client.infer_message(ModelInferRequest.FromString(messages[0]))
    report = Report(
        model=sweep.model,
        version=answer.model_version,
        address=client.address,
        provider=provider_of(config),
        batch_size=sweep.batch_size,
        command=shlex.join(["halfserve", *sys.argv[1:]]),
        levels=[],
    )
    return messages, report


def _measured(
    sweep: Sweep, client: InferenceClient, generator: LoadGenerator
) -> tuple[list[Level], BenchmarkError | InferenceClientError | None]:
    """The levels, and what ended the sweep early: the levels before it are worth keeping."""
    levels: list[Level] = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task(f"measuring {sweep.model}", total=len(sweep.concurrencies))
        try:
            for level in run_sweep(sweep, client, generator):
                levels.append(level)
                text = f"{level.concurrency} in flight: {level.requests_per_second:,.0f} requests/s"
                progress.update(bar, advance=1, description=text)
        except (BenchmarkError, InferenceClientError) as error:
            return levels, error
    return levels, None


def _show(report: Report, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report.to_json(), allow_nan=False))
    else:
        Console().print(report.table())
    for warning in report.warnings():
        typer.echo(warning, err=True)
