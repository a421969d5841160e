"""What people see of a run while it goes on."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from amp_core.training.run import Evaluation
    from amp_core.training.settings import TrainingSettings
    from amp_core.training.train import Progress as TrainingProgress

Callbacks = tuple["Callable[[TrainingProgress], None]", "Callable[[Evaluation], None]"]


@contextmanager
def people_see(settings: TrainingSettings) -> Iterator[Callbacks]:
    """Show a bar on standard error that moves with each step or, where that is no terminal, print a line per epoch.

    Yields:
        What to call after each step, and what after each epoch.
    """
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield (lambda _: None), (lambda evaluation: console.print(_line(evaluation, settings), soft_wrap=True))
        return
    columns = (
        TextColumn("training"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        yield _callbacks(bar, bar.add_task("training", total=None, state=""), settings)


def _callbacks(bar: Progress, task: TaskID, settings: TrainingSettings) -> Callbacks:
    def on_step(progress: TrainingProgress) -> None:
        record = progress.record
        state = f"steps, loss {record.loss:.4f}, scale {record.scale:g}, {progress.skipped_steps} skipped"
        bar.update(task, total=progress.steps_in_total, completed=record.step, state=state)

    def on_epoch(evaluation: Evaluation) -> None:
        bar.console.print(_line(evaluation, settings), soft_wrap=True)

    return on_step, on_epoch


def _line(evaluation: Evaluation, settings: TrainingSettings) -> str:
    figures = ", ".join(
        f"{name} {value:.2%}" if name == "accuracy" else f"{name} {value:.4f}" for name, value in evaluation.metrics.items()
    )
    return f"epoch {evaluation.epoch}/{settings.epochs}: {figures} on held-out data"
