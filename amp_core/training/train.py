"""A training run, from factories to a checkpoint that the next stage reads."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from amp_core.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from amp_core.training.log import StepRecord, TrainLog
from amp_core.training.run import TrainingRun
from amp_core.training.settings import TrainingError, TrainingSettings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What a run came to.

    Attributes:
        checkpoint: The file.
        metrics: Of the last evaluation: `loss`, and `accuracy` for a classifier.
        epochs: Complete ones, those before a resumption included.
        steps: Attempted ones, likewise.
        skipped_steps: Of those, the ones whose gradients overflowed.
        scale: The loss scale at the end; 1.0 where nothing was scaled.
        device: That was trained on.
        seconds: That this call took.
    """

    checkpoint: Path
    metrics: dict[str, float]
    epochs: int
    steps: int
    skipped_steps: int
    scale: float
    device: str
    seconds: float


def train(
    settings: TrainingSettings,
    *,
    resume: bool = False,
    on_step: Callable[[StepRecord], None] = lambda _: None,
    on_epoch: Callable[[int, dict[str, float]], None] = lambda *_: None,
) -> TrainingResult:
    """Train a model, writing `checkpoint.pt` after each epoch and `train.jsonl` after each step into `settings.out`.

    The same settings on the same machine give the same result, bit for bit, whether a run was interrupted and resumed or not.
    The process's own random state is left as it was.

    Args:
        settings: What to train, and how.
        resume: Go on from `checkpoint.pt`, if there is one.
        on_step: Called after each step.
        on_epoch: Called after each epoch with its number, from 1, and its evaluation.

    Raises:
        FactoryError: If the model, data or loss cannot be imported or built.
        CheckpointError: If a checkpoint cannot be read or written.
        TrainingError: If the run cannot start or go on.
    """
    started = time.monotonic()
    device = settings.torch_device()
    path = _prepare_folder(settings) / "checkpoint.pt"
    before = load_checkpoint(path) if resume and path.exists() else None
    if before is not None:
        _check_same_run(settings, before)
    with torch.random.fork_rng(_cuda_devices(device)), torch.backends.cudnn.flags(deterministic=True, benchmark=False):
        torch.manual_seed(settings.seed)
        run = TrainingRun(settings, device, before)
        last = before
        with TrainLog(settings.out / "train.jsonl", keep_epochs=run.epochs_done) as log:
            while run.epochs_done < settings.epochs:
                for record in run.epoch():
                    log.write_step(record)
                    on_step(record)
                last = run.checkpoint()
                log.write_epoch(last.epoch, last.metrics)
                save_checkpoint(path, last)
                on_epoch(last.epoch, last.metrics)
    if last is None:
        raise TrainingError("the run ended before its first epoch did")
    return TrainingResult(
        checkpoint=path,
        metrics=last.metrics,
        epochs=last.epoch,
        steps=last.step,
        skipped_steps=log.skipped_steps,
        scale=run.training.scaler.get_scale(),
        device=str(device),
        seconds=time.monotonic() - started,
    )


def _prepare_folder(settings: TrainingSettings) -> Path:
    try:
        settings.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainingError(f"cannot write into the folder {settings.out}: {error.strerror or error}") from error
    return settings.out


def _check_same_run(settings: TrainingSettings, checkpoint: Checkpoint) -> None:
    then = checkpoint.settings | {name: getattr(checkpoint, name) for name in ("model", "data", "dtype", "policy")}
    now = settings.to_checkpoint() | {name: getattr(settings, name) for name in ("model", "data", "dtype", "policy")}
    for name, value in now.items():
        if then.get(name) != value:
            raise TrainingError(
                f"cannot resume: the checkpoint was trained with {name} {then.get(name)!r}, this run has {value!r}; "
                "use the same, or start again without resuming"
            )


def _cuda_devices(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []
