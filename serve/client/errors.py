"""What can go wrong when a server is asked, and the one place where gRPC's statuses become exceptions."""

from __future__ import annotations

import re
from typing import Any

RETRY_HINT_KEY = "grpc-retry-pushback-ms"  # gRPC's own trailer for "come back in so many milliseconds"

# What grpc itself says when no server has spoken.
NO_CONNECTION = ("failed to connect", "DNS resolution failed", "errors resolving", "address lookup failed")
LOST_CONNECTION = ("Socket closed", "Connection reset", "recvmsg:", "GOAWAY", "Stream removed")


class InferenceClientError(Exception):
    """A request that was not answered; every error of this package is one.

    Attributes:
        code: the gRPC status by name, such as "INTERNAL"; errors found before anything is sent have the status that a server
            would have given.
        retry_after_s: seconds after which the server asks to be tried again; None when it gave no hint.
    """

    code = "UNKNOWN"

    def __init__(self, message: str, *, code: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code or self.code
        self.retry_after_s = retry_after_s


class ServerUnavailable(InferenceClientError):  # noqa: N818  (reads as what happened in `except ServerUnavailable`)
    """Nobody answers at the address, or the server is about to stop."""

    code = "UNAVAILABLE"


class DeadlineExceeded(InferenceClientError):  # noqa: N818  (see ServerUnavailable)
    """There was no answer within timeout_s."""

    code = "DEADLINE_EXCEEDED"


class InvalidRequest(InferenceClientError):  # noqa: N818  (see ServerUnavailable)
    """The request does not fit the model or the protocol; sending it again will not help."""

    code = "INVALID_ARGUMENT"


class ModelNotFound(InferenceClientError):  # noqa: N818  (see ServerUnavailable)
    """The server has no model of this name and version."""

    code = "NOT_FOUND"


class Overloaded(InferenceClientError):  # noqa: N818  (see ServerUnavailable)
    """The server's queue is full; try again later (`retry_after_s`) or send less."""

    code = "RESOURCE_EXHAUSTED"


_BY_CODE = {kind.code: kind for kind in (ServerUnavailable, DeadlineExceeded, InvalidRequest, ModelNotFound, Overloaded)}


def from_rpc_error(error: Any, *, method: str, address: str, timeout_s: float | None) -> InferenceClientError:
    """The exception for one failed call.

    Args:
        error: a grpc.RpcError that is also a grpc.Call, as both grpc and grpc.aio raise it.
        method: the RPC's name, such as "ModelInfer".
        address: whom was asked.
        timeout_s: the deadline that the call had.

    Returns:
        The exception to raise. Its text is the server's own where the server spoke; where grpc spoke, it is said in one line
        what to do.
    """
    code, details = error.code().name, (error.details() or "").strip()
    retry_after_s = _retry_hint(error.trailing_metadata())
    if code == "UNAVAILABLE" and (message := _connection_trouble(details, address)):
        return ServerUnavailable(message)
    if code == "DEADLINE_EXCEEDED" and details.startswith("Deadline Exceeded"):
        return deadline_exceeded(method=method, address=address, limit_s=timeout_s)
    if code == "UNIMPLEMENTED" and details in ("", "Method not found!"):
        return InferenceClientError(f"the server at {address} does not offer {method}", code=code)
    if code == "RESOURCE_EXHAUSTED" and "larger than max" in details:
        # grpc has one status for "too many" and "too big"; only the first goes away by waiting.
        return InvalidRequest(f"the message is too big for the server at {address}: {details}", code=code)
    message = details or f"{address} answered {method} with {code} and no explanation"
    return _BY_CODE.get(code, InferenceClientError)(message, code=code, retry_after_s=retry_after_s)


def deadline_exceeded(*, method: str, address: str, limit_s: float | None) -> DeadlineExceeded:
    """The error for a call whose time has run out on this side."""
    limit = "in time" if limit_s is None else f"within {limit_s:g} s"
    return DeadlineExceeded(f"{address} did not answer {method} {limit}; allow more time or ask for less at once")


def _connection_trouble(details: str, address: str) -> str | None:
    if "http1" in details:
        return f"{address} answers in HTTP/1, not gRPC; is it the HTTP port? The gRPC port is 8001 unless chosen otherwise"
    if any(text in details for text in LOST_CONNECTION):
        return f"{address} closed the connection; is the server still running, and is this its gRPC port (8001 by default)?"
    if any(text in details for text in NO_CONNECTION):
        reasons = re.findall(r"connection refused|timed out|timeout|not found|unreachable", details.lower())
        reason = f" ({reasons[-1]})" if reasons else ""
        return f"no server answers at {address}{reason}; start one with: halfserve serve PATH"
    return None


def _retry_hint(trailers: Any) -> float | None:
    for key, value in trailers or ():
        if key == RETRY_HINT_KEY and str(value).isdigit():
            return int(value) / 1000
    return None
