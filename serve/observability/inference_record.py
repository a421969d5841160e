"""The record of one inference request: its caller, model and sizes, and its W3C trace context.

https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from halfserve.protos.captured_requests import CapturedMessage
from halfserve.serve.engine.errors import BackendError, InferenceError
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.model_statistics import BatchTimes
from halfserve.serve.engine.tensors import Tensors

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
        client: returns the name under which the caller shares threads with other clients; None if it has none.
        is_rest: the call came over REST, not over gRPC.
        parent: trace context that the headers contain; None if they contain none.
    """

    __slots__ = ("client", "headers", "is_rest", "parent", "peer", "token")

    def __init__(
        self,
        peer: str,
        headers: Mapping[bytes, bytes],
        token: str = "",
        client: Callable[[], str] | None = None,
        *,
        is_rest: bool = False,
    ) -> None:
        self.peer = peer
        self.headers = headers
        self.token = token
        self.client = client
        self.is_rest = is_rest
        self.parent = parent_of(headers)


class InferenceRecord:
    """One valid inference request, from its arrival to its answer. The access log, the traces and the capture read it.

    Each request has one. The subclass that answers the request sets the attributes: one constructor is faster than two.

    Attributes:
        caller: client and headers of the call.
        model: the requested model version.
        request_id: the request's id; b"" without one.
        rows: size of its batch dimension.
        request_bytes: size of the serialized request.
        arrived_ns: time of arrival on time.monotonic_ns()'s clock.
        is_logged: whether its answer gets a line.
        trace: its trace context; None if it is not traced.
        captured: its message; None if it is not captured.

    The others are set at the end of a request that is logged, traced or captured:

        ended_ns: time at which the answer was handed over, on the same clock.
        status: name of the gRPC status.
        error: the error; None for an answer, and for a client that has disconnected.
        response_bytes: size of the serialized response; 0 without one.
        batch: times at which its batch passed each stage; None if the request was not computed.
        batch_rows: rows of its whole batch.
    """

    __slots__ = (
        "arrived_ns", "batch", "batch_rows", "caller", "captured", "ended_ns", "error", "is_logged", "model", "request_bytes",
        "request_id", "response_bytes", "rows", "status", "trace",
    )  # fmt: skip

    caller: Caller
    model: Model
    request_id: bytes
    rows: int
    request_bytes: int
    arrived_ns: int
    is_logged: bool
    trace: TraceContext | None
    captured: CapturedMessage | None
    ended_ns: int
    status: str
    error: Exception | None
    response_bytes: int
    batch: BatchTimes | None
    batch_rows: int

    def __call__(self, result: Tensors | InferenceError) -> None:
        """Take the outputs or the error.

        It is declared here because mypyc gives a class with this method another layout than a class without.
        """
        raise NotImplementedError
