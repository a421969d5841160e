"""A training run, from factories to a checkpoint that the next stage reads."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import torch

from halfserve.amp_core.checkpoint import Checkpoint, load_checkpoint
from halfserve.amp_core.random_state import preserved_random_state, seed_everything
from halfserve.amp_core.training.components import training_device
from halfserve.amp_core.training.distributed import World
from halfserve.amp_core.training.run import Evaluation, TrainingRun
from halfserve.amp_core.training.run_folder import CHECKPOINT, RunOutputs, locked_folder, require_tensorboard, rewrite_record
from halfserve.amp_core.training.step import ALONE, StepRecord
from halfserve.amp_core.training.training_settings import TrainingError, TrainingSettings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """The result of a run."""

    checkpoint: Path  # the checkpoint file
    metrics: dict[str, float]  # the metrics of the last evaluation: `loss`, and `accuracy` for a classifier
    epochs: int  # the number of complete epochs, including those before a resumption
    steps: int  # the number of attempted steps, including those before a resumption
    skipped_steps: int  # the steps whose gradients overflowed
    scale: float  # the loss scale at the end; 1.0 without scaling
    device: str  # the device of the training
    seconds: float  # the duration of this call


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a run."""

    steps_in_total: int  # the number of steps of the whole run; smaller if a training set without a length ends early
    skipped_steps: int  # the number of skipped steps so far
    record: StepRecord  # the record of the last step


def train(
    settings: TrainingSettings,
    *,
    resume: bool = False,
    world: World = ALONE,
    on_step: Callable[[Progress], None] = lambda _: None,
    on_epoch: Callable[[Evaluation], None] = lambda _: None,
) -> TrainingResult:
    """Train a model; write a line per step and evaluation to `train.jsonl`, and checkpoints to `checkpoint.pt`.

    Equal settings on the same machine give equal results, bit for bit, also if a run was killed and resumed. The process's own
    random state is restored. Nothing in the folder changes before the first step has worked; then a checkpoint of an earlier
    run becomes `checkpoint.previous.pt`, and its weights `model.previous.safetensors`, unless the run resumes from it. Rank 0
    of the processes that train together, inside of `joined_world`, writes the files.

    Raises:
        FactoryError: If the model, data, loss or optimizer cannot be imported or built.
        CheckpointError: If a checkpoint cannot be read or written, or is of another model.
        DataError: If the data cannot be split, read or batched.
        WeightsError: If the weights to start from cannot be read, or are not the model's.
        TrainingError: If the run cannot start or continue.
    """
    started = time.monotonic()
    device = training_device(settings.device, world)
    if settings.tensorboard:
        require_tensorboard()
    path = settings.out / CHECKPOINT
    with (
        locked_folder(settings.out) if world.is_first else nullcontext(),
        preserved_random_state(device),
        torch.backends.cudnn.flags(deterministic=True, benchmark=False),
    ):
        before = world.from_first(load_checkpoint(path) if resume and world.is_first and path.exists() else None)
        if before is not None:
            _check_same_run(settings, before, world)
        seed_everything(settings.seed)
        with TrainingRun(settings, device, world, before) as run:
            _go_through(run, is_new=before is None, on_step=on_step, on_epoch=on_epoch)
    return TrainingResult(
        checkpoint=path,
        metrics=run.metrics,
        epochs=run.epochs_done,
        steps=run.steps_done,
        skipped_steps=run.skipped_steps,
        scale=run.training.scaler.get_scale(),
        device=str(device),
        seconds=time.monotonic() - started,
    )


def _go_through(
    run: TrainingRun, *, is_new: bool, on_step: Callable[[Progress], None], on_epoch: Callable[[Evaluation], None]
) -> None:
    # Before the first step has worked, nothing in the folder changes.
    steps_before, skipped_before, epochs_before = run.steps_done, run.skipped_steps, run.epochs_done
    events = run.events()
    first = next(events, None)
    if first is None:  # the earlier run may have stopped between the checkpoint and the record
        rewrite_record(run)
        return
    run.require_savable()
    with RunOutputs(
        run, is_new=is_new, steps_done=steps_before, skipped_steps=skipped_before, epochs_done=epochs_before
    ) as output:
        for event in chain([first], events):
            if isinstance(event, StepRecord):
                output.write_step(event)
                on_step(Progress(steps_in_total=run.steps_in_total, skipped_steps=run.skipped_steps, record=event))
            else:
                output.write_evaluation(event)
                on_epoch(event)


def _check_same_run(settings: TrainingSettings, checkpoint: Checkpoint, world: World) -> None:
    names = ("model", "data", "dtype", "policy")
    then = checkpoint.settings | {name: getattr(checkpoint, name) for name in names}
    now = settings.to_checkpoint() | {name: getattr(settings, name) for name in names}
    # The defaults of settings that older checkpoints do not contain.
    defaults = {"accumulate": 1, "steps_per_epoch": 0, "optimizer": "torch.optim:AdamW"}
    for name, value in now.items():
        if then.get(name, defaults.get(name)) != value:
            raise TrainingError(
                f"cannot resume: the checkpoint was trained with {name} {then.get(name)!r}, this run has {value!r}; "
                "use the same, or start again without resuming"
            )
    size = then.get("world_size", 1)
    if size != world.size:
        raise TrainingError(
            f"cannot resume: the checkpoint was trained in {_processes(size)}, this run has {_processes(world.size)}; "
            f"start it with torchrun --nproc-per-node {size}"
        )


def _processes(count: object) -> str:
    return "1 process" if count == 1 else f"{count} processes"
