"""Several loader threads, so that models load at the same time."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from halfserve.serve.model_control.loader_thread import LoaderThread

T = TypeVar("T")


class LoaderThreads:
    """Runs functions beside the event loop, several at a time, in the order of their calls. Lives on the event loop.

    Attributes:
        most: number of functions that run at once.
        in_service: whether the server takes requests, for which the functions then pause.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.in_service = False
        self._running = 0  # number of functions
        self._idle: list[LoaderThread] = []
        self._threads: list[LoaderThread] = []
        self._waiting: deque[asyncio.Future[LoaderThread]] = deque()

    async def run(self, function: Callable[..., T], *arguments: Any, limit_s: float | None = None) -> T:
        """Run `function(*arguments)` once fewer than `most` functions run; see `LoaderThread.run`."""
        thread = await self._turn()
        thread.in_service = self.in_service
        try:
            return await thread.run(function, *arguments, limit_s=limit_s)
        finally:
            self._give_back(thread)

    @contextlib.contextmanager
    def one_more(self) -> Iterator[None]:
        """Run one more function at once within this context, because a running function waits for another one.

        Raises RuntimeError if the process may start no more threads.
        """
        self.most += 1
        try:
            self._admit()
            yield
        finally:
            self.most -= 1

    def stop(self) -> None:
        """End the threads after their running functions. Does not wait for them."""
        for thread in self._threads:
            thread.stop()

    async def _turn(self) -> LoaderThread:
        if self._running < self.most:
            thread = self._some()
            self._running += 1
            return thread
        turn: asyncio.Future[LoaderThread] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back(turn.result())
            raise

    def _some(self) -> LoaderThread:
        """Return an idle thread, or a new one."""
        if not self._idle:
            self._idle.append(LoaderThread())
            self._threads.append(self._idle[-1])
        return self._idle.pop()

    def _give_back(self, thread: LoaderThread) -> None:
        self._running -= 1
        self._idle.append(thread)
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._running < self.most:
            if self._waiting[0].done():  # its caller was cancelled
                self._waiting.popleft()
                continue
            thread = self._some()
            self._running += 1
            self._waiting.popleft().set_result(thread)
