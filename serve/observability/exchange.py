"""One request that is looked at more closely, from its arrival to its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from serve.engine.errors import BackendError, InferenceError
from serve.engine.model import Model
from serve.engine.requests import InferRequest
from serve.observability.trace_context import TraceContext, parent_of

Result = bytes | InferenceError
MAX_ERROR = 512  # characters
MAX_TEXT = 256  # characters of what clients choose, in a line or a span: many of them may wait for a disk


def told(error: Exception | None) -> str:
    """What may be written down of an error: not what a runtime says, which may quote the values it failed on."""
    return "" if not isinstance(error, InferenceError) or isinstance(error, BackendError) else str(error)[:MAX_ERROR]


class Caller:
    """Where a call comes from.

    Attributes:
        peer: the client's address.
        headers: of the call.
        parent: the trace it belongs to; None where it names none.
    """

    __slots__ = ("headers", "parent", "peer")

    def __init__(self, peer: str, headers: Mapping[bytes, bytes]) -> None:
        self.peer = peer
        self.headers = headers
        self.parent = parent_of(headers)


class Listener(Protocol):
    """Who wants to know of an exchange."""

    def began(self, exchange: Exchange) -> None:
        """The request has been checked; its model is known."""

    def answered(self, exchange: Exchange, response_bytes: int) -> None:
        """It got its answer."""

    def unanswered(self, exchange: Exchange, error: Exception | None) -> None:
        """It got an error; None: its client has gone."""


class Exchange:
    """A request on its way. Made for those that are logged or traced; others go by untouched.

    Attributes:
        caller: of the call that brought it.
        request_bytes: of its message.
        model: that it asks; None until it has been checked.
        request_id: as sent; b"" where there is none.
        rows: of its batch dimension.
        arrived_ns: on time.monotonic_ns()'s clock.
        is_logged: its answer gets a line.
        is_trace_due: it is the one in so many that is traced.
        trace: where it is traced.
        cancel: frees its place.
    """

    __slots__ = (
        "_listener",
        "_reply",
        "arrived_ns",
        "caller",
        "cancel",
        "is_logged",
        "is_trace_due",
        "model",
        "request_bytes",
        "request_id",
        "rows",
        "trace",
    )

    def __init__(self, listener: Listener, caller: Caller) -> None:
        self._listener = listener
        self.caller = caller
        self.is_logged = self.is_trace_due = False
        self.model: Model | None = None
        self.trace: TraceContext | None = None
        self.cancel: Callable[[], None] | None = None

    def expect(self, request_bytes: int, reply: Callable[[Result], None]) -> None:
        """The request has come; `reply` waits for its result."""
        self.request_bytes = request_bytes
        self._reply = reply

    def taken(self, model: Model, request_id: bytes, request: InferRequest) -> None:
        """The request is right; it is about to be queued."""
        self.model = model
        self.request_id = request_id
        self.rows = request.rows
        self.arrived_ns = request.arrived_ns
        self._listener.began(self)

    def answered(self, result: Result) -> None:
        """Take note of the result and pass it on."""
        if isinstance(result, InferenceError):
            self._listener.unanswered(self, result)
        else:
            self._listener.answered(self, len(result))
        reply = self._reply
        self._let_go()
        reply(result)

    def refused(self, error: Exception) -> None:
        """The request was not taken."""
        self._listener.unanswered(self, error)
        self._let_go()

    def gone(self) -> None:
        """The client does not wait any more."""
        if self.cancel is not None:
            self.cancel()
        self._listener.unanswered(self, None)
        self._let_go()

    def _let_go(self) -> None:
        """Forget what leads back here: so nothing of a request has to wait for the garbage collector."""
        self.cancel = None
        self._reply = _nobody


def _nobody(result: Result) -> None:
    """Nobody waits for it."""
