"""Selects the requests that are logged, traced or captured, and hands their records to the log, the tracer and the capture."""

from __future__ import annotations

import time
from collections.abc import Callable

from halfserve.serve.engine.errors import InferenceError
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model import Model
from halfserve.serve.observability.access_log import AccessLogger
from halfserve.serve.observability.capture import NEVER, Capture
from halfserve.serve.observability.inference_record import MAX_TEXT, Caller, InferenceRecord
from halfserve.serve.observability.tracing import Tracer

StatusName = Callable[[Exception | None], str]


class Observer:
    """Selects requests by a countdown, which is the only cost of all others. Lives on the event loop.

    Attributes:
        until: number of requests until the next one that may be selected; `Inference.infer` counts it down, and calls `select`
            at 0.
        log: writes the access log; None while it is off.
        tracer: decides on requests that may be traced; None while traces are off.
        capture: keeps the messages of some requests; None without.
    """

    __slots__ = (
        "_capture_left", "_core", "_log_every", "_log_left", "_status_name", "_step", "_trace_every", "_trace_left", "capture",
        "log", "tracer", "until",
    )  # fmt: skip

    def __init__(self, core: InferenceCore, status_name: StatusName) -> None:
        """Make an observer that selects nothing yet.

        `status_name` names the gRPC status of an error, such as "INVALID_ARGUMENT"; for None that of a cancelled call.
        """
        self._core = core
        self._status_name = status_name
        self.log: AccessLogger | None = None
        self.tracer: Tracer | None = None
        self.capture: Capture | None = None
        self._log_every = self._trace_every = NEVER
        self._log_left = self._trace_left = self._capture_left = self._step = self.until = NEVER

    def listen(
        self,
        log: AccessLogger | None,
        log_every: int,
        tracer: Tracer | None,
        trace_every: int,
        capture: Capture | None = None,
    ) -> None:
        """Set the access log, the tracer and the capture from now on; None logs, traces or captures nothing.

        The log gets failures, and one in `log_every` answers; the tracer decides on one in `trace_every` requests, and on all
        whose callers sent a decision. An interval of 0 selects no request.
        """
        self.log, self.tracer, self.capture = log, tracer, capture
        self._log_left = self._log_every = log_every or NEVER
        self._trace_left = self._trace_every = trace_every or NEVER
        self._capture_left = NEVER if capture is None else capture.next_after()
        self._step = self.until = min(self._log_left, self._trace_left, self._capture_left)

    def select(self, record: InferenceRecord) -> bool:
        """Decide whether the request that was just counted is logged and whether it is traced; return whether it is captured.

        One countdown serves the log, the traces and the capture; it is restarted here once it has ended.
        """
        is_trace_due = is_captured = False
        if self.until <= 0:
            self._log_left -= self._step
            self._trace_left -= self._step
            if not self._log_left:
                self._log_left = self._log_every
                record.is_logged = True
            if not self._trace_left:
                self._trace_left = self._trace_every
                is_trace_due = True
            self._capture_left -= self._step
            if not self._capture_left and self.capture is not None:
                self._capture_left = self.capture.next_after()
                is_captured = self.capture.wants(record.model)
            self._step = self.until = min(self._log_left, self._trace_left, self._capture_left)
        if self.tracer is not None:
            record.trace = self.tracer.decide(record.model.name, record.caller.parent, is_due=is_trace_due)
        return is_captured

    def ended(self, record: InferenceRecord, result: bytes | Exception | None) -> None:
        """Log the answer of a selected request, trace and capture its end; a `result` of None says that its client has
        disconnected.

        Failures are not logged here: `failed` logs them, whether the request was selected or not.
        """
        statistics = record.model.statistics
        record.ended_ns = time.monotonic_ns()
        record.request_id = record.request_id[:MAX_TEXT]
        if isinstance(result, bytes):
            record.status, record.error, record.response_bytes = "OK", None, len(result)
            record.batch, record.batch_rows = statistics.latest, statistics.latest_rows
            if record.is_logged and self.log is not None:
                self.log.answered(record)
        else:
            record.status, record.error, record.response_bytes = self._status_name(result), result, 0
            record.batch, record.batch_rows = None, 0
        if record.trace is not None and self.tracer is not None:
            self.tracer.ended(record)
        if record.captured is not None and self.capture is not None:
            self.capture.ended(record)

    def failed(self, caller: Caller, asked: tuple[str, str, str], request_bytes: int, error: Exception | None) -> None:
        """Log a request that failed or, if `error` is None, whose client left; `asked` is its model, version and id."""
        if self.log is not None:
            model = self._model(asked[0], asked[1])
            version = asked[1] if model is None else str(model.version)
            spent_ns = 0
            if model is not None and error is not None and model.statistics.latest_failure[0] == id(error):
                spent_ns = model.statistics.latest_failure[1]
            self.log.failed(caller, (asked[0], version, asked[2]), request_bytes, self._status_name(error), error, spent_ns)

    def _model(self, name: str, version: str) -> Model | None:
        try:
            return self._core.model(name, version)
        except InferenceError:
            return None
