"""From requests that are traced to records that a thread turns into spans."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from serve.engine.model_statistics import BatchTimes
from serve.observability.exchange import MAX_TEXT, Exchange, told
from serve.observability.outbox import Outbox
from serve.observability.trace_context import TraceContext
from serve.observability.trace_settings import TraceControl


@dataclass(slots=True, kw_only=True)  # frozen ones take five times as long to make
class TraceRecord:
    """A request that has ended; times are nanoseconds since the epoch, `batch` on time.monotonic_ns()'s clock.

    Attributes:
        context: its trace.
        model: asked.
        version: of it.
        request_id: as sent, its first MAX_TEXT bytes.
        rows: of its batch dimension.
        request_bytes: of its message.
        response_bytes: of the answer; 0 without one.
        status: the wire's word.
        error: for the client; "" where all was well.
        peer: the client's address.
        epoch_ns: what the monotonic clock is behind the epoch's.
        arrived_ns: on the monotonic clock, as all that follow.
        ended_ns: when the answer was handed over.
        batch: shared by all records of one batch; None where it was not computed.
        batch_rows: of all its requests.
    """

    context: TraceContext
    model: str
    version: str
    request_id: str
    rows: int
    request_bytes: int
    response_bytes: int
    status: str
    error: str
    peer: str
    epoch_ns: int
    arrived_ns: int
    ended_ns: int
    batch: BatchTimes | None
    batch_rows: int


class Tracer:
    """Decides what is traced and keeps what happened to it. Lives on the event loop."""

    def __init__(self, control: TraceControl, outbox: Outbox[TraceRecord]) -> None:
        self._control = control
        self._outbox = outbox
        self.traced = 0

    @property
    def every(self) -> int:
        """One request in so many is to be decided on: all of them where models differ in their settings."""
        return self._control.everywhere.settings.rate if self._control.is_alike else 1

    def decide(self, model: str, parent: TraceContext | None, *, is_due: bool) -> TraceContext | None:
        """The trace of a request that begins; None where it is not traced.

        Args:
            model: that it asks.
            parent: what its caller says; it decides, where there is one.
            is_due: it is one in `every`.
        """
        if parent is None and not is_due:
            return None
        sampler = self._control.by_model.get(model, self._control.everywhere)
        decided = True if self._control.is_alike else None  # where all settings are the same, counting to `every` was all
        if not sampler.take(decided=decided if parent is None else parent.sampled):
            return None
        # Not secret, and made as OpenTelemetry's own generator makes them.
        return parent or TraceContext(trace_id=random.getrandbits(128) or 1)

    def answered(self, exchange: Exchange, response_bytes: int, ended_ns: int) -> None:
        """A traced request got its answer."""
        self._keep(exchange, response_bytes=response_bytes, status="OK", error="", ended_ns=ended_ns)

    def failed(self, exchange: Exchange, status: str, error: Exception | None, ended_ns: int) -> None:
        """A traced request got an error, or nobody waits for it."""
        self._keep(exchange, response_bytes=0, status=status, error=told(error) or status, ended_ns=ended_ns)

    def _keep(self, exchange: Exchange, *, response_bytes: int, status: str, error: str, ended_ns: int) -> None:
        model, context = exchange.model, exchange.trace
        if model is None or context is None:
            return
        self.traced += 1
        batch = None if error else model.statistics.latest
        self._outbox.put(
            TraceRecord(
                context=context,
                model=model.name,
                version=str(model.version),
                request_id=exchange.request_id[:MAX_TEXT].decode("utf-8", "replace"),
                rows=exchange.rows,
                request_bytes=exchange.request_bytes,
                response_bytes=response_bytes,
                status=status,
                error=error,
                peer=exchange.caller.peer,
                epoch_ns=time.time_ns() - time.monotonic_ns(),
                arrived_ns=exchange.arrived_ns,
                ended_ns=ended_ns,
                batch=batch,
                batch_rows=model.statistics.latest_rows if batch else 0,
            )
        )
