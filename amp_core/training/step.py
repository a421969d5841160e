"""One optimizer step (autocast, scaled backward, clipping, perhaps skipped) and one evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from halfserve.amp_core.autocast.autocast import autocast
from halfserve.amp_core.calling import call, without_fast_path
from halfserve.amp_core.grad_scaler.grad_scaler import GradScaler
from halfserve.amp_core.grad_scaler.optimizers import dense, parameters_of
from halfserve.amp_core.training.distributed import World

Batch = tuple[Any, Any]  # (inputs, targets)
ALONE = World()


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step."""

    step: int  # counted from 1 over the whole run, skipped steps included
    epoch: int  # counted from 1
    loss: float  # the loss of the batch, unscaled
    scale: float  # the loss scale; 1.0 without scaling
    skipped: bool  # whether the gradients overflowed, so that the parameters stayed as they were
    gradient_norm: float  # the norm of all gradients of the optimizer together, unscaled, before clipping
    learning_rate: float  # the learning rate of the step


def clip_gradients(parameters: Iterable[Tensor], largest: float) -> Tensor:
    """Scale all gradients down so that their total norm does not exceed a limit; returns the norm before, a scalar.

    Sparse gradients of embeddings are supported, unlike in torch's `clip_grad_norm_`. Infinity leaves the gradients unchanged.
    """
    with_gradients = [parameter for parameter in parameters if parameter.grad is not None]
    if not any(parameter.grad.is_sparse for parameter in with_gradients):  # type: ignore[union-attr]  # (see the line above)
        return clip_grad_norm_(with_gradients, largest)
    values = [_coalesced(parameter) for parameter in with_gradients]
    norm = get_total_norm(values)
    torch._foreach_mul_(values, torch.clamp(largest / (norm + 1e-6), max=1.0))
    return norm


def _coalesced(parameter: Tensor) -> Tensor:
    # Duplicate rows count as their sum, as in a dense gradient.
    gradient = parameter.grad
    assert gradient is not None  # noqa: S101  (for the type checker: only those with gradients are asked)
    if gradient.is_sparse and not gradient.is_coalesced():
        gradient = parameter.grad = gradient.coalesce()
    return dense(gradient)


_LAYERS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d
)  # fmt: skip


class RunningStatistics:
    """Restores the running statistics of normalization layers after a step that overflowed in forward.

    BatchNorm writes its averages in forward, even where the step is then skipped, and an infinity never leaves a mean.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = [module for module in model.modules() if isinstance(module, _LAYERS)]
        self._kept: list[Tensor] = []

    def keep(self) -> None:
        """Remember the statistics, before a step."""
        self._kept = [buffer.clone() for buffer in self._buffers()]

    def undo_if_not_finite(self) -> None:
        """Restore the statistics if one is not finite, after a bad step."""
        now = self._buffers()
        if any(not torch.isfinite(buffer).all() for buffer in now):
            for buffer, before in zip(now, self._kept, strict=True):
                buffer.copy_(before)

    def _buffers(self) -> list[Tensor]:
        return [buffer for layer in self._layers for buffer in layer.buffers(recurse=False)]


@dataclass(frozen=True, kw_only=True)
class Training:
    """The components of a step."""

    model: nn.Module  # the model on the training device, with parameters in float32
    parallel: nn.Module  # the model itself, or a wrapper that averages the gradients over all processes
    loss: Callable[[Any, Any], Tensor]  # (output, target) -> scalar loss
    optimizer: Optimizer  # the optimizer of all or some of the model's parameters
    scheduler: LRScheduler  # the optimizer's scheduler; stepped once per step that was not skipped
    scaler: GradScaler  # enabled for float16 only
    device: torch.device  # the model's device
    dtype: torch.dtype  # the dtype of autocast; float32 without autocast
    region: autocast  # the autocast region of forward and loss
    clip: float  # the largest gradient norm; 0 does not clip
    world: World  # the processes that train together


def train_step(
    training: Training,
    batches: Sequence[Batch],
    *,
    step: int,
    epoch: int,
    recording: Callable[[float], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> StepRecord:
    """Make one step along the mean of the batches' losses; `step` and `epoch` count from 1.

    If the gradients are not finite, the parameters and the learning rate stay as they are. The batches, one at least, are on
    the model's device; each is run and backpropagated on its own, in the context that `recording` makes of the loss scale.
    """
    optimizer, scaler = training.optimizer, training.scaler
    optimizer.zero_grad()
    scale, learning_rate = scaler.get_scale(), float(optimizer.param_groups[0]["lr"])
    with recording(scale):
        loss = _accumulate_gradients(training, batches)
    scaler.unscale_(optimizer)
    # Only the optimizer's parameters: those outside of it keep gradients that are neither unscaled nor cleared.
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
    """Step unless a gradient is not finite; returns whether the step was made."""
    optimizer, scaler = training.optimizer, training.scaler
    if not scaler.is_enabled():
        if math.isfinite(norm):
            optimizer.step()
        return math.isfinite(norm)
    scaler.step(optimizer)
    scaler.update()
    return not scaler.step_was_skipped


def evaluate(
    model: nn.Module,
    loss_function: Callable[[Any, Any], Tensor],
    batches: Iterable[tuple[Any, Any]],
    region: AbstractContextManager[Any],
    *,
    world: World = ALONE,
) -> dict[str, float]:
    """Run a model over held-out data, without gradients; its mode is restored.

    Attention layers compute what they compute in training (see `without_fast_path`). The first dimension of all tensors of a
    batch counts its items. `region` is the context of forward and loss, entered once per batch. Each process of the world has a
    share of the data.

    Returns:
        `loss`, the mean over all processes' items; and for a classifier (outputs of shape (n, classes), integer targets of
        shape (n,)) `accuracy`, the share of items whose largest output is the target's. Empty if there are no items.
    """
    was_training = model.training
    model.eval()
    items, correct, others, loss_sum = 0, 0, 0, 0.0
    with torch.no_grad(), without_fast_path():
        for inputs, targets in batches:
            with region:
                outputs = call(model, inputs)
                loss = loss_function(outputs, targets)
            count = _count((targets, inputs))
            if count is None:
                raise ValueError("no tensor among targets and inputs has a dimension, to count the items by")
            items += count
            loss_sum += loss.item() * count
            if _is_classification(outputs, targets):
                correct += int((outputs.argmax(1) == targets).sum())
            else:
                others += 1
    model.train(was_training)
    return _metrics(world.sum(torch.tensor([items, correct, others, loss_sum], dtype=torch.float64)).tolist())


def _metrics(sums: list[float]) -> dict[str, float]:
    items, correct, others, loss = sums
    if items == 0:
        return {}
    metrics = {"loss": loss / items}
    return metrics if others else metrics | {"accuracy": correct / items}


def _count(value: Any) -> int | None:
    """Return the number of items of a batch, by the first of its tensors that has a dimension; None if none has."""
    if isinstance(value, torch.Tensor):
        return len(value) if value.ndim else None
    parts = value.values() if isinstance(value, dict) else value
    return next((count for part in parts if (count := _count(part)) is not None), None)


def _is_classification(outputs: Any, targets: Any) -> bool:
    return (
        isinstance(outputs, torch.Tensor)
        and isinstance(targets, torch.Tensor)
        and outputs.ndim == 2
        and targets.ndim == 1
        and not targets.is_floating_point()
    )
