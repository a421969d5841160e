"""Takes a copy of a model out of service when it breaks or hangs, and loads it again on its thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from halfserve.serve.engine.background_threads import Worker
from halfserve.serve.engine.errors import is_device_lost
from halfserve.serve.engine.execution.batch_runner import BatchRunner, first_line

logger = logging.getLogger(__name__)

FIRST_WAIT_S: Final = 1.0
LONGEST_WAIT_S: Final = 60.0


@dataclass(frozen=True)
class _NotLoaded:
    reason: str
    device_is_lost: bool


class Recovery:
    """The loaded copy, its thread, and whether it is in service. Used on the event loop only.

    | state | event | what happens | next state |
    |---|---|---|---|
    | up | a batch broke the copy or used up its time (`take_out`) | log the fault, start the timer | waiting |
    | up, after a fault | a batch was computed (`computed`) | the next wait is the shortest one again | up |
    | waiting | the timer ends | load the copy on its thread, or on a new one if that was abandoned | loading |
    | waiting | the timer ends, and no thread can be started | double the wait, call `on_change` | waiting |
    | loading | the copy is loaded | count it, call `on_change` | up |
    | loading | the copy cannot be loaded | double the wait, call `on_change`, report a lost device | waiting |
    | any | `stop` | cancel the timer | stopped |
    | stopped | a copy has been loaded meanwhile | end its process, if it has one | stopped |

    Attributes:
        name: "name/version instance number", for the log.
        runner: computes batches; a new one after each recovery.
        worker: thread of the copy.
        is_up: whether it can compute.
        restarts: number of recoveries from faults.
        fault: text of the latest fault; None before the first.
        on_change: called when it is up again, and after each failed attempt to load it.
        on_lost_device: called after each attempt that failed because the device is lost to this process.
    """

    def __init__(self, name: str, runner: BatchRunner, number: int, first_wait_s: float) -> None:
        self.name = name
        self.runner = runner
        self.worker = Worker(f"instance-{number}")
        self.is_up = True
        self.restarts = 0
        self.fault: str | None = None
        self.on_change: Callable[[], None] = _nothing
        self.on_lost_device: Callable[[str], None] = _nothing_with
        self._number = number
        self._first_wait_s = self._wait_s = first_wait_s
        self._timer: asyncio.TimerHandle | None = None  # loads the copy again
        self._is_abandoned = False  # whether the thread was abandoned, so that a new one is needed before the next job
        self._is_stopped = False

    def next_try_s(self) -> float:
        """Return the seconds until it is loaded again; 0 while it is being loaded. Only meaningful while it is not up."""
        return 0.0 if self._timer is None else max(0.0, self._timer.when() - asyncio.get_running_loop().time())

    def computed(self) -> None:
        """Record that the copy has computed a batch."""
        if self.fault is not None and self.is_up:
            self._wait_s = self._first_wait_s

    def take_out(self, fault: str, loop: asyncio.AbstractEventLoop) -> None:
        """Take the copy out of service, and load it again later."""
        self.is_up = False
        self.fault = fault
        said = "%s: is taken out (%s); it is loaded again in %g s"
        logger.error(said, self.name, fault, self._wait_s, extra={"model": self.name})
        self._load_later(loop)

    def abandon(self) -> None:
        """Give up the running batch: a thread cannot be killed, so that it is abandoned until the runtime's call returns."""
        self.runner.is_broken = True
        if self.runner.can_reload:
            self.runner.give_up()
            self.worker.stop()
            self._is_abandoned = True

    def stop(self) -> None:
        """End the thread after the submitted jobs, without waiting for it."""
        self._is_stopped = True
        self.on_change = _nothing  # breaks a reference cycle that would keep an unloaded model
        self._cancel_timer()
        self.worker.stop()
        self.runner.stop()

    def _load_later(self, loop: asyncio.AbstractEventLoop) -> None:
        self._cancel_timer()
        if not self._is_stopped:
            self._timer = loop.call_later(self._wait_s, self._begin_load, loop)
            self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_S)

    def _begin_load(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._is_abandoned:
            try:
                self.worker = Worker(f"instance-{self._number}")
            except RuntimeError as error:  # the process may start no more threads
                self._loaded(loop, _NotLoaded(first_line(error), device_is_lost=False))
                return
            self._is_abandoned = False
        self.worker.submit(self._load, loop, self.runner)

    def _load(self, loop: asyncio.AbstractEventLoop, broken: BatchRunner) -> None:
        """Load the copy again; runs on the worker thread."""
        loaded: BatchRunner | _NotLoaded
        try:
            loaded = broken.reloaded()
        except Exception as error:  # noqa: BLE001  (an error of the runtime must not end the thread)
            loaded = _NotLoaded(first_line(error), is_device_lost(error))
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(self._loaded, loop, loaded)

    def _loaded(self, loop: asyncio.AbstractEventLoop, loaded: BatchRunner | _NotLoaded) -> None:
        if self._is_stopped:
            if isinstance(loaded, BatchRunner) and loaded.has_process:
                loaded.give_up()
            return
        if isinstance(loaded, _NotLoaded):
            self.fault = loaded.reason
            said = "%s: cannot be loaded again (%s); the next attempt is in %g s"
            logger.error(said, self.name, loaded.reason, self._wait_s, extra={"model": self.name})
            self._load_later(loop)
            if loaded.device_is_lost:
                self.on_lost_device(loaded.reason)
        else:
            self.runner = loaded
            self.is_up = True
            self.restarts += 1
            logger.warning("%s: is up again", self.name, extra={"model": self.name})
        self.on_change()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _nothing() -> None:
    """Do nothing, until a listener is set."""


def _nothing_with(_: str) -> None:
    """Do nothing, until a listener is set."""
