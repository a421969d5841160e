"""Loads models when requests ask for them: requests share a load, and a failing load is not repeated at once."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple

from halfserve.serve.engine.errors import DeadlineExceededError, InferenceError, QueueFullError, UnavailableError
from halfserve.serve.engine.inference_core import STOPPING, Arrived, Cancel, InferenceCore

logger = logging.getLogger(__name__)

WAIT_S = 60.0  # a request without a deadline waits so long at most
MOST_WAITING = 1024  # requests that wait for one model
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 300.0  # after a failed load; each further failure doubles the pause
CROWDED_S = 1.0  # retry delay where too many requests wait

Load = Callable[[str], Coroutine[Any, Any, None]]
Begin = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class _Failed(NamedTuple):
    reason: str  # for clients
    pause_s: float  # between the failure and the next try
    next_s: float  # time of the next try, on the event loop's clock


class _Wait(NamedTuple):
    since_s: float
    timer: asyncio.TimerHandle


_Waiting = dict[Arrived, _Wait]  # in the order in which the requests came


class LoadOnDemand:
    """The models that requests load, and the requests that wait for them. Lives on the event loop."""

    def __init__(self, core: InferenceCore, load: Load, begin: Begin) -> None:
        """`load`: loads a model of the repository, and raises an InferenceError if it cannot; `begin`: starts a task."""
        self._core = core
        self._load = load
        self._begin = begin
        self._loading: dict[str, _Waiting] = {}
        self._failed: dict[str, _Failed] = {}
        self._is_closed = False
        self._loads = self._failures = self._waited = 0
        self._waited_s = 0.0
        core.on_change(self._resume_served)
        figures = core.figures
        figures.counter("halfserve_demand_loads_total", "Loads that requests began", lambda: self._loads)
        figures.counter("halfserve_demand_load_failures_total", "Loads of requests that failed", lambda: self._failures)
        figures.counter("halfserve_demand_waits_total", "Requests that waited for a load of theirs", lambda: self._waited)
        figures.counter("halfserve_demand_wait_seconds_total", "Time that these requests waited", lambda: self._waited_s)
        waiting = self._loading
        figures.gauge(
            "halfserve_demand_waiting_requests",
            "Requests that wait for a load of theirs",
            lambda: sum(map(len, waiting.values())),
        )

    def brings(self, name: str) -> bool:
        """See `DemandLoader`."""
        return not self._is_closed and name in self._core.loadable and (name in self._loading or self._pause_s(name) <= 0)

    def join(self, name: str, time_left_s: float | None, arrived: Arrived) -> Cancel | None:
        """See `InferenceCore.demand`. Names that the repository does not have are refused before anything is done for them."""
        if self._is_closed:
            raise UnavailableError(STOPPING)
        waiting = self._loading.get(name)
        if waiting is None:
            if name not in self._core.loadable or self._core.served(name):
                return None
            if self._pause_s(name) > 0:
                raise self._failure(name)
            waiting = self._loading[name] = {}
            self._loads += 1
            self._begin(self._bring(name))
        if len(waiting) >= MOST_WAITING:
            text = f"{len(waiting)} requests wait for the load of model {name!r} already; send the request again later"
            raise QueueFullError(text, retry_after_s=CROWDED_S)
        self._waited += 1
        left_s = WAIT_S if time_left_s is None else max(0.0, time_left_s)
        too_late = partial(self._too_late, name, waiting, arrived, has_deadline=time_left_s is not None)
        waiting[arrived] = _Wait(_now(), asyncio.get_running_loop().call_later(left_s, too_late))
        return partial(self._leave, waiting, arrived)

    def close(self) -> None:
        """See `DemandLoader`."""
        self._is_closed = True
        for waiting in self._loading.values():
            self._end_all(waiting, UnavailableError(STOPPING))

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
            self._end_all(waiting, None if self._core.served(name) else error)

    def _fail(self, name: str, reason: str, *, is_passing: bool) -> InferenceError:
        """Pause before the next try: each time for longer, unless the reason is `is_passing`, such as a lack of room."""
        before = self._failed.get(name)
        pause_s = FIRST_PAUSE_S if before is None or is_passing else min(2 * before.pause_s, LONGEST_PAUSE_S)
        self._failed[name] = _Failed(reason, pause_s, _now() + pause_s)
        self._failures += 1
        said = "%s: a request's load failed, and is tried again in %g s at the earliest: %s"
        logger.warning(said, name, pause_s, reason, extra={"model": name})
        return self._failure(name)

    def _pause_s(self, name: str) -> float:
        """Return the seconds until a model may be loaded, after a load that failed."""
        failed = self._failed.get(name)
        return 0.0 if failed is None else max(0.0, failed.next_s - _now())

    def _failure(self, name: str) -> InferenceError:
        left_s, reason = self._pause_s(name), self._failed[name].reason
        text = f"model {name!r} could not be loaded: {reason}; a request in {math.ceil(left_s)} s tries it again"
        return UnavailableError(text, retry_after_s=left_s)

    def _resume_served(self) -> None:
        """Let the requests of models that have come go on, in their order and before later ones."""
        for name in [name for name in self._failed if self._core.served(name)]:
            del self._failed[name]  # a load request brought it
        for waiting in [waiting for name, waiting in self._loading.items() if waiting and self._core.served(name)]:
            self._end_all(waiting, None)

    def _end_all(self, waiting: _Waiting, error: InferenceError | None) -> None:
        for arrived in [*waiting]:  # which may end other waits, or begin one
            if self._leave(waiting, arrived):
                arrived(error)

    def _leave(self, waiting: _Waiting, arrived: Arrived) -> bool:
        """End a wait; returns whether it had not ended."""
        wait = waiting.pop(arrived, None)
        if wait is None:
            return False
        wait.timer.cancel()
        self._waited_s += _now() - wait.since_s
        return True

    def _too_late(self, name: str, waiting: _Waiting, arrived: Arrived, *, has_deadline: bool) -> None:
        text = f"model {name!r} was still being loaded"
        late: InferenceError
        if has_deadline:
            late = DeadlineExceededError(f"{text} when the request's time was up; allow more time, or send it again")
        else:
            late = UnavailableError(f"{text} after {WAIT_S:g} s; send the request again", retry_after_s=CROWDED_S)
        self._leave(waiting, arrived)
        arrived(late)


def _now() -> float:
    return asyncio.get_running_loop().time()
