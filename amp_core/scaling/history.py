"""What the scale was and which steps were skipped: for plots and logs."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from torch import Tensor

from amp_core.scaling.step_outcomes import Outcome


@dataclass(frozen=True, kw_only=True)
class ScaleRecord:
    """One iteration, as `GradScaler.update` ended it.

    Attributes:
        step: Its number, from 1, counted since the scaler was made.
        scale: What its losses were multiplied with.
        skipped: Whether a step was skipped in it.
        overflowed: The names of the parameters to blame, as far as the optimizer knows them; empty if none was skipped, and
            where a fused optimizer on an accelerator skipped by itself.
    """

    step: int
    scale: float
    skipped: bool
    overflowed: tuple[str, ...] = ()


@dataclass
class _Note:
    step: int
    scale: float | Tensor
    skipped: bool | Tensor
    overflowed: tuple[str, ...]
    record: ScaleRecord | None = field(default=None)

    def read(self) -> ScaleRecord:
        if self.record is None:
            scale, skipped = float(self.scale), bool(self.skipped)
            self.record = ScaleRecord(step=self.step, scale=scale, skipped=skipped, overflowed=self.overflowed)
            self.scale, self.skipped = scale, skipped  # lets go of the tensors
        return self.record


class History:
    """The last iterations, noted without waiting for the device; looking at them waits.

    Args:
        size: How many are kept; 0 keeps none.
    """

    def __init__(self, size: int) -> None:
        self._notes: deque[_Note] = deque(maxlen=size)
        self._steps = 0

    def add(self, scale: float | Tensor, outcomes: list[Outcome], found_inf: Tensor | None) -> None:
        """Note an iteration.

        Args:
            scale: A number, or a scalar on a device that nobody will write to.
            outcomes: Of the optimizers' steps.
            found_inf: A scalar, not 0 after an overflow: the answer where the host does not know yet.
        """
        self._steps += 1
        known = [outcome.undone or outcome.known() for outcome in outcomes]
        skipped: bool | Tensor = True in known
        if not skipped and None in known and found_inf is not None:
            skipped = found_inf
        names = tuple([name for outcome in outcomes for name in outcome.names()]) if skipped is True else ()
        self._notes.append(_Note(self._steps, scale, skipped, names))

    def records(self) -> list[ScaleRecord]:
        """The iterations, oldest first."""
        return [note.read() for note in self._notes]

    def __getstate__(self) -> dict[str, object]:
        self.records()
        return self.__dict__
