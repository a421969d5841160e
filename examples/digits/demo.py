"""`halfserve demo`: the whole pipeline on handwritten digits, each command in its own process."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Annotated, Any, cast

import typer
from rich.console import Console

from halfserve.serve.benchmark import BenchmarkArgumentError
from halfserve.serve.benchmark.level import Load, parse_concurrencies

MODEL, DATA, NAME = "halfserve.examples.digits.model:model", "halfserve.examples.digits.data:data", "digits"
ROWS_PER_REQUEST = 16
COMPARED_IN_FLIGHT = 16
ROUNDS = 5


def ask_held_out(address: str, model: str, data: str) -> float:
    """Accuracy (a fraction) over gRPC of the model served at "host:port" on the held-out images of `data`, MODULE:FACTORY."""
    # Imported late: torch takes seconds to load, and `--help` and usage errors do not need it.
    import numpy as np  # noqa: PLC0415  (see above)

    from halfserve import Client  # noqa: PLC0415  (see above)
    from halfserve.amp_core.factory import call_factory  # noqa: PLC0415  (see above)

    _, held_out = call_factory(data)
    images = np.stack([np.asarray(image) for image, _ in held_out])
    labels = np.array([int(label) for _, label in held_out])
    with Client(address) as client:
        (taken,) = client.model_metadata(model).inputs
        answers = [
            next(iter(client.infer(model, {taken.name: images[start : start + ROWS_PER_REQUEST].astype(np.float16)}).values()))
            for start in range(0, len(images), ROWS_PER_REQUEST)
        ]
    return float((np.concatenate(answers).argmax(axis=1) == labels).mean())


class DemoError(Exception):
    """A step of the demo failed; its own message is above this line."""


EXIT_CODES: dict[type[Exception], int] = {BenchmarkArgumentError: 2, DemoError: 1, OSError: 1}


class DemoFiles:
    """The files of the demo, below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.training, self.repository = folder / "training", folder / "repository"
        self.bench, self.report = folder / "bench.json", folder / "report.html"

    @property
    def version(self) -> Path:
        """The folder of the model's latest version."""
        return max((self.repository / NAME).glob("*/certificate.json"), key=lambda path: int(path.parent.name)).parent


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
    """Train a digits classifier in fp16, export it with proof, serve it over gRPC, ask it, and measure it in each precision.

    Example: halfserve demo --out runs/demo
    """
    # Soft wrap, so that printed commands can be copied.
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    started = time.monotonic()
    parse_concurrencies(concurrency)  # before the work, not after it
    # Imported late: torch and ONNX take seconds to load, and `--help` and usage errors do not need them.
    from halfserve.examples.digits.report import (  # noqa: PLC0415  (see above)
        DemoResult,
        result_tables,
        why_no_bf16,
        write_report,
    )
    from halfserve.serve.backends.openvino.fitness import computed_halves, processor_name  # noqa: PLC0415  (see above)

    files = DemoFiles(out)
    files.folder.mkdir(parents=True, exist_ok=True)
    train = ["train", MODEL, "--data", DATA, "--out", str(files.training), "--dtype", "float16", "--epochs", str(epochs)]
    _step(console, "1/5", "train in fp16", train)
    export = ["export", str(files.training / "checkpoint.pt"), "--repository", str(files.repository), "--name", NAME]
    export += ["--precisions", "float16,bfloat16", "--fp32-twin"]
    _step(console, "2/5", "convert to fp16, compare fp16 and bf16 with fp32, write the repository", export)
    console.print("\n[bold]\\[3/5] serve and ask[/bold]")
    with _server(console, str(files.repository)) as (address, _):
        served_accuracy = ask_held_out(address, NAME, DATA)
        bench = ["bench", NAME, "--address", address, "--concurrency", concurrency, "--seconds", str(seconds)]
        bench += ["--output", str(files.bench)]
        _step(console, "4/5", "measure throughput and latency", bench)
    console.print(f"\n[bold]\\[5/5] serve it in each precision, {COMPARED_IN_FLIGHT} requests in flight[/bold]")
    served = {"fp32": [str(files.version / "fp32" / "model.onnx"), "--cpu-precision", "float32"]}
    served["fp16"] = [str(files.repository), "--cpu-precision", "float32"]
    halves, openvino = computed_halves(), find_spec("openvino") is not None
    if "bf16" in halves and openvino:
        served["fp16, bf16 proved"] = [str(files.repository), "--cpu", "--cpu-precision", "bfloat16"]
    result = DemoResult.read(
        training=files.training,
        certificate=files.version / "certificate.json",
        bench=files.bench,
        served_accuracy=served_accuracy,
        processor=processor_name(),
        precisions=_compared(console, served, seconds),
        no_bf16=why_no_bf16(processor_name(), halves, openvino=openvino),
    )
    write_report(files.report, result)
    if as_json:
        typer.echo(json.dumps({**result.summary(), "report": str(files.report)}))
    else:
        Console(highlight=False).print(result_tables(result))
    console.print(f"report: {files.report} ({time.monotonic() - started:.0f} s in all)")


