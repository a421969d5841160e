"""The run as curves for TensorBoard."""

from __future__ import annotations

import importlib
import math
import threading
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from amp_core.training.errors import TrainingError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    from amp_core.training.log import StepRecord


class Curves:
    """Scalars over the optimizer steps; those that are not finite are left out.

    Per step `loss/training`, `scale`, `skipped_steps` (so far), `gradient_norm` and `learning_rate`; per evaluation
    `loss/held_out`, and `accuracy/held_out` for a classifier.

    Args:
        folder: For the event files.
        steps_done: How many steps a resumed run has behind it; what was written of later ones is purged.
        skipped_steps: How many of those were skipped.

    Raises:
        TrainingError: If the package is missing.
    """

    def __init__(self, folder: Path, *, steps_done: int, skipped_steps: int) -> None:
        self._skipped_steps = skipped_steps
        with ExitStack() as opened:
            opened.enter_context(_without_its_stack())
            # What belongs to a step is written with its number, so the first number to purge is the next one.
            self._writer: Any = _writer_class()(log_dir=str(folder), purge_step=steps_done + 1 if steps_done else None)
            self._quiet = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        with self._quiet:
            self._writer.close()

    def write_step(self, record: StepRecord) -> None:
        """Add a step's numbers."""
        self._skipped_steps += record.skipped
        values = {
            "loss/training": record.loss,
            "scale": record.scale,
            "skipped_steps": self._skipped_steps,
            "gradient_norm": record.gradient_norm,
            "learning_rate": record.learning_rate,
        }
        self._write(values, record.step)

    def write_evaluation(self, metrics: dict[str, float], step: int) -> None:
        """Add an evaluation after a step."""
        self._write({f"{name}/held_out": value for name, value in metrics.items()}, step)

    def sync(self) -> None:
        """Hand everything to the system, so that a resumed run finds it."""
        self._writer.flush()

    def _write(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)


@contextmanager
def _without_its_stack() -> Iterator[None]:
    """Keep Python from printing what ends the writer's thread: it is raised again here, and said in one line."""
    usual = threading.excepthook

    def end(arguments: threading.ExceptHookArgs) -> None:
        if not type(arguments.thread).__module__.startswith("tensorboard."):
            usual(arguments)

    threading.excepthook = end
    try:
        yield
    finally:
        threading.excepthook = usual


def curves(folder: Path, *, wanted: bool, steps_done: int, skipped_steps: int) -> AbstractContextManager[Curves | None]:
    """Curves if they are wanted, else None; for `with`."""
    return Curves(folder, steps_done=steps_done, skipped_steps=skipped_steps) if wanted else nullcontext()


def require_tensorboard() -> None:
    """Find out before anything is changed whether curves can be written.

    Raises:
        TrainingError: If the package is missing.
    """
    _writer_class()


def _writer_class() -> Any:
    try:
        return importlib.import_module("torch.utils.tensorboard").SummaryWriter
    except ImportError as error:
        raise TrainingError("the curves need the package tensorboard; run: pip install tensorboard") from error
