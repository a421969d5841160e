"""`halfserve tune`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from halfserve.files.atomic_files import checked_output
from halfserve.option_groups import takes_option_groups
from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.benchmark import BenchmarkArgumentError, BenchmarkError
from halfserve.serve.benchmark.bench_command import LARGEST, BenchArguments, command_line, sigterm_as_interrupt
from halfserve.serve.benchmark.level import Load
from halfserve.serve.benchmark.load_target import RequestSettings, host_and_port
from halfserve.serve.benchmark.tables import ProgressBar
from halfserve.serve.client.cli.connection_options import AsJson, Credentials
from halfserve.serve.client.cli.display import PipedConsole, printable
from halfserve.serve.client.cli.inputs import InputArgumentError
from halfserve.serve.client.errors import ClientError
from halfserve.serve.engine.config.model_config import read_config
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.repository.model_repository import CONFIG_FILE
from halfserve.serve.engine.resource_limits import usable_cores
from halfserve.serve.trials.decisions import users_folder
from halfserve.serve.tuning import TuningArgumentError, TuningError
from halfserve.serve.tuning.config_edit import ConfigEdit, edited, read_text
from halfserve.serve.tuning.recorded_points import RecordedPoints, circumstances_key
from halfserve.serve.tuning.search import TuningGoal, TuningOutcome, TuningSearch
from halfserve.serve.tuning.settings import configured
from halfserve.serve.tuning.tuned_server import TunedServer, own_server
from halfserve.serve.tuning.tuning_report import TuningReport, write_report

EXIT_CODES: dict[type[Exception], int] = {
    TuningArgumentError: 2,
    BenchmarkArgumentError: 2,
    InputArgumentError: 2,
    ModelLoadError: 2,
    TuningError: 1,
    BenchmarkError: 1,
    ClientError: 1,
    OSError: 1,
}
MODEL_SUFFIXES = (".onnx", ".xml", ".pt2")

_searching = partial(typer.Option, rich_help_panel="Search")
_requests = partial(typer.Option, rich_help_panel="Requests")
_result = partial(typer.Option, rich_help_panel="Result")


@dataclass(frozen=True, kw_only=True)
class TuneArguments:
    """Options of `halfserve tune`."""

    max_latency_ms: Annotated[float, _searching(help="The latency limit, in milliseconds.", min=0.001)]
    percentile: Annotated[float, _searching(help="Percentage of requests that must keep it.", min=1, max=100)] = 99.0
    seconds: Annotated[float, _searching(help="Time for the search.", min=0.01)] = 300.0
    concurrency: Annotated[
        int | None,
        _searching(help="Measure with so many requests in flight; without it, with the most that keep the limit.", min=1),
    ] = None
    rate: Annotated[
        float | None,
        _searching(help="Measure at so many requests per second, and find the lowest latency.", min=0.001),
    ] = None
    cores: Annotated[int | None, _searching(help="Cores that the model may use; without it, this machine's.", min=1)] = None
    data: Annotated[str, _requests(help="Inputs, as of halfserve bench: random, zeros, or FILE.npz.")] = "random"
    shape: Annotated[
        list[str] | None, _requests(help="NAME:SIZES without the batch size, for variable sizes; several take turns.")
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
        list[Path] | None, _result(help="Write all measurements to FILE.json, or a page with the Pareto front to FILE.html.")
    ] = None
    as_json: AsJson = False

    def requests(self, address: str, model: str) -> RequestSettings:
        """Return the requests to send, as `halfserve bench` makes them. Raises as `BenchArguments.campaign`."""
        bench = BenchArguments(
            address=address, credentials=self.credentials, data=self.data, shape=self.shape, parameter=self.parameter
        )
        return replace(bench.campaign([model]).options, batch_size=self.rows)

    @property
    def goal(self) -> TuningGoal:
        """What the options search for. Raises TuningArgumentError: two kinds of load are given, or a number is none."""
        numbers = {"max-latency-ms": self.max_latency_ms, "seconds": self.seconds, "rate": self.rate}
        for option, number in numbers.items():
            if number is not None and not number <= LARGEST:
                raise TuningArgumentError(f"--{option} {number:g}: expected a number up to {LARGEST:.0f}")
        if self.rate is not None and self.concurrency is not None:
            raise TuningArgumentError("--concurrency and --rate are two kinds of load; expected one of them")
        fixed = self.rate is not None or self.concurrency is not None
        return TuningGoal(
            max_ms=self.max_latency_ms,
            percent=self.percentile,
            seconds=self.seconds,
            load=Load(concurrency=self.concurrency, rate=self.rate) if fixed else None,
            rows=self.rows,
        )


@dataclass(frozen=True, kw_only=True)
class DeclaredText:
    """A config.pbtxt as it was before the tuning; `path` and `text` are None where there is none."""

    path: Path | None = None
    text: str | None = None
    config: ModelConfig = field(default_factory=ModelConfig)


@dataclass(frozen=True, kw_only=True)
class ModelPlace:
    """Where the model to tune is."""

    name: str
    path: Path | None  # its folder in a repository, or its file; None for a model that only a server has

    @classmethod
    def of(cls, text: str, *, is_remote: bool) -> ModelPlace:
        """Read REPOSITORY/MODEL, the path of a model file, or with a running server the name of a model.
        Raises TuningArgumentError: there is no such model.
        """
        path = Path(text)
        if path.is_file() and path.suffix in MODEL_SUFFIXES:
            return cls(name=path.stem, path=path)
        if path.is_dir() and path.resolve().name:
            folder = path.resolve()
            return cls(name=folder.name, path=folder)
        if is_remote and len(path.parts) == 1:
            return cls(name=text, path=None)
        expected = "a model's folder in a repository, REPOSITORY/MODEL, or a model file"
        raise TuningArgumentError(f"{text}: not found; expected {expected}{', or the name of a model' if is_remote else ''}")

    @property
    def repository(self) -> Path | None:
        """What a server serves: the folder of the model's folder, or the file."""
        return self.path.parent if self.path is not None and self.path.is_dir() else self.path

    def folder(self, model: str) -> Path | None:
        """Return the folder of a model in the same repository; None if this is a file, or on a server alone."""
        return self.path.parent / model if self.path is not None and self.path.is_dir() else None

    def declared(self, model: str) -> DeclaredText:
        """Return what a model's config.pbtxt says. Raises ModelLoadError: it cannot be read."""
        folder = self.folder(model)
        if folder is None:
            return DeclaredText()
        config = read_config(folder / CONFIG_FILE).message
        return DeclaredText(path=folder / CONFIG_FILE, text=read_text(folder / CONFIG_FILE), config=config)


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
    goal, place = arguments.goal, ModelPlace.of(model, is_remote=arguments.address is not None)
    reports = [checked_output(_with_suffix(path), "--report") for path in arguments.report or []]
    _check(place, arguments)
    with ExitStack() as stack:
        address = arguments.address or stack.enter_context(own_server(place.repository or Path(), place.name, options))
        host_and_port(address)
        settings = arguments.requests(address, place.name)
        server = stack.enter_context(
            TunedServer(address, place.name, settings, percent=goal.percent, processes=settings.processes)
        )
        declared = [place.declared(name) for name in server.models]
        for one in declared:  # of an ensemble, those of its steps
            if arguments.apply and one.path is not None:
                checked_output(one.path, "--apply")
        if arguments.address is None:
            server.bases = tuple(one.config for one in declared)
        else:
            stack.callback(_restore, server)
        bar = stack.enter_context(ProgressBar())
        outcome = _searched(server, place, arguments, goal, bar, options)
    edits = _edits(declared, server, outcome)
    report = TuningReport(
        model=place.name,
        models=server.models,
        address=arguments.address,
        command=command_line(sys.argv[1:]),
        goal=goal,
        outcome=outcome,
        edits=edits,
        notes=list(_notes(place, server, outcome, edits)),
    )
    for path in reports:
        write_report(path, report)
    _show(report, as_json=arguments.as_json)
    if outcome.best is None:
        point = outcome.nearest
        raise TuningError(
            f"no settings keep p{goal.percent:g} within {goal.max_ms:g} ms; the nearest reach {point.latency_ms:.2f} ms at "
            f"{point.load.text} ({point.rate:,.0f} requests/s). Nothing was written; allow more time, or "
            "give the model more cores"
        )
    _write(edits, arguments)


