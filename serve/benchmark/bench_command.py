"""`halfserve bench`."""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import typer

from halfserve.files.atomic_files import checked_output
from halfserve.option_groups import takes_option_groups
from halfserve.protos.captured_requests import CapturedRequestsError, CapturedTraffic, read_traffic
from halfserve.serve.benchmark import BenchmarkArgumentError, BenchmarkError
from halfserve.serve.benchmark.benchmark_report import BenchmarkReport, write_csv, write_json, write_percentiles
from halfserve.serve.benchmark.campaign import Campaign, carry_out, default_processes
from halfserve.serve.benchmark.captured_load import replay
from halfserve.serve.benchmark.level import Load, parse_concurrencies, parse_rates
from halfserve.serve.benchmark.load.calls import MAX_CONNECTIONS
from halfserve.serve.benchmark.load.spec import Arrivals
from halfserve.serve.benchmark.load_target import RequestSettings
from halfserve.serve.benchmark.measurement import Goal, Measurement
from halfserve.serve.benchmark.page import write_page
from halfserve.serve.benchmark.request_inputs import MAX_BYTES, parse_parameters, parse_shapes
from halfserve.serve.benchmark.tables import ProgressBar, tables
from halfserve.serve.benchmark.text_target import RestEndpoint, parse_endpoint
from halfserve.serve.client.channel_settings import CLUSTER
from halfserve.serve.client.cli.connection_options import ADDRESS, AsJson, Credentials
from halfserve.serve.client.cli.display import PipedConsole, printable
from halfserve.serve.client.cli.inputs import InputArgumentError, read_inputs
from halfserve.serve.client.errors import ClientError

LARGEST = 1e8  # largest number of seconds or milliseconds; JSON and clocks cannot represent infinity
DEFAULT_CONCURRENCIES = "1,2,4,8,16,32,64"
DEFAULT_SECONDS = 2.0
MADE_UP = ("random", "zeros")
MAX_CAPTURED_ROWS = 10_000
EXIT_CODES: dict[type[Exception], int] = {
    BenchmarkArgumentError: 2,
    InputArgumentError: 2,
    BenchmarkError: 1,
    ClientError: 1,
    OSError: 1,
}
SETUP_TIMEOUT_S = 10.0  # least time limit of the calls that prepare the load
TERMINATED_EXIT_CODE = 143  # 128 + SIGTERM, as shells report it
SAME_S = 0.5


def _finite(number: float | None) -> float | None:
    if number is not None and not number <= LARGEST:
        raise typer.BadParameter(f"expected a number up to {LARGEST:.0f}, not {number:g}")
    return number


Writer = Callable[[BenchmarkReport], None]
WriteFile = Callable[[Path, BenchmarkReport], None]

_load = partial(typer.Option, rich_help_panel="Load")
_comparing = partial(typer.Option, rich_help_panel="Searching and comparing")
_requests = partial(typer.Option, rich_help_panel="Requests")
_report = partial(typer.Option, rich_help_panel="Report")


