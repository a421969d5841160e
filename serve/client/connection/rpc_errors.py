"""The one place where gRPC's statuses become exceptions."""

from __future__ import annotations

import re
from typing import Any

from serve.client.errors import (
    RETRY_HINT_KEY,
    Cancelled,
    InferenceClientError,
    InvalidRequest,
    Repeat,
    ServerUnavailable,
    Unsupported,
    deadline_exceeded,
    error_of_code,
    hinted_s,
)

# What grpc itself says when no server has spoken.
NO_CONNECTION = (
    "failed to connect",
    "connections to all backends failing",
    "DNS resolution failed",
    "errors resolving",
    "address lookup failed",
)
CANCELLED_HERE = ("Channel closed!", "Channel closed", "Locally cancelled by application!", "Cancelled by application")
# The second where the server has begun to answer.
TIME_IS_UP = ("Deadline Exceeded", "Stream removed (Deadline Exceeded)")
# grpc.aio forgets the server's status if it fails to write before it has read it.
WRITE_FAILED = "Internal error from Core"
CLOSED = "{} closed the connection; is the server still running, is this its gRPC port (8001 by default), and does it want TLS?"
REFUSALS = ("UNAVAILABLE", "RESOURCE_EXHAUSTED")  # a server that says so has not begun with the request
TLS_TROUBLE = ("SSL", "CERTIFICATE", "Peer name", "erification check", "andshak")
LOST_CONNECTION = ("Socket closed", "Connection reset", "recvmsg:", "GOAWAY", "Stream removed")


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
    if (trouble := _connection_trouble(code, details, address)) is not None:
        return trouble
    if (said_here := _said_by_grpc(code, details, method=method, address=address, timeout_s=timeout_s)) is not None:
        return said_here
    message = details or f"{address} answered {method} with {code} and no explanation"
    retry_after_s, repeat = _retry_hint(error.trailing_metadata(), code)
    return error_of_code(code, message, retry_after_s=retry_after_s, repeat=repeat)


def _said_by_grpc(
    code: str, details: str, *, method: str, address: str, timeout_s: float | None
) -> InferenceClientError | None:
    if code == "DEADLINE_EXCEEDED" and details.startswith(TIME_IS_UP):
        return deadline_exceeded(method=method, address=address, limit_s=timeout_s)
    if code == "UNIMPLEMENTED" and details in ("", "Method not found!"):
        return Unsupported(f"the server at {address} does not offer {method}")
    if code == "RESOURCE_EXHAUSTED" and "larger than max" in details:
        # grpc has one status for "too many" and "too big"; only the first goes away by waiting.
        return InvalidRequest(f"the message is too big for the server at {address}: {details}", code=code)
    if code == "CANCELLED" and details in CANCELLED_HERE:
        return Cancelled(f"{method} was given up before {address} answered: the call was cancelled, or the client closed")
    return None


def _connection_trouble(code: str, details: str, address: str) -> ServerUnavailable | None:
    if code != "UNAVAILABLE" and details != WRITE_FAILED:
        return None
    has_none = any(text in details for text in NO_CONNECTION)
    if details == WRITE_FAILED or any(text in details for text in LOST_CONNECTION):
        # Where it was lost before, this call has not been sent.
        return ServerUnavailable(CLOSED.format(address), repeat=Repeat.SAFE if has_none else Repeat.IF_IDEMPOTENT)
    if "http1" in details:
        text = f"{address} answers in HTTP/1, not gRPC; is it the HTTP port? The gRPC port is 8001 unless chosen otherwise"
        return ServerUnavailable(text)
    if any(text in details for text in TLS_TROUBLE):
        return ServerUnavailable(_tls_trouble(details, address))
    if has_none:
        reasons = re.findall(r"connection refused|timed out|timeout|not found|no such file|unreachable", details.lower())
        reason = f" ({reasons[-1]})" if reasons else ""
        text = f"no server answers at {address}{reason}; start one with: halfserve serve PATH"
        return ServerUnavailable(text, repeat=Repeat.SAFE)
    return None


def _tls_trouble(details: str, address: str) -> str:
    if "WRONG_VERSION_NUMBER" in details:
        return f"{address} does not speak TLS; connect without it, or ask the server's TLS port"
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return f"the certificate of {address} is not signed by an authority that this client trusts; give the right one"
    if "verification check" in details.lower() or "Peer name" in details:
        return f"the certificate of {address} was made for another name; give the name that stands in it (server_name)"
    return f"the TLS handshake with {address} failed; does the server ask for a client certificate? ({details[-120:]})"


def _retry_hint(trailers: Any, code: str) -> tuple[float | None, Repeat]:
    """Seconds to wait, and whether to come back at all: any value but a number of milliseconds is gRPC's word for "don't"."""
    hints = [str(value) for key, value in trailers or () if key == RETRY_HINT_KEY]
    if hints and (wait_s := hinted_s(hints[0])) is not None:
        return wait_s, Repeat.SAFE if code in REFUSALS else Repeat.NO
    # Without a hint it may have been a proxy that lost the server half-way.
    return None, Repeat.IF_IDEMPOTENT if code == "UNAVAILABLE" and not hints else Repeat.NO
