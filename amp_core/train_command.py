"""`halfserve train`."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from halfserve.amp_core.checkpoint import CheckpointError
from halfserve.amp_core.data import DataError
from halfserve.amp_core.factory import FactoryError
from halfserve.amp_core.policy import PolicyError
from halfserve.amp_core.recorder import Record, table
from halfserve.amp_core.training.distributed import World, joined_world
from halfserve.amp_core.training.run import Evaluation
from halfserve.amp_core.training.run_folder import RECORD
from halfserve.amp_core.training.train import Progress as TrainingProgress
from halfserve.amp_core.training.train import TrainingResult
from halfserve.amp_core.training.train import train as run_training
from halfserve.amp_core.training.training_settings import KEPT, PeerError, TrainingError, TrainingOptions, TrainingSettings
from halfserve.amp_core.weights.file_kinds import WeightsError
from halfserve.option_groups import takes_option_groups

Callbacks = tuple["Callable[[TrainingProgress], None]", "Callable[[Evaluation], None]"]


@contextmanager
def show_progress(settings: TrainingSettings) -> Iterator[Callbacks]:
    """Show a bar on standard error that moves with each step or, without a terminal, print a line per epoch.

    Yields the callbacks for each step and for each epoch.
    """
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield (lambda _: None), (lambda evaluation: console.print(_line(evaluation, settings), soft_wrap=True))
        return
    columns = (
        TextColumn("training"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        yield _callbacks(bar, bar.add_task("training", total=None, state=""), settings)


def _callbacks(bar: Progress, task: TaskID, settings: TrainingSettings) -> Callbacks:
    def on_step(progress: TrainingProgress) -> None:
        record = progress.record
        state = f"steps, loss {record.loss:.4f}, scale {record.scale:g}, {progress.skipped_steps} skipped"
        bar.update(task, total=progress.steps_in_total, completed=record.step, state=state)

    def on_epoch(evaluation: Evaluation) -> None:
        bar.console.print(_line(evaluation, settings), soft_wrap=True)

    return on_step, on_epoch


def _line(evaluation: Evaluation, settings: TrainingSettings) -> str:
    figures = ", ".join(
        f"{name} {value:.2%}" if name == "accuracy" else f"{name} {value:.4f}" for name, value in evaluation.metrics.items()
    )
    return f"epoch {evaluation.epoch}/{settings.epochs}: {figures} on held-out data"


EXIT_CODES: dict[type[Exception], int] = {
    FactoryError: 2, PolicyError: 2, TrainingError: 1, CheckpointError: 1, DataError: 1, WeightsError: 1
}  # fmt: skip


@takes_option_groups
def train(
    options: TrainingOptions,
    *,
    resume: Annotated[
        bool, typer.Option("--resume", rich_help_panel=KEPT, help="Continue from OUT/checkpoint.pt, if there is one.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and no progress.")] = False,
) -> None:
    """Train a PyTorch model in mixed precision, and write a checkpoint that `halfserve export` reads.

    Example: halfserve train halfserve.examples.digits.model:model --data halfserve.examples.digits.data:data --out runs/digits

    On several GPUs: torchrun --nproc-per-node 2 -m halfserve train ...

    A run that was killed goes on with --resume, and ends as if it had not been killed. A new run in a folder that holds a
    checkpoint renames it to checkpoint.previous.pt, and model.safetensors to model.previous.safetensors.

    Exit codes: 0 done, 1 the run cannot start or go on, 2 wrong usage.
    """
    try:
        with joined_world() as world:
            settings = TrainingSettings(**vars(options))
            _train(settings, world, resume=resume, as_json=as_json)
    except PeerError:
        sys.exit(1)  # the process that failed first has said why


def _train(settings: TrainingSettings, world: World, *, resume: bool, as_json: bool) -> None:
    if as_json or not world.is_first:
        result = run_training(settings, resume=resume, world=world)
    else:
        with show_progress(settings) as (on_step, on_epoch):
            result = run_training(settings, resume=resume, world=world, on_step=on_step, on_epoch=on_epoch)
    if not world.is_first:
        return
    if as_json:
        typer.echo(json.dumps(_summary(result, settings, world)))
        return
    if settings.record:
        _print_record(settings.out)
    typer.echo(_sentence(result, settings, world))


def _summary(result: TrainingResult, settings: TrainingSettings, world: World) -> dict[str, object]:
    return {
        "checkpoint": str(result.checkpoint),
        "accuracy": result.metrics.get("accuracy"),
        "evaluation_loss": _finite(result.metrics["loss"]),
        "epochs": result.epochs,
        "steps": result.steps,
        "skipped_steps": result.skipped_steps,
        "scale": result.scale,
        "dtype": settings.dtype,
        "policy": settings.policy,
        "device": result.device,
        "processes": world.size,
        "seconds": round(result.seconds, 3),
    }


def _finite(value: float) -> Any:
    return value if math.isfinite(value) else None


def _sentence(result: TrainingResult, settings: TrainingSettings, world: World) -> str:
    accuracy = result.metrics.get("accuracy")
    quality = f"loss {result.metrics['loss']:.4f}" if accuracy is None else f"accuracy {accuracy:.2%}"
    processes = f", {world.size} processes" if world.size > 1 else ""
    return (
        f"{quality} on held-out data after {result.epochs} epochs "
        f"in {settings.dtype} on {result.device}{processes}, {result.seconds:.1f} s;\n"
        f"{result.skipped_steps} of {result.steps} steps skipped, scale {result.scale:g}\n{result.checkpoint}"
    )


def _print_record(folder: Path) -> None:
    path = folder / RECORD
    if path.exists():
        Console().print(table(Record.from_dict(json.loads(path.read_text(encoding="utf-8"))), limit=12))