def _with_suffix(path: Path) -> Path:
    if path.suffix not in (".html", ".json"):
        raise TuningArgumentError(f"--report {path}: expected the name of a .html or .json file")
    return path


def _check(place: ModelPlace, arguments: TuneArguments) -> None:
    """Raise for what would fail only after the measurements."""
    if not arguments.apply:
        return
    folder = place.folder(place.name)
    if folder is None:
        raise TuningArgumentError(
            "--apply writes config.pbtxt of a model in a repository; expected REPOSITORY/MODEL, with the file in "
            "MODEL/1/model.onnx"
        )
    checked_output(folder / CONFIG_FILE, "--apply")


def _searched(
    server: TunedServer, place: ModelPlace, arguments: TuneArguments, goal: TuningGoal, bar: ProgressBar, options: Sequence[str]
) -> TuningOutcome:
    """Search, on the screen; an interrupted search says how it goes on."""
    for note in server.target.notes:  # the requests are tried before anything is loaded
        bar.note(note)
    cores = arguments.cores or usable_cores()
    space = server.space(cores, goal.max_ms)
    facts: list[str | bytes] = [arguments.address or "", str(cores), str(goal.percent), str(server.processes), *options]
    facts += [base.SerializeToString(deterministic=True) for base in (*server.bases, *server.completed)]
    facts += [request.SerializeToString(deterministic=True) for _, request in server.target.requests]
    if place.path is None:  # the files cannot be read
        facts.append(server.answer())
    files = {place.folder(name) or place.path for name in server.models} - {None}
    folder = users_folder()
    key = circumstances_key(sorted(path for path in files if path is not None), facts)
    path = None if folder is None else folder / "tuning" / f"{key}.json"
    machine = RecordedPoints(path, server.measure, time.monotonic)
    server.progress = bar
    bar.begin(f"tuning {place.name}", None)
    try:
        return TuningSearch(space, machine, goal, bar.note).run()
    except KeyboardInterrupt:
        if path is not None:
            bar.note("interrupted; what was measured is kept, and the same command goes on from there")
        raise


def _restore(server: TunedServer) -> None:
    for line in server.restore():
        typer.echo(printable(line), err=True)


def _edits(declared: Sequence[DeclaredText], server: TunedServer, outcome: TuningOutcome) -> list[ConfigEdit]:
    """Return the changes of the config.pbtxt of each tuned model; none where there is nothing to change."""
    found = []
    for index, one in enumerate(declared):
        if one.path is not None and outcome.best is not None:
            settings, backend = outcome.best.choice[index], server.completed[index].backend
            found.append(edited(one.path, one.text, configured(one.config, server.start[index], settings, backend)))
    return [edit for edit in found if edit.diff]


def _notes(place: ModelPlace, server: TunedServer, outcome: TuningOutcome, edits: Sequence[ConfigEdit]) -> list[str]:
    if outcome.best is None:
        return []
    lines = [f"{edit.path}: its comments cannot be kept in this form of the file" for edit in edits if edit.loses_comments]
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
        if place.folder(name) is None:
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
