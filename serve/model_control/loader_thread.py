"""A thread beside the event loop that runs one function after the other, and leaves one behind that takes too long."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

from halfserve.serve.engine.background_threads import Worker, pause, pausing, sched_batch

T = TypeVar("T")
AGAIN_S = 1.0  # seconds until the next attempt to start a thread


class GivenUp:
    """Whether the result of a function is wanted no longer, and what ends it early. Used on both threads."""

    def __init__(self) -> None:
        self._is_set = False
        self._enders: list[Callable[[], None]] = []

    def __bool__(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        for end in list(self._enders):
            end()

    def when_set(self, end: Callable[[], None]) -> None:
        """Call `end`, on any thread, once the result is wanted no longer; at once if that is so already. It may come twice."""
        self._enders.append(end)
        if self._is_set:
            end()


GIVEN_UP: ContextVar[GivenUp | None] = ContextVar("given_up", default=None)  # set while a function runs on a LoaderThread


class _Run(Generic[T]):
    """One function's run on the thread. All methods but `tell` are called on the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float | None, leave_behind: Callable[[], None]) -> None:
        self.done: asyncio.Future[T] = loop.create_future()
        self._loop = loop
        self._limit_s = limit_s
        self._leave_behind = leave_behind
        self._overdue: asyncio.TimerHandle | None = None
        self.given_up = GivenUp()
        self.has_started = self.has_ended = False  # set on the thread

    def tell(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)

    def begin(self) -> None:
        if self._limit_s is not None:
            self._overdue = self._loop.call_later(self._limit_s, self._give_up)

    def end(self, result: T | None, error: BaseException | None) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
        if self.done.done():
            return
        if error is None:
            self.done.set_result(result)  # type: ignore[arg-type]  # (None only where T is)
        else:
            self.done.set_exception(error)

    def abandon(self) -> None:
        """End the function early, or skip it, because its caller has gone."""
        self.given_up.set()
        if self.has_started and not self.has_ended:
            self._give_up()

    def _give_up(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
        self.given_up.set()
        try:
            self._leave_behind()  # even if its caller has gone, because the function blocks those behind it
        except RuntimeError:  # the process may start no more threads, so the functions behind it wait
            self._overdue = self._loop.call_later(AGAIN_S, self._give_up)
        if not self.done.done():
            self.done.set_exception(TimeoutError(f"not done within {self._limit_s:g} s"))


class LoaderThread:
    """Runs one function after the other beside the event loop, and can abandon one that takes too long.

    Attributes:
        in_service: whether the server takes requests, for which the functions then pause.
    """

    def __init__(self, name: str = "loader", *, works_long: bool = True) -> None:
        """`works_long`: whether its functions take long, and should leave the core to threads that answer requests."""
        self._name = name
        self._worker = Worker(name)
        self._works_long = works_long
        self._is_stopped = False
        self.in_service = False

    async def run(self, function: Callable[..., T], *arguments: Any, limit_s: float | None = None) -> T:
        """Run `function(*arguments)` on the thread; its errors pass through.

        A function that takes longer than `limit_s` seconds, or whose caller is cancelled, is abandoned: a thread cannot be
        killed, so a new one runs the following functions. `GivenUp.when_set` ends it early.

        Raises:
            TimeoutError: it takes longer than `limit_s` seconds.
        """
        run: _Run[T] = _Run(asyncio.get_running_loop(), limit_s, self._leave_behind)

        def work() -> None:
            result, failure = None, None
            run.has_started = True
            if run.given_up:
                return
            token = GIVEN_UP.set(run.given_up)
            try:
                run.tell(run.begin)
                with self._manners():
                    pause()
                    result = function(*arguments)
            except BaseException as error:  # noqa: BLE001  (the caller gets every error)
                failure = error
            GIVEN_UP.reset(token)
            run.has_ended = True
            run.tell(run.end, result, failure)

        self._worker.submit(work)
        try:
            return await run.done
        except asyncio.CancelledError:
            run.abandon()
            raise

    def _leave_behind(self) -> None:
        if self._is_stopped:
            return
        after = Worker(self._name)
        before, self._worker = self._worker, after
        before.hand_over(after)

    @contextlib.contextmanager
    def _manners(self) -> Iterator[None]:
        if not self._works_long:
            yield
            return
        with sched_batch(), pausing(pauses=self.in_service):
            yield

    def stop(self) -> None:
        """End the thread after the running function. Does not wait for it."""
        self._is_stopped = True
        self._worker.stop()
