"""A running server under load, with the processor time that a request takes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TypeVar

import typer

from benchmarks.harness.process_watch import processor_us
from halfserve.serve.benchmark.level import Level, Load
from halfserve.serve.benchmark.load_target import LoadTarget, RequestSettings
from halfserve.serve.benchmark.measurement import Measurement, measure

T = TypeVar("T")


class LoadedServer(LoadTarget):
    """A load generator that is connected to a server, for one model; `pids` are the server's processes."""

    def __init__(self, address: str, model: str, pids: Sequence[int], settings: RequestSettings | None = None) -> None:
        super().__init__(address, [model], settings or RequestSettings())
        self.pids = pids
        self._model = model

    def measured(self, load: Load, how: Measurement) -> tuple[Level, list[float]]:
        """Load the server once; returns the result, and the microseconds of each process for a request."""
        return self.costs(lambda: measure(self.bench, load, how))

    def costs(self, run: Callable[[], T]) -> tuple[T, list[float]]:
        """Call a function that loads the server; returns its result, and the microseconds of each process for a request."""
        before, answered = list(map(processor_us, self.pids)), self._answered()
        result = run()
        spent = [after - earlier for after, earlier in zip(map(processor_us, self.pids), before, strict=True)]
        count = self._answered() - answered
        return result, [us / count for us in spent]

    def _answered(self) -> int:
        return sum(one.inference_stats.success.count for one in self.client.statistics(self._model))


def running_server(text: str, settings: RequestSettings, stack: ExitStack) -> tuple[str, LoadTarget]:
    """Return the name and the load target of NAME=HOST:PORT/MODEL, a server that runs already; `stack` closes it."""
    name, _, rest = text.partition("=")
    address, _, model = rest.partition("/")
    if not (name and address and model):
        raise typer.BadParameter(f"{text!r}: expected NAME=HOST:PORT/MODEL, such as triton=127.0.0.1:18001/mlp")
    return name, stack.enter_context(LoadTarget(address, [model], settings))
