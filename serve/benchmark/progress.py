"""How far a measurement is, on the terminal while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from serve.benchmark.level import Level
from serve.benchmark.load.order import Tally
from serve.benchmark.loads import Load
from serve.client.commands.console import printable

if TYPE_CHECKING:
    from types import TracebackType


class ProgressBar:
    """A line on standard error from `begin` on: the load, what was measured in the last moment, and how many loads are done."""

    def __init__(self) -> None:
        what = TextColumn("{task.description}", markup=False)  # a model may be named "[/a]"
        columns = (SpinnerColumn(), what, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task("connecting", total=None)

    def begin(self, what: str, measurements: int | None) -> None:
        """So many loads will be measured; None when that is not known."""
        self._progress.update(self._task, description=what, total=measurements)
        self._progress.start()

    def window(self, load: Load, tally: Tally) -> None:
        """What was measured in the last moment."""
        latency = tally.latency
        if latency.total and tally.seconds:
            p50 = latency.percentiles_ms([50])[0]
            text = f"{load.text}: {latency.total / tally.seconds:,.0f} requests/s, p50 {p50:.2f} ms"
            self._progress.update(self._task, description=text)

    def done(self, level: Level) -> None:
        """A load has been measured."""
        text = f"{level.load.text}: {level.requests_per_second:,.0f} requests/s, p99 {level.latency.p99:.2f} ms"
        self._progress.update(self._task, advance=1, description=text)

    def note(self, line: str) -> None:
        """A line above the bar."""
        self._progress.console.print(printable(line), highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._progress.live.is_started:
            self._progress.stop()
