"""Loads models when requests ask for them: requests share a load, and a failing load is not repeated at once."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from halfserve.serve.engine.errors import DeadlineExceededError, InferenceError, QueueFullError, UnavailableError
from halfserve.serve.engine.inference_core import STOPPING, Arrived, Cancel, InferenceCore

logger = logging.getLogger(__name__)

WAIT_S = 60.0  # a request without a deadline waits so long at most
MOST_WAITING = 1024  # requests that wait for one model
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 300.0  # after a failed load; each further failure doubles the pause
CROWDED_S = 1.0  # retry delay where too many requests wait

Load = Callable[[str], Coroutine[Any, Any, None]]
Begin = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


@dataclass(frozen=True, kw_only=True)
class FailedLoad:
    """A load that failed.

    Attributes:
        reason: its error, for clients.
        pause_s: seconds between its end and the next try.
        next_s: time of the next try, on time.monotonic()'s clock.
    """

    reason: str
    pause_s: float
    next_s: float

    def error(self, name: str) -> UnavailableError:
        """Return the error of requests before the next try."""
        left_s = max(0.0, self.next_s - time.monotonic())
        text = f"model {name!r} could not be loaded: {self.reason}; a request in {math.ceil(left_s)} s tries it again"
        return UnavailableError(text, retry_after_s=left_s)


class _Waiting:
    """A request that waits for a load; it ends once."""

    __slots__ = ("_arrived", "since_s", "timer")

    def __init__(self, arrived: Arrived) -> None:
        self._arrived: Arrived | None = arrived
        self.since_s = time.monotonic()
        self.timer: asyncio.TimerHandle | None = None

    def end(self, error: InferenceError | None) -> None:
        arrived = self._arrived
        self.cancel()
        if arrived is not None:
            arrived(error)

    def cancel(self) -> None:
        self._arrived = None
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class LoadOnDemand:
    """The models that requests load, and the requests that wait for them. Lives on the event loop."""

    def __init__(self, core: InferenceCore, load: Load, begin: Begin) -> None:
        """`load`: loads a model of the repository, and raises an InferenceError if it cannot; `begin`: starts a task."""
        self._core = core
        self._load = load
        self._begin = begin
        self._loading: dict[str, dict[_Waiting, None]] = {}  # by model, in the order in which the requests came
        self._failed: dict[str, FailedLoad] = {}
        self._is_closed = False
        self._loads = self._failures = self._waited = 0
        self._waited_s = 0.0
        core.on_demand = self
        core.on_change(self._resume_served)
        figures = core.figures
        figures.counter("halfserve_demand_loads_total", "Loads that requests began", lambda: self._loads)
        figures.counter("halfserve_demand_load_failures_total", "Loads of requests that failed", lambda: self._failures)
        figures.counter("halfserve_demand_waits_total", "Requests that waited for a load of theirs", lambda: self._waited)
        figures.counter("halfserve_demand_wait_seconds_total", "Time that these requests waited", lambda: self._waited_s)
        figures.gauge("halfserve_demand_waiting_requests", "Requests that wait for a load of theirs", lambda: self.waiting)

    @property
    def waiting(self) -> int:
        """Number of requests that wait."""
        return sum(map(len, self._loading.values()))

    def brings(self, name: str) -> bool:
        """See `DemandLoader`."""
        if self._is_closed or name not in self._core.loadable:
            return False
        failed = self._failed.get(name)
        return name in self._loading or failed is None or failed.next_s <= time.monotonic()

    def join(self, name: str, time_left_s: float | None, arrived: Arrived) -> Cancel | None:
        """See `InferenceCore.demand`. Names that the repository does not have are refused before anything is done for them."""
        waiting = self._loading.get(name)
        if waiting is None:
            if name not in self._core.loadable or self._core.served(name):
                return None
            self._require_possible(name)
            waiting = self._loading[name] = {}
            self._loads += 1
            self._begin(self._bring(name))
        if len(waiting) >= MOST_WAITING:
            text = f"{len(waiting)} requests wait for the load of model {name!r} already; send the request again later"
            raise QueueFullError(text, retry_after_s=CROWDED_S)
        one = _Waiting(arrived)
        waiting[one] = None
        self._waited += 1
        left_s = WAIT_S if time_left_s is None else max(0.0, time_left_s)
        one.timer = asyncio.get_running_loop().call_later(left_s, self._too_late, name, one, time_left_s is not None)
        return lambda: self._leave(name, one)

    def close(self) -> None:
        """See `DemandLoader`."""
        self._is_closed = True
        for name in [*self._loading]:
            self._end_all(name, UnavailableError(STOPPING))

    def _require_possible(self, name: str) -> None:
        if self._is_closed:
            raise UnavailableError(STOPPING)
        failed = self._failed.get(name)
        if failed is not None and failed.next_s > time.monotonic():
            raise failed.error(name)

    async def _bring(self, name: str) -> None:
        """Load a model, and end all waits for it."""
        error: InferenceError | None = UnavailableError(STOPPING)  # if this task is cancelled
        try:
            await self._load(name)
            self._failed.pop(name, None)
            error = None
        except InferenceError as refusal:
            error = self._fail(name, str(refusal), is_passing=isinstance(refusal, UnavailableError))
        except Exception as unexpected:
            logger.exception("%s: failed to load", name, extra={"model": name})
            error = self._fail(name, f"{type(unexpected).__name__}; the server's log says more", is_passing=False)
        finally:
            waiting = self._loading.pop(name)
            self._end(waiting, None if self._core.served(name) else error)

    def _fail(self, name: str, reason: str, *, is_passing: bool) -> InferenceError:
        """Pause before the next try: each time for longer, unless the reason is `is_passing`, such as a lack of room."""
        before = self._failed.get(name)
        pause_s = FIRST_PAUSE_S if before is None or is_passing else min(2 * before.pause_s, LONGEST_PAUSE_S)
        failed = self._failed[name] = FailedLoad(reason=reason, pause_s=pause_s, next_s=time.monotonic() + pause_s)
        self._failures += 1
        said = "%s: a request's load failed, and is tried again in %g s at the earliest: %s"
        logger.warning(said, name, pause_s, reason, extra={"model": name})
        return failed.error(name)

    def _resume_served(self) -> None:
        """Let the requests of models that have come go on, in their order and before later ones."""
        for name in [name for name in self._failed if self._core.served(name)]:
            del self._failed[name]  # a load request brought it
        for name in [name for name, waiting in self._loading.items() if waiting and self._core.served(name)]:
            self._end_all(name, None)

    def _end_all(self, name: str, error: InferenceError | None) -> None:
        waiting, self._loading[name] = self._loading[name], {}
        self._end(waiting, error)

    def _end(self, waiting: dict[_Waiting, None], error: InferenceError | None) -> None:
        for one in waiting:
            self._waited_s += time.monotonic() - one.since_s
            one.end(error)

    def _leave(self, name: str, one: _Waiting) -> None:
        one.cancel()
        waiting = self._loading.get(name, {})
        if one in waiting:
            del waiting[one]
            self._waited_s += time.monotonic() - one.since_s

    def _too_late(self, name: str, one: _Waiting, has_deadline: bool) -> None:
        text = f"model {name!r} was still being loaded"
        late: InferenceError
        if has_deadline:
            late = DeadlineExceededError(f"{text} when the request's time was up; allow more time, or send it again")
        else:
            late = UnavailableError(f"{text} after {WAIT_S:g} s; send the request again", retry_after_s=CROWDED_S)
        self._loading[name].pop(one)
        self._end({one: None}, late)
