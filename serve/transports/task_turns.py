"""Runs the steps of a crowd's tasks in turns, so that they delay no other request for long.

A batch of answers, or memory that runs short, wakes the tasks of many requests at once, and an event loop runs all of them
before it looks at its sockets again. Here tasks run for TURN_S of each loop iteration. After that they queue, and each later
iteration runs as many steps as fit into a turn, from the clients one after the other. So a client does not wait for all
requests of another one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from types import coroutine
from typing import Any, Final
from weakref import WeakKeyDictionary

from halfserve.serve.engine.queueing.client_queue import ClientQueue

TURN_S: Final = 0.0005
MOST_STEPS: Final = 8  # woken in one iteration: the next ones may take longer than recent ones
RECENT: Final = 8  # the mean duration of a step is that of about so many recent ones


class TaskTurns:
    """The turns of the tasks of one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: ClientQueue[Callable[[], object]] = ClientQueue()
        self._has_begun = False  # whether a step has run in this loop iteration, so that its time is limited
        self._stop = 0.0  # when this iteration's turn ends
        self._step_s = TURN_S  # mean duration of recent steps

    @coroutine
    def run(self, steps: Coroutine[Any, Any, None], client: Callable[[], str]) -> Generator[Any, Any, None]:
        """Run a coroutine in the current task; each of its steps waits for its turn.

        Args:
            steps: coroutine to run. It gets every error and cancellation.
            client: names the client that the task works for; called when it has to wait.
        """
        error: BaseException | None = None
        while True:
            if not isinstance(error, GeneratorExit) and not self._has_time():
                try:
                    yield from self.turn(client()).__await__()
                except BaseException as raised:  # noqa: BLE001  (it is the coroutine's)
                    error = raised
            begun_s = self._clock()
            try:
                awaited = steps.send(None) if error is None else steps.throw(error)
            except StopIteration:
                return
            finally:
                self._count(begun_s)
            error = None
            try:
                yield awaited
            except BaseException as raised:  # noqa: BLE001  (see above)
                error = raised

    def turn(self, client: str) -> asyncio.Future[None]:
        """Return a future that is done when it is the client's turn, in a later loop iteration."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._wait(client, partial(_give, turn))
        return turn

    def call_later(self, client: str, step: Callable[[], object]) -> None:
        """Call a function of a client in a later loop iteration, when it is its turn."""
        self._wait(client, partial(self._timed, step))

    def _wait(self, client: str, step: Callable[[], object]) -> None:
        self._waiting.append(client, step)
        if not self._has_begun:
            self._begin()

    def _has_time(self) -> bool:
        if not self._has_begun:
            self._begin()
            return True
        return not self._waiting and self._clock() <= self._stop

    def _begin(self) -> None:
        """Begin a turn, which lasts until the next loop iteration."""
        self._has_begun, self._stop = True, self._clock() + TURN_S
        asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        """Let those who wait first run."""
        self._has_begun = False
        if not self._waiting:
            return
        self._begin()
        for _ in range(min(len(self._waiting), max(1, int(TURN_S / self._step_s)), MOST_STEPS)):
            self._waiting.take()()
            if self._clock() > self._stop:
                return

    def _timed(self, step: Callable[[], object]) -> None:
        begun_s = self._clock()
        step()
        self._count(begun_s)

    def _count(self, begun_s: float) -> None:
        self._step_s += (self._clock() - begun_s - self._step_s) / RECENT


def _give(turn: asyncio.Future[None]) -> None:
    """Wake the task that waits for a turn, unless it has been cancelled."""
    if not turn.done():
        turn.set_result(None)


_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, TaskTurns] = WeakKeyDictionary()


def task_turns() -> TaskTurns:
    """Return the turns of the running event loop: all its servers share the loop's time."""
    return _turns.setdefault(asyncio.get_running_loop(), TaskTurns())
