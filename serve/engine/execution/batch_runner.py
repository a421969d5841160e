"""The interface between a copy of a model and what computes its batches."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from halfserve.serve.engine.errors import InstanceLostError, UnavailableError
from halfserve.serve.engine.queueing.waiting_requests import is_late
from halfserve.serve.engine.requests import CallingExecution, InferRequest
from halfserve.serve.engine.results import BegunBatch, LateRequests, LostRequests, Results


class PreparedBatch:
    """A batch that its runner prepares before its turn."""

    __slots__ = ()


class BatchRunner:
    """Computes the batches of one loaded copy of a model, one at a time, until one of them breaks the copy.

    `TensorRunner` computes tensors, `RequestRunner` passes whole requests on. Both are used on the copy's thread, except for
    `prepare`, `begin`, `let_go`, `give_up` and `stop`, which belong to the event loop.

    Attributes:
        is_broken: whether no further batch may run on this copy.
        has_process: whether the copy is a process of its own, whose batches the event loop can begin, and which is closed.
        may_run_on_loop: whether short batches need no thread: their time is predictable, and they wait for no device.
    """

    def __init__(self, *, has_process: bool, may_run_on_loop: bool) -> None:
        self.is_broken = False
        self.has_process = has_process
        self.may_run_on_loop = may_run_on_loop

    @property
    def most_rows(self) -> int | None:
        """The rows that the copy computes at once; None for no limit."""
        return None

    @property
    def shares_batches(self) -> bool:
        """Whether requests may share a batch, as far as known."""
        return True

    @property
    def caller(self) -> CallingExecution | None:
        """The execution in progress of a model that may call other models."""
        return None

    async def is_ready(self) -> bool:
        """Return whether the model itself says that it is ready for requests. On the event loop."""
        return True

    def prepare(self, requests: list[InferRequest], *, is_behind: bool) -> PreparedBatch | None:  # noqa: ARG002  (of subclasses)
        """Prepare a batch while another one is computed, if it `is_behind` one; None if there is nothing to prepare."""
        return None

    def call_beside(self, function: Callable[..., object], *arguments: Any) -> bool:  # noqa: ARG002  (of subclasses)
        """Call a function on the thread that prepares batches; returns False if there is none."""
        return False

    def begin(self, requests: list[InferRequest], batch: BegunBatch) -> bool:  # noqa: ARG002  (of subclasses)
        """See `RequestBackend.begin`."""
        return False

    def let_go(self) -> None:
        """See `RequestBackend.let_go`."""

    def enter_thread(self) -> None:
        """Use the calling thread's memory for batches from now on."""

    def run(self, requests: list[InferRequest], prepared: PreparedBatch | None = None, begun_ns: int = 0) -> Results:
        """Compute a batch on the calling thread. Afterwards `is_broken` tells if the copy can compute more.

        Args:
            requests: the batch.
            prepared: the batch as `prepare` has returned it.
            begun_ns: time at which `begin` began it (`time.monotonic_ns`); 0 if it has not begun.
        """
        raise NotImplementedError(len(requests), prepared, begun_ns)

    def run_on_thread(
        self, requests: list[InferRequest], prepared: PreparedBatch | None, begun_ns: int, *, is_behind: bool
    ) -> Results:
        """Compute a batch on the copy's thread; see `run`. If it is behind another one, its late requests are left out."""
        now = time.monotonic() if is_behind else 0.0
        late = [request for request in requests if is_late(request, now, now)] if is_behind else []
        if not late:
            return self.run(requests, prepared, begun_ns)
        in_time = [request for request in requests if request not in late]
        return [LateRequests(late), *(self.run(in_time) if in_time else ())]

    def broken(self, requests: list[InferRequest], error: InstanceLostError) -> Results:
        """Return the results of a batch that has broken the copy."""
        self.is_broken = True
        return lost(requests, what="model's process" if self.has_process else "device", fault=first_line(error))

    @property
    def can_reload(self) -> bool:
        """Whether `reloaded` loads the model; otherwise it suffices that the thread of a stuck copy is free again."""
        return False

    def reloaded(self) -> BatchRunner:
        """Load the copy again, on the calling thread, after it has broken.

        Raises:
            Exception: the copy cannot be loaded.
        """
        raise NotImplementedError

    def give_up(self) -> None:
        """Abandon a batch that another thread computes, and end it if the runtime can."""

    def close(self) -> None:
        """Clean up a copy with a process of its own. May take long."""

    def stop(self) -> None:
        """End further threads of the copy after their calls, without waiting for them."""


def lost(requests: list[InferRequest], *, what: str = "device", fault: str | None = None) -> list[LostRequests]:
    """Return the result of a batch whose copy broke; `fault`: see `LostRequests`."""
    return [LostRequests(requests, UnavailableError(f"the {what} failed while it computed this request; send it again"), fault)]


def first_line(error: Exception) -> str:
    """Return the first line of an error's text; the name of its class if it has none."""
    return str(error).strip().split("\n")[0] or type(error).__name__
