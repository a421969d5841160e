"""The record of a run: which operation ran in which dtype and range, on one step in many."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from amp_core.atomic_file import atomic_file
from amp_core.training.errors import TrainingError
from amp_core.training.folder import RECORD, RECORD_PLOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import nn

    from amp_core.recorder import Recorder


class Recording:
    """Records if it is asked to, else does nothing.

    Args:
        model: The model itself, without what runs it in several processes.
        every: In steps; 0 records nothing.
        before: What `to_dict` returned in an earlier part of the run; empty at its start.

    Raises:
        TrainingError: If `before` is no record.
    """

    def __init__(self, model: nn.Module, *, every: int, before: dict[str, Any]) -> None:
        self._before = before
        self._recorder: Recorder | None = None
        if every or before:
            from amp_core.recorder import Recorder  # noqa: PLC0415  (few runs record)

            recorder = Recorder(model, every=max(1, every))
            self._go_on(recorder, before)  # also if it is only to be handed on: it is read again at the run's end
            self._recorder = recorder if every else None

    @staticmethod
    def _go_on(recorder: Recorder, before: dict[str, Any]) -> None:
        try:
            if before:
                recorder.load_dict(before)
        except ValueError as error:
            raise TrainingError(f"cannot go on with the checkpoint's record: {error}") from error

    def of_step(self, step: int) -> Callable[[float], AbstractContextManager[None]]:
        """What takes a step's loss scale, and returns what the step's forward, loss and backward run in."""
        return partial(self._around, step)

    def _around(self, step: int, scale: float) -> AbstractContextManager[None]:
        return nullcontext() if self._recorder is None else self._recorder.step(step, scale=scale)

    def to_dict(self) -> dict[str, Any]:
        """The record, for a checkpoint; empty if nothing was ever recorded."""
        return self._before if self._recorder is None else self._recorder.to_dict()


def write_record(values: dict[str, Any], folder: Path) -> None:
    """Write a record as `record.json` and, where matplotlib is installed, as the picture `record.png`."""
    from amp_core.recorder import Record, plot  # noqa: PLC0415  (few runs record)

    with atomic_file(folder / RECORD) as file:
        file.write(json.dumps(values).encode())
    try:
        plot(Record.from_dict(values), folder / RECORD_PLOT)
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