@dataclass(frozen=True, kw_only=True)
class BenchArguments:
    address: Annotated[
        str,
        typer.Option(
            help="HOST:PORT of the server's gRPC port, or cluster://HOST:PORT,... for all members of a cluster.",
            rich_help_panel="Connection",
        ),
    ] = ADDRESS
    credentials: Credentials
    version: Annotated[str, _requests(help="The model's version; by default the server chooses.")] = ""
    concurrency: Annotated[
        str | None, _load(help=f"Requests in flight: 1,4,16 or 1:64:x2. Without it {DEFAULT_CONCURRENCIES}.")
    ] = None
    rate: Annotated[str | None, _load(help="Requests per second instead, sent whether earlier ones are answered or not.")] = (
        None
    )
    arrivals: Annotated[
        Arrivals, _load(help="Intervals between the requests of a --rate: constant, or random as from many clients (poisson).")
    ] = "poisson"
    replay: Annotated[
        str | None, _load(help="Captured requests at their arrival times instead: 1, or 2 for twice as fast, or 1,2,4.")
    ] = None
    seconds: Annotated[
        float | None,
        _load(
            help="Seconds of each level, or of each window with --until-stable; by default 2, or the whole --replay.",
            callback=_finite,
            min=0.01,
        ),
    ] = None
    requests: Annotated[int | None, _load(help="End each level after so many requests instead.", min=1)] = None
    until_stable: Annotated[
        bool, _load("--until-stable", help="Measure windows of --seconds until three agree within 10 %.")
    ] = False
    warmup: Annotated[float, _load(help="Seconds of unmeasured load before each level.", callback=_finite, min=0)] = 0.5
    max_latency_ms: Annotated[
        float | None,
        _comparing(
            help="Find the highest load at which --percentile of the latency is within this limit.", callback=_finite, min=0.001
        ),
    ] = None
    percentile: Annotated[
        float,
        _comparing(help="Percentile of the latency for --max-latency-ms and --until-stable.", callback=_finite, min=1, max=100),
    ] = 99.0
    goodput_ms: Annotated[
        float | None,
        _comparing(help="Count the requests that are answered within this many milliseconds too.", callback=_finite, min=0.001),
    ] = None
    against: Annotated[
        list[str] | None,
        _comparing(
            help="Compare with this model, in turn: MODEL or MODEL/VERSION of the same server, or HOST:PORT/MODEL; may"
            " be repeated."
        ),
    ] = None
    rounds: Annotated[int, _comparing(help="Rounds of a comparison.", min=1)] = 5
    batch_size: Annotated[str, _requests(help="Rows per request: 1 or 1,8,32.")] = "1"
    shape: Annotated[
        list[str] | None,
        _requests(
            help="NAME:SIZES of an input with variable sizes, without the batch size; several take turns; by default "
            "usual sizes."
        ),
    ] = None
    parameter: Annotated[list[str] | None, _requests(help="NAME=VALUE of every request, such as priority=1.")] = None
    inputs: Annotated[
        list[str] | None, _requests("--input", help="NAME=FILE.npy with rows to send, or NAME=JSON; may be repeated.")
    ] = None
    data: Annotated[
        str, _requests(help="Values of the other inputs: random, zeros, FILE.npz, or a FOLDER of captured requests.")
    ] = "random"
    endpoint: Annotated[
        str | None, _requests(help="REST path to send texts to: /embed, /v1/embeddings, ..., or http://HOST:PORT/embed.")
    ] = None
    texts: Annotated[Path | None, _requests(help="File with one text per line for --endpoint; by default made-up texts.")] = (
        None
    )
    streaming: Annotated[bool, _requests("--streaming", help="Send the requests over one stream (ModelStreamInfer).")] = False
    shared_memory: Annotated[
        Literal["none", "system", "cuda"],
        _requests(help="Leave tensors in memory that the server reads: the system's, or the first CUDA device's."),
    ] = "none"
    processes: Annotated[
        int | None, _load(help="Processes that generate the load; by default chosen for this machine.", min=1)
    ] = None
    connections: Annotated[
        int | None, _load(help="Connections to the server, and more when these are full; by default one per process.", min=1)
    ] = None
    timeout: Annotated[float, _load(help="Deadline of each request, in seconds.", callback=_finite, min=0.001)] = 30.0
    output: Annotated[Path | None, _report(help="Write the figures to this JSON file.")] = None
    csv: Annotated[Path | None, _report(help="Write a line per level to this CSV file.")] = None
    html: Annotated[Path | None, _report(help="Write an HTML page with tables and plots to this file.")] = None
    hgrm: Annotated[Path | None, _report(help="Write latency distributions to this file, as HdrHistogram's text.")] = None
    as_json: AsJson = False

    def campaign(self, models: Sequence[str]) -> Campaign:
        """Build the measurements that the options describe. Raises BenchmarkArgumentError: an option is malformed, or options
        exclude each other; InputArgumentError: an input or a credential cannot be read.
        """
        captured = self._captured(models)
        given, zeros = self._data() if captured is None else ({}, False)
        most = default_processes()
        processes = self.processes or min(most, self.connections or most)
        goal = None if self.max_latency_ms is None else Goal(percent=self.percentile, max_ms=self.max_latency_ms)
        endpoint = self._endpoint(models)
        campaign = Campaign(
            address=self.address if endpoint is None or self.address != ADDRESS else endpoint.grpc_address,
            endpoint=endpoint,
            models=models,
            against=[_against(text, self.address) for text in self.against or []],
            loads=self._loads(captured),
            how=Measurement(
                seconds=None if self.requests or self.replay is not None else self.seconds or DEFAULT_SECONDS,
                requests=None if self.replay is not None else self.requests,
                until_stable=self.until_stable,
                warmup_s=self.warmup,
                timeout_s=self.timeout,
                arrivals=self.arrivals,
                connections=self.connections or processes,
                percent=self.percentile,
                goodput_ms=self.goodput_ms,
            ),
            options=RequestSettings(
                shapes=parse_shapes(self.shape or []),
                given=given,
                zeros=zeros,
                captured=captured,
                parameters=parse_parameters(self.parameter or []),
                version=self.version,
                streaming=self.streaming,
                shared_memory=None if self.shared_memory == "none" else self.shared_memory,
                processes=processes,
                timeout_s=max(self.timeout, SETUP_TIMEOUT_S),
                tls=self.credentials.tls(),
                token=self.credentials.token(),
                metadata=self.credentials.metadata(),
            ),
            batch_sizes=parse_concurrencies(self.batch_size, "--batch-size"),
            goal=goal,
            rounds=self.rounds,
            command=command_line(sys.argv[1:]),
        )
        _check(campaign)
        return campaign

    def _endpoint(self, models: Sequence[str]) -> RestEndpoint | None:
        if self.endpoint is None:
            if self.texts is not None:
                raise BenchmarkArgumentError("--texts are for a REST path; expected --endpoint too, such as /embed")
            return None
        others = {
            "--against": self.against,
            "--input": self.inputs,
            "--shape": self.shape,
            "--parameter": self.parameter,
            "--data": self.data != "random",
            "--streaming": self.streaming,
            "--replay": self.replay,
            "--shared-memory": self.shared_memory != "none",
            "cluster://": self.address.startswith(CLUSTER),
            "all models but one": len(models) > 1,
        }
        _refuse_others("--endpoint sends texts to one model of one server", others)
        return parse_endpoint(self.endpoint, self.address, self.texts)

    def _captured(self, models: Sequence[str]) -> CapturedTraffic | None:
        """Return the requests of --data FOLDER; None where it is no folder."""
        folder = Path(self.data)
        if self.data in MADE_UP or not folder.is_dir():
            if self.replay is not None:
                raise BenchmarkArgumentError("--replay sends captured requests; expected their folder as --data FOLDER")
            return None
        others = {
            "--input": self.inputs,
            "--shape": self.shape,
            "--batch-size": self.batch_size != "1",
            "all models but one": len(models) > 1,
        }
        _refuse_others(f"--data {folder}: captured requests of one model go as they are", others)
        if self.replay is not None:
            searches = {"--until-stable": self.until_stable, "--max-latency-ms": self.max_latency_ms}
            _refuse_others("--replay has its own load and length", searches)
        try:
            return read_traffic(folder, models[0], most_rows=MAX_CAPTURED_ROWS, most_bytes=MAX_BYTES)
        except CapturedRequestsError as error:
            raise BenchmarkArgumentError(f"--data {error}") from None

    def _loads(self, captured: CapturedTraffic | None) -> list[Load]:
        if sum(option is not None for option in (self.concurrency, self.rate, self.replay)) > 1:
            raise BenchmarkArgumentError("--concurrency, --rate and --replay are kinds of load; expected one of them")
        if self.replay is not None and captured is not None:
            speeds = parse_rates(self.replay, "--replay")
            return [replay(captured, speed, seconds=self.seconds, requests=self.requests) for speed in speeds]
        if self.rate is not None:
            return [Load(rate=number) for number in parse_rates(self.rate)]
        text = self.concurrency or ("1" if self.max_latency_ms is not None else DEFAULT_CONCURRENCIES)
        return [Load(concurrency=number) for number in parse_concurrencies(text)]

    def _data(self) -> tuple[dict[str, object], bool]:
        """Return the inputs given by name, and whether all other inputs are zeros."""
        inputs, data = self.inputs or [], self.data
        if data in MADE_UP:
            return read_inputs(inputs), data == "zeros"
        if not data.endswith(".npz"):
            raise BenchmarkArgumentError(f"--data {data}: expected random, zeros, the name of a .npz file or a folder")
        try:
            return read_inputs([*inputs, data]), False
        except InputArgumentError as error:
            raise BenchmarkArgumentError(str(error).replace(f"--input {data}:", f"--data {data}:")) from None


