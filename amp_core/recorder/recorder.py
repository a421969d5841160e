"""What records a training loop: one step in many, and nothing at all in between."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn

from amp_core.recorder.compiled_code import WARNING, is_compiled, uncompiled
from amp_core.recorder.module_hooks import hooked
from amp_core.recorder.module_spans import ModuleSpans
from amp_core.recorder.observations import Observations
from amp_core.recorder.observer import Observer
from amp_core.recorder.record import Record, merge

_NOT_RECORDED = nullcontext()


class Recorder:
    """Records which operation of a model's training really ran in which dtype, and the range of what it gave out.

        recorder = Recorder(model, every=200)
        for step, (inputs, targets) in enumerate(batches, start=1):
            with recorder.step(step, scale=scaler.get_scale()):
                with autocast("cuda"):
                    loss = criterion(model(inputs), targets)
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        rich.print(table(recorder.record()))

    Steps 1, 1 + every, 1 + 2 * every, ... are recorded; on the others `step` does nothing. What is recorded changes no number:
    losses, gradients and random draws are those of an unrecorded step, unless the model is compiled (a warning says so once).
    No tensor is kept. On an accelerator nothing waits for the device before the record is asked for.

    Of what runs as one of torch's composites, a handful goes another way when it is watched and differs in that step:
    `linalg.svdvals`, `eigvalsh`, `cond` and the nuclear norm by rounding, `bilinear` under the policy `cuda` in value, and
    `pinverse` in dtype (bfloat16 for float32).

    What cannot be seen: threads that the step starts itself (`DataParallel`'s replicas), ranges of tensors without values
    (meta, fake) or whose layout hides them, integers, the functions that `torch.cond`, `scan` and their like
    take. Where forward was run on an accelerator and backward makes a graph of its own (`create_graph=True`), operations of the
    second backward may be put down to another module.

    Args:
        model: The model itself, whose modules give the operations their places; without what runs it in several processes.
        every: In steps, from 1.

    Raises:
        ValueError: If `every` is below 1.
    """

    def __init__(self, model: nn.Module, *, every: int = 200) -> None:
        if every < 1:
            raise ValueError(f"every is {every}; expected a number of steps from 1")
        self._model, self._every = model, every
        self._before, self._seen, self._steps = Record(), Observations(), 0
        self._is_recording = self._has_warned = False

    def step(self, step: int, *, scale: float = 1.0) -> AbstractContextManager[None]:
        """What a step's forward, loss and backward run in.

        Args:
            step: The step's number, from 1.
            scale: What its loss is multiplied with, so that the range of its gradients can be given without.

        Returns:
            A context manager that records, if it is this step's turn. Entered within another one of this recorder, it raises
            RuntimeError.

        Raises:
            ValueError: If `step` is below 1, or `scale` is no positive finite number.
        """
        if step < 1:
            raise ValueError(f"step is {step}; expected the number of a step, counted from 1")
        if not 0 < scale < math.inf:
            raise ValueError(f"scale is {scale}; expected what the loss is multiplied with: a positive finite number")
        return _NOT_RECORDED if (step - 1) % self._every else self._recording(float(scale))

    def record(self) -> Record:
        """Everything recorded so far; waits for the devices."""
        entries = merge((*self._before.entries, *self._seen.entries()))
        return Record(entries=entries, steps=self._before.steps + self._steps)

    def to_dict(self) -> dict[str, Any]:
        """The record in plain values, as `Record.from_dict` reads them; JSON and `torch.load(weights_only=True)` take them."""
        return self.record().to_dict()

    def load_dict(self, values: dict[str, Any]) -> None:
        """Go on from an earlier record, in place of what was recorded so far.

        Args:
            values: What `to_dict` returned.

        Raises:
            ValueError: If they are no record; nothing is changed then.
        """
        self._before = Record.from_dict(values)
        self._seen, self._steps = Observations(), 0

    @contextmanager
    def _recording(self, scale: float) -> Iterator[None]:
        if self._is_recording:
            raise RuntimeError("this recorder is recording a step already; leave its step() before the next one is entered")
        self._warn_if_compiled()
        self._is_recording, self._steps = True, self._steps + 1
        try:
            spans = ModuleSpans(self._model)
            with uncompiled(), hooked(self._model, spans), Observer(self._seen, spans, scale):
                yield
        finally:
            self._is_recording = False

    def _warn_if_compiled(self) -> None:
        if not self._has_warned and is_compiled(self._model):
            self._has_warned = True
            warnings.warn(WARNING, UserWarning, stacklevel=4)
