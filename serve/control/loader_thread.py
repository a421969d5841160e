"""A thread beside the event loop, for what takes long: the loop goes on serving."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from serve.control.giving_way import giving_way
from serve.control.short_turns import SHORT_TURNS
from serve.engine.pauses import pause, pausing
from serve.engine.worker import Worker

T = TypeVar("T")
AGAIN_S = 1.0  # until another thread is tried to be started, where none could be


class _Run(Generic[T]):
    """One function's way to the thread and back. All but `tell` happens on the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float | None, leave_behind: Callable[[], None]) -> None:
        self.done: asyncio.Future[T] = loop.create_future()
        self._loop = loop
        self._limit_s = limit_s
        self._leave_behind = leave_behind
        self._overdue: asyncio.TimerHandle | None = None

    def tell(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody waits any more
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

    def _give_up(self) -> None:
        try:
            self._leave_behind()  # even if nobody waits for the function any more: it is in the others' way
        except RuntimeError:  # there are as many threads as may be: the others wait until there is room for one more
            self._overdue = self._loop.call_later(AGAIN_S, self._give_up)
        if not self.done.done():
            self.done.set_exception(TimeoutError(f"not done within {self._limit_s:g} s"))


class LoaderThread:
    """Runs one thing after the other beside the event loop, and can be left behind in the middle of one.

    Attributes:
        in_service: there are requests, and what it runs pauses for them.
    """

    def __init__(self, name: str = "loader", *, works_long: bool = True) -> None:
        """A thread with nothing to do.

        Args:
            name: of the thread.
            works_long: what it runs takes long, and gives way to those that answer requests.
        """
        self._name = name
        self._worker = Worker(name)
        self._works_long = works_long
        self.in_service = False

    async def run(self, function: Callable[..., T], *arguments: Any, limit_s: float | None = None) -> T:
        """`function(*arguments)` on the thread; what it raises, this raises.

        Raises:
            TimeoutError: it takes longer than `limit_s` seconds. The thread is left to itself then, as nobody can end one, and
                another does what was to come after.
        """
        run: _Run[T] = _Run(asyncio.get_running_loop(), limit_s, self._leave_behind)

        def work() -> None:
            result, failure = None, None
            try:
                run.tell(run.begin)
                with self._manners():
                    pause()
                    result = function(*arguments)
            except BaseException as error:  # noqa: BLE001  (whatever it is belongs to the caller, not to this thread)
                failure = error
            run.tell(run.end, result, failure)

        self._worker.submit(work)
        return await run.done

    def _leave_behind(self) -> None:
        after = Worker(self._name)
        before, self._worker = self._worker, after
        before.hand_over(after)

    @contextlib.contextmanager
    def _manners(self) -> Iterator[None]:
        if not self._works_long:
            yield
            return
        with SHORT_TURNS.during(), giving_way(), pausing(pauses=self.in_service):
            yield

    def stop(self) -> None:
        """End the thread after what it is doing. Does not wait for it."""
        self._worker.stop()
