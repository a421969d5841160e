"""Chooses the requests that are logged or traced. Lives on the event loop, as long as the server."""

from __future__ import annotations

import time
from collections.abc import Callable

from serve.engine.errors import InferenceError
from serve.engine.inference_core import InferenceCore
from serve.engine.model import Model
from serve.observability.access_log import AccessLogger
from serve.observability.exchange import Caller, Exchange
from serve.observability.tracer import Tracer

StatusName = Callable[[Exception | None], str]
NEVER = 2**62  # requests; no server lives to see that many


class Observer:
    """Counts requests down to the next one that is of interest: all that a request costs that is not.

    Attributes:
        until: requests until the next one that may be of interest; whoever counts it down to 0 calls `choose` at once.
        tracer: shown the requests that may be traced; None while nothing is.
    """

    def __init__(self, core: InferenceCore, status_name: StatusName) -> None:
        """An observer that listens to nothing yet.

        Args:
            core: the models.
            status_name: the wire's word for an error, such as "INVALID_ARGUMENT"; of None, for a client that has gone.
        """
        self._core = core
        self._status_name = status_name
        self.log: AccessLogger | None = None
        self.tracer: Tracer | None = None
        self._log_every = self._trace_every = NEVER
        self._log_left = self._trace_left = self._step = self.until = NEVER

    def listen(self, log: AccessLogger | None, log_every: int, tracer: Tracer | None, trace_every: int) -> None:
        """What to do from now on.

        Args:
            log: gets failures, and some answers; None logs nothing.
            log_every: one answer in so many; 0 none.
            tracer: decides what is traced, and keeps it; None traces nothing.
            trace_every: one request in so many is shown to it, and all whose callers have decided on it; 0 none.
        """
        self.log, self.tracer = log, tracer
        self._log_left = self._log_every = log_every or NEVER
        self._trace_left = self._trace_every = trace_every or NEVER
        self._step = self.until = min(self._log_left, self._trace_left)

    def choose(self, exchange: Exchange) -> None:
        """Decide whether the request that was just counted is logged, and whether a trace is due with it.

        The countdown begins anew if it has ended; one runs for the log and the traces together.
        """
        if self.until > 0:
            return
        self._log_left -= self._step
        self._trace_left -= self._step
        if not self._log_left:
            self._log_left = self._log_every
            exchange.is_logged = True
        if not self._trace_left:
            self._trace_left = self._trace_every
            exchange.is_trace_due = True
        self._step = self.until = min(self._log_left, self._trace_left)

    def began(self, exchange: Exchange) -> None:
        """Decide whether the request is traced."""
        if self.tracer is not None and exchange.model is not None:
            exchange.trace = self.tracer.decide(exchange.model.name, exchange.caller.parent, is_due=exchange.is_trace_due)

    def answered(self, exchange: Exchange, response_bytes: int) -> None:
        """Log and trace it."""
        now_ns = time.monotonic_ns()
        if exchange.is_logged and self.log is not None:
            self.log.answered(exchange, response_bytes, now_ns)
        if exchange.trace is not None and self.tracer is not None:
            self.tracer.answered(exchange, response_bytes, now_ns)

    def unanswered(self, exchange: Exchange, error: Exception | None) -> None:
        """Trace it; whether it is logged does not hang on its being chosen (see `failed`)."""
        if exchange.trace is not None and self.tracer is not None:
            self.tracer.failed(exchange, self._status_name(error), error, time.monotonic_ns())

    def failed(self, caller: Caller, asked: tuple[str, str, str], request_bytes: int, error: Exception | None) -> None:
        """Log any request that got an error, or (None) whose client has gone; `asked` is its model, version and id."""
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
