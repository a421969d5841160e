"""An event loop in virtual time, which stands still while there is work, and jumps to the next timer otherwise."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class VirtualLoop(asyncio.SelectorEventLoop):
    """A deterministic loop: tasks run in the order of their timers, and work for threads runs immediately."""

    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__(_Selector(self))
        self.set_default_executor(_AtOnce())

    def time(self) -> float:
        return self.now


class _Selector(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everything waits, and no timer runs")
        self._loop.now += max(0.0, timeout)
        return []  # in virtual time there are no external events


class _AtOnce(ThreadPoolExecutor):
    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        done: Future[T] = Future()
        try:
            done.set_result(function(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  (raised where the future is awaited)
            done.set_exception(error)
        return done


def run_virtually(
    main: Callable[[Callable[[], float]], Coroutine[Any, Any, T]], make: Callable[[], VirtualLoop] = VirtualLoop
) -> T:
    """Run a coroutine in virtual time; it gets the clock as its argument."""
    with asyncio.Runner(loop_factory=make) as runner:
        loop = runner.get_loop()
        return runner.run(main(loop.time))
