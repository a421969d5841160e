"""One request that is logged or traced, from its arrival to its answer, with its W3C trace context.

https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from halfserve.serve.engine.errors import BackendError, InferenceError
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.requests import InferRequest

Result = bytes | InferenceError
MAX_ERROR: Final = 512  # most characters of an error's text
MAX_TEXT: Final = 256  # most characters of a client's text in a line or a span, because many of them may wait for a disk
PARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
SAMPLED: Final = 0x01


def loggable(error: Exception | None) -> str:
    """Return the text of an error for the log; "" for a runtime's own error, whose text may contain values of tensors."""
    return "" if not isinstance(error, InferenceError) or isinstance(error, BackendError) else str(error)[:MAX_ERROR]


@dataclass(frozen=True)
class TraceContext:
    """A trace, and the caller's span in it."""

    trace_id: int  # number of 128 bits
    parent_id: int = 0  # id of the caller's span, 64 bits; 0 if the trace begins here
    sampled: bool = True  # whether the caller has decided to trace
    state: str = ""  # the caller's `tracestate`, which is passed on


def parent_of(headers: Mapping[bytes, bytes]) -> TraceContext | None:
    """Return the caller's context from the header `traceparent`; None without one, or if the standard calls it invalid."""
    value = headers.get(b"traceparent")
    if value is None:
        return None
    match = PARENT.fullmatch(value.strip())
    if match is None or (match[4] and value.startswith(b"00")):
        return None
    trace_id, parent_id = int(match[1], 16), int(match[2], 16)
    if not (trace_id and parent_id):
        return None
    return TraceContext(
        trace_id=trace_id,
        parent_id=parent_id,
        sampled=bool(int(match[3], 16) & SAMPLED),
        state=headers.get(b"tracestate", b"").decode("ascii", "replace"),
    )


class Caller:
    """The origin of a call.

    Attributes:
        peer: address of the client.
        headers: headers of the call, names in lower case.
        token: name of the token's holder; "" without a token.
        parent: trace context that the headers contain; None if they contain none.
        is_rest: the call came over REST, not over gRPC.
    """

    __slots__ = ("headers", "is_rest", "parent", "peer", "token")

    def __init__(self, peer: str, headers: Mapping[bytes, bytes], token: str = "", *, is_rest: bool = False) -> None:
        self.peer = peer
        self.is_rest = is_rest
        self.headers = headers
        self.token = token
        self.parent = parent_of(headers)


class RequestListener(Protocol):
    """Records the course of an observed request."""

    def began(self, exchange: ObservedRequest) -> None:
        """The request is valid and about to be queued; `exchange.model` is set."""

    def answered(self, exchange: ObservedRequest, response_bytes: int) -> None:
        """The request has been answered."""

    def unanswered(self, exchange: ObservedRequest, error: Exception | None) -> None:
        """The request has failed; `error` is None if its client has disconnected."""


class ObservedRequest:
    """A request that is logged or traced. Other requests have no such object.

    Attributes:
        caller: client and headers of the call.
        request_bytes: size of the serialized request.
        model: the requested model version; None until the request has been checked.
        request_id: first MAX_TEXT bytes of the request's id; b"" without one.
        rows: size of its batch dimension.
        arrived_ns: time of arrival on time.monotonic_ns()'s clock.
        is_logged: whether its answer gets a line.
        is_trace_due: whether its turn in the trace rate has come.
        trace: its trace context; None if it is not traced.
        cancel: removes it from the queue.
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

    def __init__(self, listener: RequestListener, caller: Caller) -> None:
        self._listener = listener
        self.caller = caller
        self.is_logged = self.is_trace_due = False
        self.model: Model | None = None
        self.trace: TraceContext | None = None
        self.cancel: Callable[[], None] | None = None

    def expect(self, request_bytes: int, reply: Callable[[Result], None]) -> None:
        """Record the size of a request that has arrived, and take over its reply."""
        self.request_bytes = request_bytes
        self._reply = reply

    def taken(self, model: Model, request_id: bytes, request: InferRequest) -> None:
        """Record the model and the properties of a valid request, which is about to be queued."""
        self.model = model
        self.request_id = request_id[:MAX_TEXT]
        self.rows = request.rows
        self.arrived_ns = request.arrived_ns
        self._listener.began(self)

    def answered(self, result: Result) -> None:
        """Record the result and pass it on."""
        if isinstance(result, InferenceError):
            self._listener.unanswered(self, result)
        else:
            self._listener.answered(self, len(result))
        reply = self._reply
        self._break_cycles()
        reply(result)

    def refused(self, error: Exception) -> None:
        """Record that the request was not queued."""
        self._listener.unanswered(self, error)
        self._break_cycles()

    def gone(self) -> None:
        """Cancel the request, because its client has disconnected."""
        if self.cancel is not None:
            self.cancel()
        self._listener.unanswered(self, None)
        self._break_cycles()

    def _break_cycles(self) -> None:
        """Drop references that lead back here, so that no request waits for the garbage collector."""
        self.cancel = None
        self._reply = _discard


def _discard(result: Result) -> None:
    """Do nothing: the reply of a request that has ended."""