@takes_option_groups
def bench(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="The model; with several models, requests take turns.")
    ],
    *,
    arguments: BenchArguments,
) -> None:
    """Measure a server's throughput and latency under rising load.

    Without --input and --data, the requests hold random numbers in the model's shape, the same ones in every run.
    Latency at a --rate counts from when a request was to be sent, so a server that stalls cannot hide it.
    --max-latency-ms searches between the lowest and the highest load given; a single load is doubled until it fails.

    Example: halfserve bench digits --concurrency 1,4,16,64 --output bench.json --html bench.html

    Example: halfserve bench digits --rate 500 --max-latency-ms 5

    Example: halfserve bench digits --against digits_fp32

    Example: halfserve bench encoder --endpoint /v1/embeddings --batch-size 1,16 --texts sentences.txt

    Example: halfserve bench digits --data captured --replay 1 --against digits/2
    """
    campaign = arguments.campaign(models)
    with sigterm_as_interrupt():
        _run(campaign, arguments)


def _run(campaign: Campaign, arguments: BenchArguments) -> None:
    given = ("output", "csv", "html", "hgrm")
    writers = report_writers({f"--{name}": getattr(arguments, name) for name in given})
    with ProgressBar() as bar:
        report, ending = carry_out(campaign, bar)
    if report.levels:
        for write in writers:
            write(report)
        _show(report, as_json=arguments.as_json)
    if ending is not None:
        raise ending


