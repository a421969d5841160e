"""From the event loop to a thread that may wait: for a disk, a pipe, a collector on the network."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")
BOUND = 65_536  # items
EVERY_S = 1.0  # a thread that wakes takes the interpreter from the event loop: the less often, the better
MOST = 2048  # items that are handed over at once


class Outbox(Generic[T]):
    """Holds items for a short while and hands them over together. Never waits: what does not fit is counted and dropped.

    Attributes:
        fill: called before items are handed over; puts what somebody has kept back until then, and has told of by `expect`.
    """

    def __init__(
        self,
        deliver: Callable[[list[T]], None],
        *,
        name: str,
        bound: int = BOUND,
        every_s: float = EVERY_S,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        """An outbox of the running event loop.

        Args:
            deliver: called on the thread with the items since last time; if it raises, they are lost, and the log says so once.
            name: of the thread.
            bound: items that may wait.
            every_s: seconds between two deliveries, where there is something to deliver.
            prepare: called on the thread when it begins; what it raises, `deliver` will raise again.
        """
        self._deliver = deliver
        self._bound = bound
        self._every_s = every_s
        self._prepare = prepare
        self._loop = asyncio.get_running_loop()
        self._items: list[T] = []
        self._handed: queue.SimpleQueue[list[T] | None] = queue.SimpleQueue()
        self._timer: asyncio.TimerHandle | None = None
        self._put = 0
        self._done = 0  # written by the thread alone
        self._lost = 0  # likewise
        self._refused = 0
        self._closed = False
        self.fill: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Items that never arrived: there was no room, or they could not be delivered."""
        return self._refused + self._lost

    def put(self, item: T) -> None:
        """Send an item, unless too many wait."""
        if self._closed or self._put - self._done >= self._bound:
            self._refused += 1
            return
        self._put += 1
        self._items.append(item)
        if len(self._items) >= MOST:
            self._hand_over()
        else:
            self.expect()

    def expect(self) -> None:
        """Hand over what is there within `every_s`, and what `fill` will put."""
        if self._timer is None:
            self._timer = self._loop.call_later(self._every_s, self._time_is_up)

    def close(self, wait_s: float) -> None:
        """Deliver what is there, waiting so many seconds at most, and end the thread."""
        if not self._closed:
            self._time_is_up()
            self._closed = True
            self._handed.put(None)
        self._thread.join(wait_s)

    def _time_is_up(self) -> None:
        if self.fill is not None:
            self.fill()
        self._hand_over()

    def _hand_over(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        items, self._items = self._items, []
        if items:
            self._handed.put(items)

    def _run(self) -> None:
        if self._prepare is not None:
            with contextlib.suppress(Exception):
                self._prepare()
        failing = False
        while (items := self._handed.get()) is not None:
            try:
                self._deliver(items)
                failing = False
            except Exception as error:  # noqa: BLE001  (a full disk or a lost collector must not end the thread)
                self._lost += len(items)
                if not failing:
                    logger.warning("%s: %d lost: %s", threading.current_thread().name, len(items), error)
                failing = True
            self._done += len(items)
