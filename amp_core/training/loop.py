"""The loop: forward and loss in autocast, scaled backward, clipping, a step that may be skipped, the next learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grad_norm_

from amp_core.training.log import StepRecord
from amp_core.training.settings import TrainingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from amp_core.casting.autocast import autocast
    from amp_core.scaling.grad_scaler import GradScaler


@dataclass(frozen=True, kw_only=True)
class Training:
    """What one step needs.

    Attributes:
        model: On the training device, its parameters in float32.
        loss: (output, target) -> scalar loss.
        optimizer: Of all the model's parameters.
        scheduler: Of the optimizer; stepped once per step that was not skipped.
        scaler: Enabled for float16 only.
        region: The autocast region of forward and loss.
        clip: The largest gradient norm; 0 does not clip.
    """

    model: nn.Module
    loss: Callable[[Any, Any], Tensor]
    optimizer: Optimizer
    scheduler: LRScheduler
    scaler: GradScaler
    region: autocast
    clip: float


def train_epoch(training: Training, batches: Iterable[tuple[Any, Any]], *, epoch: int, first_step: int) -> Iterator[StepRecord]:
    """Go through the batches once.

    Args:
        training: What is trained, with what.
        batches: Pairs (inputs, targets) on the model's device.
        epoch: The number of this epoch, from 1.
        first_step: The number of its first step, from 1.

    Yields:
        A record of each step, after the step.

    Raises:
        TrainingError: If the numbers got out of hand, so that going on is useless.
    """
    training.model.train()
    for step, (inputs, targets) in enumerate(batches, start=first_step):
        yield _train_step(training, inputs, targets, step=step, epoch=epoch)


def _train_step(training: Training, inputs: Any, targets: Any, *, step: int, epoch: int) -> StepRecord:
    optimizer, scaler = training.optimizer, training.scaler
    optimizer.zero_grad()
    with training.region:
        loss = training.loss(training.model(inputs), targets)
    scale, learning_rate = scaler.get_scale(), optimizer.param_groups[0]["lr"]
    scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
    scaler.unscale_(optimizer)
    norm = clip_grad_norm_(training.model.parameters(), training.clip or math.inf).item()
    if not scaler.is_enabled() and not math.isfinite(norm):
        raise TrainingError(f"the gradients of step {step} are not finite (loss {loss.item():g}); try a lower learning rate")
    scaler.step(optimizer)
    skipped = scaler.step_was_skipped
    if skipped:
        _check_hope(training, scale, step)
    scaler.update()
    if not skipped:
        training.scheduler.step()
    return StepRecord(
        step=step,
        epoch=epoch,
        loss=loss.item(),
        scale=scale,
        skipped=skipped,
        gradient_norm=norm,
        learning_rate=learning_rate,
    )


def _check_hope(training: Training, scale: float, step: int) -> None:
    if scale > training.scaler.min_scale:
        return
    names = training.scaler.overflowed_parameters(training.model)
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    raise TrainingError(
        f"at step {step} the gradients of {listed} overflow even at the smallest scale, {scale:g}; "
        "try bfloat16, a lower learning rate, or a policy that keeps the overflowing operations in float32"
    )


def warmup_and_cosine(step: int, total: int) -> float:
    """The share of the highest learning rate at a step: rising over the first twentieth, then half a cosine down to 0.

    Args:
        step: From 0.
        total: Of all steps. Source of the shape: Loshchilov and Hutter, "SGDR", 2017, with a linear warm-up before it.
    """
    warmup = max(1, total // 20)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def to_device(batches: Iterable[Any], device: torch.device) -> Iterator[tuple[Any, Any]]:
    """Move batches of pairs (inputs, targets) to a device, one by one.

    Raises:
        TrainingError: If a batch is no pair of tensors.
    """
    for batch in batches:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not all(isinstance(part, torch.Tensor) for part in batch):
            raise TrainingError("the data's items must be pairs (input, target) of tensors or numbers")
        inputs, targets = batch
        yield inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