def command_line(arguments: Sequence[str]) -> str:
    """Return the command line, without the values of headers: a password must not get into a report."""
    shown = [
        re.sub(r":.*", ":...", argument, flags=re.DOTALL) if before == "--header" else argument
        for before, argument in pairwise(["", *arguments])
    ]
    return shlex.join(["halfserve", *(re.sub(r"(?s)^(--header=[^:]*:).*", r"\1...", argument) for argument in shown)])


def _refuse_others(reason: str, others: Mapping[str, object]) -> None:
    if wrong := [option for option, value in others.items() if value]:
        raise BenchmarkArgumentError(f"{reason}; leave {', '.join(wrong)} out")


def _against(text: str, address: str) -> tuple[str, str, str]:
    """(address, model, version) from an --against option; the version is "" where it has none."""
    scheme = CLUSTER if text.startswith(CLUSTER) else ""
    place, _, rest = text.removeprefix(scheme).partition("/")
    if ":" not in place:
        place, scheme, rest = address, "", text
    model, slash, version = rest.partition("/")
    if not model or (slash and not re.fullmatch(r"[0-9]+", version)):
        raise BenchmarkArgumentError(
            f"--against {text}: expected HOST:PORT/MODEL, or MODEL of the same server, and /VERSION behind for one of it"
        )
    return scheme + place, model, version


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


def _show(report: BenchmarkReport, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report.to_json(), allow_nan=False))
    else:
        console = PipedConsole()
        for table in tables(report, narrow=True):
            console.print(table)
        for line in report.failures():
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        if report.goal and report.best:
            level = report.best
            console.print(f"{report.goal.text}: up to {level.load.text}, {level.requests_per_second:,.0f} requests/s")
    for line in report.doubts():
        typer.echo(printable(line), err=True)


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt in the block at SIGTERM, but only once if the signal comes twice. Use it in the main thread only.

    `timeout` signals its child and then the whole group, which includes the child, so the second signal is not a new request.

    Raises:
        SystemExit: SIGTERM ended the block (143).
    """
    terminated, raised_s = False, -SAME_S

    def interrupt(number: int, _: object) -> None:
        nonlocal terminated, raised_s
        now_s = time.monotonic()
        if now_s - raised_s < SAME_S:
            return
        terminated, raised_s = terminated or number == signal.SIGTERM, now_s
        raise KeyboardInterrupt

    # A signal that is ignored (nohup, a background job) stays ignored.
    numbers = [number for number in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    except KeyboardInterrupt:
        if terminated:
            sys.exit(TERMINATED_EXIT_CODE)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def report_writers(outputs: Mapping[str, Path | None]) -> list[Writer]:
    """Return one function per file to write; anything that would prevent the writing is found here, before the measurement.

    `outputs` has the path by option: "--output" (JSON), "--csv", "--html", "--hgrm".

    Raises:
        BenchmarkArgumentError: two options name the same file.
        OSError: a file cannot be written; the text names the option.
        ModuleNotFoundError: an optional package is missing.
    """
    given = {option: path for option, path in outputs.items() if path is not None}
    _check_apart(given)
    return [partial(_write_function(option), checked_output(path, option)) for option, path in given.items()]


def _check_apart(outputs: Mapping[str, Path]) -> None:
    taken: dict[Path, str] = {}
    for option, path in outputs.items():
        if path.exists() and not path.is_file():
            continue  # /dev/null and pipes take several outputs
        before = taken.setdefault(path.resolve(), option)
        if before != option:
            raise BenchmarkArgumentError(f"{before} and {option} {path}: are one file; expected a file for each")


def _write_function(option: str) -> WriteFile:
    if option == "--hgrm":
        # An extra; where it is missing, that is found before the measurement.
        import hdrh.histogram  # type: ignore[import-untyped]  # noqa: F401, PLC0415  (an extra)

        return write_percentiles
    writers: dict[str, WriteFile] = {"--output": write_json, "--csv": write_csv, "--html": write_page}
    return writers[option]
