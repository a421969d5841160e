"""One optimizer step: forward and loss in autocast, scaled backward, clipping, a step that may be skipped."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from amp_core.calling import call
from amp_core.scaling.parameter_names import parameters_of
from amp_core.training.clipping import clip_gradients
from amp_core.training.log import StepRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from amp_core.casting.autocast import autocast
    from amp_core.scaling.grad_scaler import GradScaler
    from amp_core.training.distributed import World

Batch = tuple[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Training:
    """What one step needs.

    Attributes:
        model: On the training device, its parameters in float32.
        parallel: The model itself, or what runs it so that gradients become the mean over all processes.
        loss: (output, target) -> scalar loss.
        optimizer: Of the model's parameters, all or some.
        scheduler: Of the optimizer; stepped once per step that was not skipped.
        scaler: Enabled for float16 only.
        device: Where the model is.
        dtype: That autocast runs in; float32 where there is none.
        region: The autocast region of forward and loss.
        clip: The largest gradient norm; 0 does not clip.
        world: Which processes train together.
    """

    model: nn.Module
    parallel: nn.Module
    loss: Callable[[Any, Any], Tensor]
    optimizer: Optimizer
    scheduler: LRScheduler
    scaler: GradScaler
    device: torch.device
    dtype: torch.dtype
    region: autocast
    clip: float
    world: World


def train_step(
    training: Training,
    batches: Sequence[Batch],
    *,
    step: int,
    epoch: int,
    recording: Callable[[float], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> StepRecord:
    """Make one step that follows the mean of the batches' losses.

    Where the gradients are not finite the parameters and the learning rate stay as they are.

    Args:
        training: What is trained, with what.
        batches: Pairs (inputs, targets) on the model's device, at least one; each is run and backpropagated on its own.
        step: The number of this step, from 1.
        epoch: The number of its epoch, from 1.
        recording: Is given the scale, and returns what forward, loss and backward run in.
    """
    optimizer, scaler = training.optimizer, training.scaler
    optimizer.zero_grad()
    scale, learning_rate = scaler.get_scale(), float(optimizer.param_groups[0]["lr"])
    with recording(scale):
        loss = _accumulate_gradients(training, batches)
    scaler.unscale_(optimizer)
    # Not the model's: what the optimizer leaves out keeps its gradients, which nobody unscales or clears.
    norm = clip_gradients(parameters_of(optimizer), training.clip or math.inf).item()
    skipped = not _step_and_update(training, norm)
    if not skipped:
        training.scheduler.step()
    return StepRecord(
        step=step,
        epoch=epoch,
        loss=training.world.mean(loss).item(),
        scale=scale,
        skipped=skipped,
        gradient_norm=norm,
        learning_rate=learning_rate,
    )


def _accumulate_gradients(training: Training, batches: Sequence[Batch]) -> Tensor:
    losses = []
    for place, (inputs, targets) in enumerate(batches, start=1):
        with _without_reduction(training.parallel) if place < len(batches) else nullcontext():
            with training.region:
                outputs = call(training.model, inputs, through=training.parallel)
                loss = training.loss(outputs, targets)
            training.scaler.scale(loss / len(batches)).backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach().double())
    return torch.stack(losses).mean()


def _without_reduction(parallel: nn.Module) -> AbstractContextManager[None]:
    if isinstance(parallel, torch.nn.parallel.DistributedDataParallel):
        context: AbstractContextManager[None] = parallel.no_sync()
        return context
    return nullcontext()


def _step_and_update(training: Training, norm: float) -> bool:
    """Step unless a gradient is not finite; returns whether it was done."""
    optimizer, scaler = training.optimizer, training.scaler
    if not scaler.is_enabled():
        if math.isfinite(norm):
            optimizer.step()
        return math.isfinite(norm)
    scaler.step(optimizer)
    scaler.update()
    return not scaler.step_was_skipped
