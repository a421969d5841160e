"""`halfserve demo`: the whole way on handwritten digits, by the commands that a user would type, each in its own process."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, cast

import typer
from rich.console import Console

from serve.benchmark.errors import BenchmarkArgumentError
from serve.benchmark.loads import parse_concurrencies

MODEL, DATA, NAME = "examples.digits.model:model", "examples.digits.data:data", "digits"


class DemoError(Exception):
    """A step of the demo failed; what it said itself stands above this line."""


EXIT_CODES: dict[type[Exception], int] = {BenchmarkArgumentError: 2, DemoError: 1, OSError: 1}


@dataclass(frozen=True)
class Files:
    """What the demo writes, below one folder."""

    folder: Path

    @property
    def training(self) -> Path:
        """checkpoint.pt and train.jsonl."""
        return self.folder / "training"

    @property
    def repository(self) -> Path:
        """The model repository that is served."""
        return self.folder / "repository"

    @property
    def bench(self) -> Path:
        """The load test's figures."""
        return self.folder / "bench.json"

    @property
    def bench_plot(self) -> Path:
        """The same as a picture."""
        return self.folder / "bench.png"

    @property
    def report(self) -> Path:
        """The page that shows it all."""
        return self.folder / "report.html"


def demo(
    out: Annotated[Path, typer.Option(help="Folder to write to. A second demo there adds a version of the model.")] = Path(
        "runs/demo"
    ),
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images.")] = 12,
    seconds: Annotated[float, typer.Option(min=0.1, help="Measuring time at each concurrency.")] = 2.0,
    concurrency: Annotated[str, typer.Option(help="Requests in flight, one level after the other.")] = "1,2,4,8,16,32,64",
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train a digits classifier in fp16, export it with proof, serve it over gRPC, ask it and measure it.

    Example: halfserve demo --out runs/demo
    """
    # Soft wrap: a command that is printed can be copied.
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    started = time.monotonic()
    parse_concurrencies(concurrency)  # before the work, not after it
    # These bring torch, which takes seconds: who asks for help, or is told of wrong usage, need not wait for it.
    from examples.digits.ask import ask_held_out  # noqa: PLC0415  (see above)
    from examples.digits.report import DemoResult, result_tables, write_report  # noqa: PLC0415  (see above)

    files = Files(out)
    files.folder.mkdir(parents=True, exist_ok=True)
    _step(console, "1/4", "train in fp16", _train(files, epochs))
    _step(console, "2/4", "convert to fp16, compare with fp32, write the repository", _export(files))
    with _server(console, files) as address:
        served_accuracy = ask_held_out(address, NAME, DATA)
        bench = ["bench", NAME, "--address", address, "--concurrency", concurrency, "--seconds", str(seconds)]
        bench += ["--output", str(files.bench), "--plot", str(files.bench_plot)]
        _step(console, "4/4", "measure throughput and latency", bench)
    result = DemoResult.read(
        training=files.training,
        certificate=_certificate(files.repository),
        bench=files.bench,
        bench_plot=files.bench_plot,
        served_accuracy=served_accuracy,
    )
    write_report(files.report, result)
    if as_json:
        typer.echo(json.dumps({**result.summary(), "report": str(files.report)}))
    else:
        Console(highlight=False).print(result_tables(result))
    console.print(f"report: {files.report} ({time.monotonic() - started:.0f} s in all)")


def _train(files: Files, epochs: int) -> list[str]:
    return ["train", MODEL, "--data", DATA, "--out", str(files.training), "--dtype", "float16", "--epochs", str(epochs)]


def _export(files: Files) -> list[str]:
    return ["export", str(files.training / "checkpoint.pt"), "--repository", str(files.repository), "--name", NAME]


def _certificate(repository: Path) -> Path:
    versions = sorted((repository / NAME).glob("*/certificate.json"), key=lambda path: int(path.parent.name))
    return versions[-1]


def _step(console: Console, number: str, what: str, arguments: Sequence[str]) -> None:
    console.print(f"\n[bold]\\[{number}] {what}[/bold]\n$ halfserve {shlex.join(arguments)}")
    # What the step prints is for the person who watches; standard output stays free for the demo's own result.
    if subprocess.run(_command(arguments), stdout=sys.stderr, check=False, env=_environment()).returncode != 0:
        raise DemoError(f"'halfserve {arguments[0]}' failed; its message is above")


@contextmanager
def _server(console: Console, files: Files) -> Iterator[str]:
    arguments = ["serve", str(files.repository), "--grpc-port", "0", "--json"]
    console.print(f"\n[bold]\\[3/4] serve and ask[/bold]\n$ halfserve {shlex.join(arguments)}")
    with subprocess.Popen(_command(arguments), stdout=subprocess.PIPE, text=True, env=_environment()) as process:
        try:
            ready = _ready_line(cast("IO[str]", process.stdout))
            models = ", ".join(f"{m['name']}/{m['version']} on {m['provider']}, {m['precision']}" for m in ready["models"])
            console.print(f"{models}; gRPC on port {ready['grpc_port']}, ready in {ready['seconds']:.2f} s")
            yield f"{ready['host']}:{ready['grpc_port']}"
        finally:
            process.terminate()


def _ready_line(output: IO[str]) -> dict[str, Any]:
    line = output.readline()
    if not line:
        raise DemoError("'halfserve serve' failed; its message is above")
    ready: dict[str, Any] = json.loads(line)
    return ready


def _command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "halfserve", *arguments]


def _environment() -> dict[str, str]:
    # The steps import this package from wherever it was imported here, installed or not.
    root = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
