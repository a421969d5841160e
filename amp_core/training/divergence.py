"""When to give up: a run whose numbers got out of hand is stopped, with what went wrong first."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from amp_core.training.diagnosis import diagnose
from amp_core.training.errors import TrainingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amp_core.training.log import StepRecord
    from amp_core.training.step import Batch, Training


_UNKNOWN = "gradients are not finite; try a lower learning rate"


class DivergenceWatch:
    """Looks at every step's outcome, which costs nothing, and at the model itself only when something is wrong.

    A step is bad if it was skipped or its loss is not finite. Skipped steps are part of finding the loss scale, so they are
    borne until there are `patience` in a row. Then the last batch is run once more: if its forward pass or its loss is not
    finite, or its gradients are not even at the smallest scale, then no scale can help and the run ends; else it goes on, and
    is looked at again after as many bad steps more. Without a scale a gradient that is not finite ends the run at once.

    Args:
        training: What is trained.
        patience: In steps.
    """

    def __init__(self, training: Training, patience: int) -> None:
        self._training, self._patience = training, patience
        self._bad_in_a_row = 0
        self._last_bad: tuple[StepRecord, Sequence[Batch]] | None = None

    def look(self, record: StepRecord, batches: Sequence[Batch]) -> None:
        """Look at a step.

        Args:
            record: Of the step.
            batches: That it was made with.

        Raises:
            TrainingError: If going on is useless; names the layer or the parameters.
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
        """Look at an evaluation: one without a finite loss, right after a bad step, is of a model that is lost.

        Raises:
            TrainingError: If it is.
        """
        if self._last_bad is not None and not math.isfinite(metrics["loss"]):
            otherwise = f"the loss on held-out data is {metrics['loss']:g} too; try a lower learning rate"
            self._stop_if_hopeless(*self._last_bad, otherwise=otherwise)

    def _stop_if_hopeless(self, record: StepRecord, batches: Sequence[Batch], *, otherwise: str | None) -> None:
        # The cause may be in one process's batch alone; all of them must come to the same end.
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
    """Whether a step was skipped or had a loss that is not finite."""
    return record.skipped or not math.isfinite(record.loss)
