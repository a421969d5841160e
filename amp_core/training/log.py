"""`train.jsonl`: one JSON object per line and step, and one per evaluation."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from typing import IO, TYPE_CHECKING, Any

from amp_core.atomic_file import atomic_file

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType
    from typing import Self


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step.

    Attributes:
        step: Counted from 1 over the whole run, skipped steps included.
        epoch: Counted from 1.
        loss: Of the batch, unscaled.
        scale: What the loss was multiplied with; 1.0 where nothing is scaled.
        skipped: Whether the gradients overflowed, so that the parameters stayed as they were.
        gradient_norm: Of all gradients that the optimizer follows together, unscaled, before clipping.
        learning_rate: That the step was made with.
    """

    step: int
    epoch: int
    loss: float
    scale: float
    skipped: bool
    gradient_norm: float
    learning_rate: float


class TrainLog:
    """The file, open for appending; every line is on its way to the disk as soon as it is written."""

    def __init__(self, path: Path, *, keep_steps: int, keep_epochs: int) -> None:
        """Start the file, or go on with one.

        Args:
            path: The file.
            keep_steps: How many steps of what is there to keep; lines of later ones and a torn last line are dropped.
            keep_epochs: How many evaluations to keep, likewise.
        """
        kept = _kept_lines(path, keep_steps, keep_epochs)
        with atomic_file(path) as file:
            file.writelines(kept)
        self._file: IO[str] = path.open("a", encoding="utf-8", buffering=1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._file.close()

    def write_step(self, record: StepRecord) -> None:
        """Append a step."""
        self._write(asdict(record))

    def write_epoch(self, epoch: int, metrics: dict[str, float]) -> None:
        """Append an evaluation."""
        self._write({"epoch": epoch, "evaluation_loss": metrics["loss"], "accuracy": metrics.get("accuracy")})

    def sync(self) -> None:
        """See that what was written survives even the machine's end: a checkpoint counts on the lines before it."""
        os.fsync(self._file.fileno())

    def _write(self, record: dict[str, Any]) -> None:
        # JSON has no infinity and no NaN; both mean here that there is no such number.
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
        }
        self._file.write(json.dumps(finite) + "\n")


def _kept_lines(path: Path, steps: int, epochs: int) -> list[bytes]:
    if steps == 0 or not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    return [line for line in lines if line.endswith(b"\n") and _is_before(line, steps, epochs)]


def _is_before(line: bytes, steps: int, epochs: int) -> bool:
    """Whether a line tells of one of so many steps or epochs; what is torn, or what no run has written, does not."""
    try:
        record = json.loads(line)
        return bool(record["step"] <= steps if "step" in record else record.get("epoch", 0) <= epochs)
    except (ValueError, TypeError, AttributeError):
        return False
