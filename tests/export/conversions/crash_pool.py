"""Child processes for work that may crash or hang: a crash counts as a result, and the next work gets a new child."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

Result = TypeVar("Result")
_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Crash:
    """Why a piece of work has no result: the child died ("killed by SIGSEGV"), hung, or the function raised."""

    text: str


class CrashPool(Generic[Result]):
    """Runs one function on many arguments in `workers` children; use it as a context manager.

    Args:
        function: A module's own function (it travels by name), called with the unpacked arguments.
        workers: The number of concurrent children.
        timeout_seconds: The time after which work counts as hung and its child is killed.
    """

    def __init__(self, function: Callable[..., Result], *, workers: int = 2, timeout_seconds: float = 120) -> None:
        self._function = function
        self._workers = workers
        self._timeout = timeout_seconds
        self._idle: list[_Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for child in self._idle:
            child.end()

    def map(self, arguments: Iterable[tuple[Any, ...]]) -> Iterator[Result | Crash]:
        """The results in the order of the arguments, or a `Crash` for each that has none."""
        with ThreadPoolExecutor(self._workers) as threads:
            yield from threads.map(self._one, arguments)

    def _one(self, arguments: tuple[Any, ...]) -> Result | Crash:
        try:
            child = self._idle.pop()
        except IndexError:
            child = _Child(self._function)
        answer: Result | Crash = child.do(arguments, self._timeout)
        if child.alive:
            self._idle.append(child)
        return answer


class _Child:
    def __init__(self, function: Callable[..., Any]) -> None:
        self._pipe, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_serve, args=(function, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.alive = True

    def do(self, arguments: tuple[Any, ...], timeout: float) -> Any:
        try:
            self._pipe.send(arguments)
            if self._pipe.poll(timeout):
                return self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            self.alive = False
            return Crash(_how_it_ended(self._process.exitcode or 0))
        self.end()
        return Crash(f"no answer within {timeout:g} s")

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()
        self.alive = False


def _serve(function: Callable[..., Any], pipe: Connection) -> None:
    while True:
        try:
            arguments = pipe.recv()
        except EOFError:
            return
        try:
            result = function(*arguments)
        except Exception as error:  # noqa: BLE001  (it is reported to the caller, whatever it is)
            result = Crash(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}")
        pipe.send(result)


def _how_it_ended(exit_code: int) -> str:
    return f"killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with status {exit_code}"
