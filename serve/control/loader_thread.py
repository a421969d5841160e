"""A thread beside the event loop, for what takes long: the loop goes on serving."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from serve.control.giving_way import giving_way
from serve.control.short_turns import SHORT_TURNS
from serve.engine.pauses import pause, pausing
from serve.engine.worker import Worker

T = TypeVar("T")


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
        self._worker = Worker(name)
        self._works_long = works_long
        self.in_service = False

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """`function(*arguments)` on the thread; what it raises, this raises."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def deliver(result: T | None, error: BaseException | None) -> None:
            if done.cancelled():
                return
            if error is None:
                done.set_result(result)  # type: ignore[arg-type]  # (None only where T is)
            else:
                done.set_exception(error)

        def work() -> None:
            result, failure = None, None
            try:
                with self._manners():
                    pause()
                    result = function(*arguments)
            except BaseException as error:  # noqa: BLE001  (whatever it is belongs to the caller, not to this thread)
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody waits any more
                loop.call_soon_threadsafe(deliver, result, failure)

        self._worker.submit(work)
        return await done

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