def _compared(console: Console, served: Mapping[str, Sequence[str]], seconds: float) -> list[dict[str, Any]]:
    """Accuracy, rate and latency of servers with these options, beside the first; loaded in turns: noise falls on all."""
    from halfserve.serve.benchmark.comparison import compare  # noqa: PLC0415  (as in `ask_held_out`)
    from halfserve.serve.benchmark.load_target import LoadTarget, RequestSettings  # noqa: PLC0415  (as above)
    from halfserve.serve.benchmark.measurement import Measurement, measure  # noqa: PLC0415  (as above)

    how = Measurement(seconds=seconds / ROUNDS, warmup_s=0.2)
    with ExitStack() as stack:
        running = [stack.enter_context(_server(console, *options)) for options in served.values()]
        models = [ready["models"][0] for _, ready in running]
        pairs = [(address, model["name"]) for (address, _), model in zip(running, models, strict=True)]
        accuracies = [ask_held_out(*pair, DATA) for pair in pairs]
        targets = [stack.enter_context(LoadTarget(address, [name], RequestSettings())) for address, name in pairs]
        load = Load(concurrency=COMPARED_IN_FLIGHT)
        lines = compare(list(served), load, ROUNDS, lambda number, load: measure(targets[number].bench, load, how))
        return [
            {
                "file": line.name,
                "computed_in": model["precision"],
                "accuracy": accuracy,
                "requests_per_second": line.per_second.median,
                "rate_ratio": line.rate_ratio.median,
                "p99_ms": line.p99_ms.median,
            }
            for line, model, accuracy in zip(lines, models, accuracies, strict=True)
        ]


def _step(console: Console, number: str, what: str, arguments: Sequence[str]) -> None:
    console.print(f"\n[bold]\\[{number}] {what}[/bold]\n$ halfserve {shlex.join(arguments)}")
    # The step prints to standard error; standard output is for the demo's own result.
    if subprocess.run(_command(arguments), stdout=sys.stderr, check=False, env=_environment()).returncode != 0:
        raise DemoError(f"'halfserve {arguments[0]}' failed; its message is above")


@contextmanager
def _server(console: Console, *options: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Address and ready line of a server."""
    arguments = ["serve", *options, "--grpc-port", "0", "--http-port", "0", "--json"]
    console.print(f"$ halfserve {shlex.join(arguments)}")
    with subprocess.Popen(_command(arguments), stdout=subprocess.PIPE, text=True, env=_environment()) as process:
        try:
            line = cast("IO[str]", process.stdout).readline()
            if not line:
                raise DemoError("'halfserve serve' failed; its message is above")
            ready = json.loads(line)
            models = ", ".join(f"{m['name']}/{m['version']} on {m['provider']}, {m['precision']}" for m in ready["models"])
            console.print(f"{models}; gRPC on port {ready['grpc_port']}, ready in {ready['seconds']:.2f} s")
            yield f"{ready['host']}:{ready['grpc_port']}", ready
        finally:
            process.terminate()


def _command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "halfserve", *arguments]


def _environment() -> dict[str, str]:
    # The steps import the same copy of this package, installed or not.
    root = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
