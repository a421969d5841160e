"""`halfserve train`."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from amp_core.checkpoint import CheckpointError
from amp_core.factory import FactoryError
from amp_core.policy import PolicyError
from amp_core.training.settings import TrainingError, TrainingSettings
from amp_core.training.train import TrainingResult
from amp_core.training.train import train as run_training

EXIT_CODES: dict[type[Exception], int] = {FactoryError: 2, PolicyError: 2, TrainingError: 1, CheckpointError: 1}


class Dtype(StrEnum):
    """The low-precision dtype, or none."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


def train(
    model: Annotated[str, typer.Argument(help="MODULE:FACTORY of a function that returns the torch.nn.Module.")],
    data: Annotated[str, typer.Option(help="MODULE:FACTORY of a function that returns (training set, held-out set).")],
    out: Annotated[Path, typer.Option(help="Folder for checkpoint.pt and train.jsonl.")],
    loss: Annotated[
        str, typer.Option(help="MODULE:FUNCTION (output, target) -> scalar.")
    ] = "torch.nn.functional:cross_entropy",
    dtype: Annotated[Dtype, typer.Option(help="float16 scales the loss; float32 trains without autocast.")] = Dtype.FLOAT16,
    epochs: Annotated[int, typer.Option(min=1)] = 20,
    batch_size: Annotated[int, typer.Option(min=1)] = 64,
    learning_rate: Annotated[float, typer.Option(help="The highest, of a warm-up and a cosine.")] = 3e-3,
    clip: Annotated[float, typer.Option(min=0.0, help="Largest gradient norm; 0 does not clip.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    policy: Annotated[
        str, typer.Option(help="Which operation runs in which dtype: native, cuda, cuda+fp32:einsum,...")
    ] = "native",
    resume: Annotated[bool, typer.Option("--resume", help="Go on from OUT/checkpoint.pt, if there is one.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and no progress.")] = False,
) -> None:
    """Train a PyTorch model in mixed precision, and write a checkpoint that `halfserve export` reads.

    Example: halfserve train examples.digits.model:model --data examples.digits.data:data --out runs/digits

    Exit codes: 0 done, 1 the run cannot start or go on, 2 wrong usage.
    """
    settings = TrainingSettings(
        model=model,
        data=data,
        out=out,
        loss=loss,
        dtype=str(dtype),
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        clip=clip,
        seed=seed,
        device=device,
        policy=policy,
    )
    result = run_training(settings, resume=resume) if as_json else _train_with_progress(settings, resume=resume)
    if as_json:
        typer.echo(json.dumps(_summary(result, settings)))
    else:
        typer.echo(_sentence(result, settings))


def _train_with_progress(settings: TrainingSettings, *, resume: bool) -> TrainingResult:
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("epochs {task.fields[state]}"),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("training", total=settings.epochs, state="")

        def show(epoch: int, metrics: dict[str, float]) -> None:
            state = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            progress.update(task, completed=epoch, state=state)

        return run_training(settings, resume=resume, on_epoch=show)


def _summary(result: TrainingResult, settings: TrainingSettings) -> dict[str, object]:
    return {
        "checkpoint": str(result.checkpoint),
        "accuracy": result.metrics.get("accuracy"),
        "evaluation_loss": result.metrics["loss"],
        "epochs": result.epochs,
        "steps": result.steps,
        "skipped_steps": result.skipped_steps,
        "scale": result.scale,
        "dtype": settings.dtype,
        "policy": settings.policy,
        "device": result.device,
        "seconds": round(result.seconds, 3),
    }


def _sentence(result: TrainingResult, settings: TrainingSettings) -> str:
    accuracy = result.metrics.get("accuracy")
    quality = f"loss {result.metrics['loss']:.4f}" if accuracy is None else f"accuracy {accuracy:.2%}"
    return (
        f"{quality} on held-out data after {result.epochs} epochs "
        f"in {settings.dtype} on {result.device}, {result.seconds:.1f} s;\n"
        f"{result.skipped_steps} of {result.steps} steps skipped, scale {result.scale:g}\n{result.checkpoint}"
    )
