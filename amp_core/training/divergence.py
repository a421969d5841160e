"""Stops a run with non-finite numbers, and diagnoses the first cause."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from halfserve.amp_core.autocast.autocast import autocast
from halfserve.amp_core.calling import call
from halfserve.amp_core.random_state import preserved_random_state
from halfserve.amp_core.training.step import Batch, StepRecord, Training
from halfserve.amp_core.training.training_settings import TrainingError

_LISTED = 3


def diagnose(training: Training, batches: Sequence[Batch]) -> str | None:
    """Find the first non-finite values, in inputs, layers, loss and gradients, by running the batches again.

    Weights, buffers and random generators are restored; gradients are cleared. Layers that draw random numbers (dropout) draw
    others than in the step itself. Returns the cause and the advice, for the middle of a sentence; None if all is finite at the
    smallest loss scale.
    """
    with preserved_random_state(training.device), _kept_buffers(training.model):
        for batch in batches:
            found = _in_forward(training, batch) or _in_backward(training, batch)
            if found:
                return found
    return None


@dataclass
class _FirstNonFinite:
    """Forward hooks on every module of a model; children finish before their parents."""

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
    """Return whether no tensor in a value, also in tuples, lists and dicts, contains an infinity or a NaN."""
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


_UNKNOWN = "gradients are not finite; try a lower learning rate"


class DivergenceWatch:
    """Checks every step's record, at no cost, and diagnoses the model only after bad steps.

    A step is bad if it was skipped or its loss is not finite. Skipped steps are part of finding the loss scale, so the watch
    waits for `patience` of them in a row. Then the last batch is diagnosed: if its forward pass or its loss is not finite, or
    its gradients are not even at the smallest scale, no scale can help and the run ends; else the run continues, with another
    diagnosis after as many further bad steps. Without a scale a gradient that is not finite ends the run at once.
    """

    def __init__(self, training: Training, patience: int) -> None:
        self._training, self._patience = training, patience
        self._bad_in_a_row = 0
        self._last_bad: tuple[StepRecord, Sequence[Batch]] | None = None

    def look(self, record: StepRecord, batches: Sequence[Batch]) -> None:
        """Check a step.

        Raises:
            TrainingError: If the run has diverged; names the layer or the parameters.
        """
        if not is_bad(record):
            self._bad_in_a_row, self._last_bad = 0, None
            return
        self._bad_in_a_row, self._last_bad = self._bad_in_a_row + 1, (record, batches)
        scaler = self._training.scaler
        must_stop = not scaler.is_enabled() or (record.skipped and record.scale <= scaler.min_scale)
        if must_stop or self._bad_in_a_row % self._patience == 0:
            self._stop_if_hopeless(record, batches, otherwise=_UNKNOWN if must_stop else None)

    def look_at_evaluation(self, metrics: dict[str, float]) -> None:
        """Check an evaluation: a non-finite loss right after a bad step means that the model is lost.

        Raises:
            TrainingError: If the model is lost.
        """
        if self._last_bad is not None and not math.isfinite(metrics["loss"]):
            otherwise = f"the loss on held-out data is {metrics['loss']:g} too; try a lower learning rate"
            self._stop_if_hopeless(*self._last_bad, otherwise=otherwise)

    def _stop_if_hopeless(self, record: StepRecord, batches: Sequence[Batch], *, otherwise: str | None) -> None:
        # The cause may be in one process's batch alone; all processes must come to the same verdict.
        found = self._training.world.gather(diagnose(self._training, batches))
        cause = next((verdict for verdict in found if verdict is not None), otherwise)
        if cause is not None:
            raise TrainingError(f"training diverged: {self._when(record)}: {cause}")

    def _when(self, record: StepRecord) -> str:
        if self._bad_in_a_row == 1:
            return f"step {record.step} (loss {record.loss:g}, learning rate {record.learning_rate:g})"
        return (
            f"steps {record.step - self._bad_in_a_row + 1} to {record.step} were all skipped or without a finite loss "
            f"(now loss {record.loss:g}, scale {record.scale:g}, learning rate {record.learning_rate:g})"
        )


def is_bad(record: StepRecord) -> bool:
    """Return whether a step was skipped or had a loss that is not finite."""
    return record.skipped or not math.isfinite(record.loss)
