"""What went wrong first: a batch is run once more and every layer's output looked at."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from amp_core.calling import call
from amp_core.casting.autocast import autocast
from amp_core.training.random_state import kept_random_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from amp_core.training.step import Batch, Training

_LISTED = 3


def diagnose(training: Training, batches: Sequence[Batch]) -> str | None:
    """Find what is not finite, looking at inputs, layers, loss and gradients in this order.

    Weights, buffers and random generators are left as they are; gradients are cleared. Layers that draw random numbers
    (dropout) draw others than in the step itself.

    Args:
        training: What is trained.
        batches: Of a step that went wrong.

    Returns:
        What was found and what to do, for the middle of a sentence; None if all is finite at the smallest loss scale.
    """
    with kept_random_state(training.device), _kept_buffers(training.model):
        for batch in batches:
            found = _in_forward(training, batch) or _in_backward(training, batch)
            if found:
                return found
    return None


@dataclass
class _FirstNonFinite:
    """Forward hooks on every module of a model; children are done before the modules that they are in."""

    layer: str | None = None
    handles: list[Any] = field(default_factory=list)

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        for name, module in model.named_modules():
            self.handles.append(module.register_forward_hook(partial(self._look, name)))
        try:
            yield
        finally:
            for handle in self.handles:
                handle.remove()

    def _look(self, name: str, module: nn.Module, _inputs: Any, output: Any) -> None:
        if self.layer is None and not is_finite(output):
            self.layer = _described(name, module)


def _in_forward(training: Training, batch: Batch) -> str | None:
    inputs, targets = batch
    for name, values in (("inputs", inputs), ("targets", targets)):
        if not is_finite(values):
            return f"the {name} of the batch hold inf or NaN; look at the data"
    watch = _FirstNonFinite()
    with torch.no_grad(), watch.watching(training.model):
        loss = _loss(training, batch, training.region)
    if watch.layer is not None:
        return f"in forward {watch.layer} is the first that is not finite; {_advice(training, batch)}"
    if not is_finite(loss):
        return f"all layers' outputs are finite, and the loss function returns {loss.item():g}; {_advice(training, batch)}"
    return None


def _in_backward(training: Training, batch: Batch) -> str | None:
    scaler, model = training.scaler, training.model
    loss = _loss(training, batch, training.region)
    model.zero_grad()
    (loss * scaler.min_scale if scaler.is_enabled() else loss).backward()  # type: ignore[no-untyped-call]
    names = [name for name, parameter in model.named_parameters() if not is_finite(parameter.grad)]
    model.zero_grad()
    if not names:
        return None
    listed = ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
    scale = f" even at the smallest scale, {scaler.min_scale:g}" if scaler.is_enabled() else ""
    return (
        f"forward is finite, but the gradients of {listed} are not{scale}; try a lower learning rate, another loss function"
        + ("" if training.dtype is torch.float32 else ", or float32 for the operations that overflow, by a policy")
    )


def _advice(training: Training, batch: Batch) -> str:
    if training.dtype is torch.float32:
        return "try a lower learning rate"
    full = autocast(training.device.type, enabled=False)
    watch = _FirstNonFinite()
    with torch.no_grad(), watch.watching(training.model):
        loss = _loss(training, batch, full)
    if watch.layer is None and is_finite(loss):
        return "in float32 it is finite: try bfloat16, or a policy that keeps the operation in float32"
    return "it is not finite in float32 either: try a lower learning rate"


def _loss(training: Training, batch: Batch, region: AbstractContextManager[Any]) -> Tensor:
    inputs, targets = batch
    loss: Callable[[Any, Any], Tensor] = training.loss
    with region:
        return loss(call(training.model, inputs), targets)


def is_finite(value: Any) -> bool:
    """Whether no tensor in a value, or in the tuples, lists and dicts that it is made of, holds an infinity or a NaN."""
    if isinstance(value, Tensor):
        has_fractions = value.is_floating_point() or value.is_complex()
        return not has_fractions or bool(torch.isfinite(value.coalesce().values() if value.is_sparse else value).all())
    if isinstance(value, dict):
        return all(map(is_finite, value.values()))
    return not isinstance(value, (tuple, list)) or all(map(is_finite, value))


def _described(name: str, module: nn.Module) -> str:
    largest = max(
        (parameter.detach().abs().max().item() for parameter in module.parameters(recurse=False) if parameter.numel()),
        default=0.0,
    )
    weights = f", whose weights reach {largest:.3g}," if largest > 1e3 else ""
    return f"the output of {name or 'the model itself'} ({type(module).__name__}){weights}"


@contextmanager
def _kept_buffers(model: nn.Module) -> Iterator[None]:
    before = [buffer.clone() for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(model.buffers(), before, strict=True):
                buffer.copy_(value)
