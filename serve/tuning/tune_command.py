"""`halfserve tune`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from halfserve.files.atomic_files import checked_output
from halfserve.option_groups import takes_option_groups
from halfserve.serve.benchmark import BenchmarkArgumentError, BenchmarkError, bench_command
from halfserve.serve.benchmark.bench_command import LARGEST, BenchArguments, command_line, sigterm_as_interrupt
from halfserve.serve.benchmark.load_target import RequestSettings, host_and_port
from halfserve.serve.benchmark.tables import ProgressBar
from halfserve.serve.client.cli.connection_options import AsJson, Credentials
from halfserve.serve.client.cli.display import PipedConsole, printable
from halfserve.serve.engine.config.model_config import read_config
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.repository.model_repository import CONFIG_FILE
from halfserve.serve.engine.resource_limits import usable_cores
from halfserve.serve.trials.decisions import users_folder
from halfserve.serve.tuning.config_edit import ConfigEdit, edited
from halfserve.serve.tuning.recorded_points import RecordedPoints, circumstances_key
from halfserve.serve.tuning.search import TuningGoal, TuningOutcome, TuningSearch
from halfserve.serve.tuning.settings import configured
from halfserve.serve.tuning.tuned_server import TunedServer, own_server
from halfserve.serve.tuning.tuning_report import TuningReport, write_report

EXIT_CODES = bench_command.EXIT_CODES | {ModelLoadError: 2}
MODEL_SUFFIXES = (".onnx", ".xml", ".pt2")

_searching = partial(typer.Option, rich_help_panel="Search")
_requests = partial(typer.Option, rich_help_panel="Requests")
_result = partial(typer.Option, rich_help_panel="Result")


@dataclass(frozen=True, kw_only=True)
class TuneArguments:
    """Options of `halfserve tune`."""

    max_latency_ms: Annotated[float, _searching(help="The latency limit, in milliseconds.", min=0.001, max=LARGEST)]
    percentile: Annotated[float, _searching(help="Percentage of requests that must stay within the limit.", min=1, max=100)] = (
        99.0
    )
    seconds: Annotated[float, _searching(help="Seconds that the search may take.", min=0.01, max=LARGEST)] = 300.0
    concurrency: Annotated[
        int | None,
        _searching(help="Measure with this many requests in flight; by default with the most that keep the limit.", min=1),
    ] = None
    cores: Annotated[int | None, _searching(help="Cores that the model may use; by default all of this machine.", min=1)] = None
    data: Annotated[str, _requests(help="Values of the inputs: random, zeros, FILE.npz, or a FOLDER of captured requests.")] = (
        "random"
    )
    shape: Annotated[
        list[str] | None,
        _requests(help="NAME:SIZES of an input with variable sizes, without the batch size; several take turns."),
    ] = None
    parameter: Annotated[list[str] | None, _requests(help="NAME=VALUE of every request.")] = None
    rows: Annotated[int, _requests(help="Rows per request.", min=1)] = 1
    address: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT of a running server that loads models by request (--model-control explicit), such as Triton; "
            "without it, a server is started.",
            rich_help_panel="Connection",
        ),
    ] = None
    credentials: Credentials
    apply: Annotated[bool, _result("--apply", help="Write config.pbtxt without asking; the earlier file is kept.")] = False
    report: Annotated[
        Path | None, _result(help="Write all measurements to FILE.json, or a page with the Pareto front to FILE.html.")
    ] = None
    as_json: AsJson = False

    def requests(self, model: str) -> RequestSettings:
        """Return the requests to send, as `halfserve bench` makes them. Raises as `BenchArguments.campaign`."""
        bench = BenchArguments(credentials=self.credentials, data=self.data, shape=self.shape, parameter=self.parameter)
        requests = bench.campaign([model]).options
        if requests.captured is not None and self.rows != 1:
            raise BenchmarkArgumentError(f"--data {self.data}: captured requests go as they are; leave --rows out")
        return replace(requests, batch_size=self.rows)


@dataclass(frozen=True, kw_only=True)
class ModelPlace:
    """Where the model to tune is."""

    name: str
    served: Path = Path()  # what a server serves: a repository, or the model's file
    folder: Path | None = None  # the repository with its config.pbtxt; None for a file, and a model that only a server has

    @classmethod
    def of(cls, text: str, *, is_remote: bool) -> ModelPlace:
        """Read REPOSITORY/MODEL, the path of a model file, or with a running server the name of a model.
        Raises BenchmarkArgumentError: there is no such model.
        """
        path = Path(text).resolve()
        if path.is_file() and path.suffix in MODEL_SUFFIXES:
            return cls(name=path.stem, served=path)
        if path.is_dir() and path.name:
            return cls(name=path.name, served=path.parent, folder=path.parent)
        if is_remote and len(Path(text).parts) == 1:
            return cls(name=text)
        expected = "a model's folder in a repository, REPOSITORY/MODEL, or a model file"
        raise BenchmarkArgumentError(f"{text}: not found; expected {expected}{', or the name of a model' if is_remote else ''}")

    def config_path(self, model: str) -> Path | None:
        """Return the config.pbtxt of a model in the repository, if any."""
        return self.folder and self.folder / model / CONFIG_FILE


@takes_option_groups
def tune(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="REPOSITORY/MODEL, a model file, or with --address a model's name.")
    ],
    server: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- OPTIONS", help="Further options of halfserve serve, for the server.", show_default=False),
    ] = None,
    *,
    arguments: TuneArguments,
) -> None:
    """Find the settings of a model with the highest throughput within a latency limit.

    Measures copies, threads, batch size, queue delay, and padding and precision where these are proved, on a server that it
    starts. Shows what changes in config.pbtxt, and writes that after a question, or with --apply. An interrupted tuning goes on
    where it was when the same command is given again.

    Example: halfserve tune runs/demo/repository/digits --max-latency-ms 10

    Example: halfserve tune digits --max-latency-ms 10 --address 127.0.0.1:8001 --report tuning.html
    """
    with sigterm_as_interrupt():
        _run(model, server or [], arguments)


def _run(model: str, options: Sequence[str], arguments: TuneArguments) -> None:
    place = ModelPlace.of(model, is_remote=arguments.address is not None)
    if arguments.report is not None:
        checked_output(arguments.report, "--report")
    if arguments.apply and place.config_path(place.name) is None:
        raise BenchmarkArgumentError(
            "--apply writes config.pbtxt of a model in a repository; expected REPOSITORY/MODEL, with the file in "
            "MODEL/1/model.onnx"
        )
    goal = TuningGoal(
        max_ms=arguments.max_latency_ms,
        percent=arguments.percentile,
        seconds=arguments.seconds,
        concurrency=arguments.concurrency,
        rows=arguments.rows,
    )
    requests = arguments.requests(place.name)
    if arguments.address is not None:
        host_and_port(arguments.address)
    with ExitStack() as stack:
        bar = stack.enter_context(ProgressBar())
        address = arguments.address or stack.enter_context(own_server(place.served, place.name, options))
        server = stack.enter_context(TunedServer(address, place.name, requests, percent=goal.percent, bar=bar))
        if arguments.apply:
            for path in filter(None, map(place.config_path, server.models)):  # of an ensemble, those of its steps
                checked_output(path, "--apply")
        if arguments.address is not None:
            stack.callback(server.restore)
        outcome = _searched(server, place, arguments, goal, bar, options)
    edits = list(_edits(place, server, outcome))
    report = TuningReport(
        model=place.name,
        models=server.models,
        address=arguments.address,
        command=command_line(sys.argv[1:]),
        goal=goal,
        outcome=outcome,
        edits=edits,
        notes=_notes(place, server, outcome),
    )
    if arguments.report is not None:
        write_report(arguments.report, report)
    _show(report, as_json=arguments.as_json)
    if outcome.best is None:
        point = outcome.nearest
        raise BenchmarkError(
            f"no settings keep p{goal.percent:g} within {goal.max_ms:g} ms; the nearest reach {point.latency_ms:.2f} ms at "
            f"{point.concurrency} in flight ({point.requests_per_second:,.0f} requests/s). Nothing was written; allow more "
            "time, or give the model more cores"
        )
    _write(edits, arguments)


def _searched(
    server: TunedServer, place: ModelPlace, arguments: TuneArguments, goal: TuningGoal, bar: ProgressBar, options: Sequence[str]
) -> TuningOutcome:
    """Search, on the screen; an interrupted search says how it goes on."""
    for note in server.target.notes:
        bar.note(note)
    cores = arguments.cores or usable_cores()
    messages = [*server.completed, *(request for _, request in server.target.requests)]
    facts: list[object] = [arguments.address, cores, goal.percent, *options]
    facts += [message.SerializeToString(deterministic=True) for message in messages]
    files = [place.folder / name for name in server.models] if place.folder else [place.served]
    if place == ModelPlace(name=place.name):  # the files cannot be read
        facts, files = [*facts, server.answer()], []
    folder = users_folder()
    key = circumstances_key(files, facts)
    machine = RecordedPoints(folder and folder / "tuning" / f"{key}.json", server.measure)
    bar.begin(f"tuning {place.name}", None)
    try:
        return TuningSearch(server.space(cores, goal.max_ms), machine, goal, bar.note).run()
    except KeyboardInterrupt:
        bar.note("interrupted; what was measured is kept, and the same command goes on from there")
        raise


def _edits(place: ModelPlace, server: TunedServer, outcome: TuningOutcome) -> Iterator[ConfigEdit]:
    """Yield the changes of the config.pbtxt of each tuned model."""
    if outcome.best is None:
        return
    for name, config, before, after in zip(server.models, server.completed, server.start, outcome.best.choice, strict=True):
        path = place.config_path(name)
        if path is not None and after != before:
            edit = edited(path, configured(read_config(path).message, before, after, config.backend))
            if edit.diff:
                yield edit


def _notes(place: ModelPlace, server: TunedServer, outcome: TuningOutcome) -> list[str]:
    lines: list[str] = []
    if outcome.best is None:
        return lines
    if outcome.ended_early:
        lines.append("the time was over before the search was; more --seconds may find more")
    if outcome.start is not None and outcome.best.choice == outcome.start.choice:
        return [*lines, "the settings in force are the best that were found; nothing is to change"]
    for name, before, after in zip(server.models, server.start, outcome.best.choice, strict=True):
        if after.max_batch_size < before.max_batch_size:
            lines.append(
                f"max_batch_size of {name!r} falls from {before.max_batch_size} to {after.max_batch_size}: requests of more "
                "rows will be refused; --rows says how many yours have"
            )
        if place.config_path(name) is None:
            lines.append(f"put these settings into config.pbtxt of {name!r}: {after.text}")
    return lines


def _show(report: TuningReport, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report.to_json(), allow_nan=False))
    else:
        console = PipedConsole()
        console.print(report.table())
        for edit in report.edits:
            console.print(edit.diff, highlight=False, soft_wrap=True)
    for line in report.notes:
        typer.echo(printable(line), err=True)


def _write(edits: Sequence[ConfigEdit], arguments: TuneArguments) -> None:
    """Write the changes, if the user agrees."""
    if not edits:
        return
    is_asked = not arguments.apply and not arguments.as_json and sys.stdin.isatty()
    if not (arguments.apply or (is_asked and typer.confirm("Write this?"))):
        typer.echo("nothing was written" + ("" if is_asked else "; the same command with --apply writes it"), err=True)
        return
    for edit in edits:
        backup = edit.write()
        typer.echo(f"wrote {edit.path}" + (f"; the earlier file is {backup}" if backup else ""), err=True)
