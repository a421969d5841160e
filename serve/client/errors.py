"""Exceptions of the client, and their mapping from gRPC statuses."""

# ruff: noqa: N818  (the names read as what happened in `except ServerUnavailable`)
from __future__ import annotations

import re
from enum import Enum
from typing import Any

import numpy as np

LISTING = "`halfserve models` (RepositoryIndex)"  # in the server's errors; see engine/errors.py
RETRY_HINT_KEY = "grpc-retry-pushback-ms"  # gRPC's own trailer for a retry delay in milliseconds
LONGEST_HINT = 10  # digits of the longest accepted delay, 115 days, as in gRPC's own clients
# Status texts that grpc generates itself, without a server.
NO_CONNECTION = (
    "failed to connect",
    "connections to all backends failing",
    "DNS resolution failed",
    "errors resolving",
    "address lookup failed",
)
CANCELLED_HERE = ("Channel closed!", "Channel closed", "Locally cancelled by application!", "Cancelled by application")
# The second text occurs if the server has begun to answer.
TIME_IS_UP = ("Deadline Exceeded", "Stream removed (Deadline Exceeded)")
# grpc.aio loses the server's status if it fails to write before it has read the status.
WRITE_FAILED = "Internal error from Core"
CLOSED = "{} closed the connection; is the server still running, is this its gRPC port (8001 by default), and does it want TLS?"
REFUSALS = ("UNAVAILABLE", "RESOURCE_EXHAUSTED")  # statuses of a request that the server has not started to process
TLS_TROUBLE = ("SSL", "CERTIFICATE", "Peer name", "erification check", "andshak")
LOST_CONNECTION = ("Socket closed", "Connection reset", "recvmsg:", "GOAWAY", "Stream removed")


def hinted_s(hint: str) -> float | None:
    """Seconds of a retry hint; None for any other value than a number of milliseconds, which means "do not retry"."""
    return int(hint) / 1000 if hint.isdecimal() and hint.isascii() and len(hint) <= LONGEST_HINT else None


class Repeat(Enum):
    """Whether a call that failed may be made again."""

    SAFE = "safe"  # the server has not started to process the call
    IF_IDEMPOTENT = "if idempotent"  # it is unknown how far the server got
    NO = "no"  # the call would fail again, or the server forbids a repetition


class ClientError(Exception):
    """A request was not answered; base class of every error of this package.

    Attributes:
        code: name of the gRPC status, such as "INTERNAL"; errors found before anything is sent have the status that a server
            would have given.
        retry_after_s: delay in seconds that the server asks for before a retry; None if it gave no hint.
        repeat: whether the call may be repeated.
        elsewhere: whether another member of a cluster may answer at once, so that a repetition need not wait.
    """

    code = "UNKNOWN"
    elsewhere = False

    def __init__(
        self, message: str, *, code: str | None = None, retry_after_s: float | None = None, repeat: Repeat = Repeat.NO
    ) -> None:
        super().__init__(message)
        self.code = code or self.code
        self.retry_after_s = retry_after_s
        self.repeat = repeat


class ServerUnavailable(ClientError):
    """No server answers at the address, or the server is about to stop."""

    code = "UNAVAILABLE"


class DeadlineExceeded(ClientError):
    """There was no answer within timeout_s."""

    code = "DEADLINE_EXCEEDED"


class InvalidRequest(ClientError):
    """The request does not fit the model or the protocol; sending it again will not help."""

    code = "INVALID_ARGUMENT"


class ModelNotFound(ClientError):
    """The server has no model of this name and version."""

    code = "NOT_FOUND"


class AccessDenied(ClientError):
    """The server does not know this client (code "UNAUTHENTICATED") or does not let it do this ("PERMISSION_DENIED")."""

    code = "PERMISSION_DENIED"


class Unsupported(ClientError):
    """The server does not implement the request."""

    code = "UNIMPLEMENTED"


class AlreadyExists(ClientError):
    """The object to be created exists already."""

    code = "ALREADY_EXISTS"


class Cancelled(ClientError):
    """The call was cancelled, or its client was closed."""

    code = "CANCELLED"


class Overloaded(ClientError):
    """The server's queue is full; try again later (`retry_after_s`) or send less."""

    code = "RESOURCE_EXHAUSTED"


_BY_CODE: dict[str, type[ClientError]] = {kind.code: kind for kind in ClientError.__subclasses__()} | {
    "UNAUTHENTICATED": AccessDenied,
    "FAILED_PRECONDITION": InvalidRequest,
    "OUT_OF_RANGE": InvalidRequest,
}


def error_of_code(code: str, message: str, *, retry_after_s: float | None = None, repeat: Repeat = Repeat.NO) -> ClientError:
    return _BY_CODE.get(code, ClientError)(message, code=code, retry_after_s=retry_after_s, repeat=repeat)


def deadline_exceeded(*, method: str, address: str, limit_s: float | None) -> DeadlineExceeded:
    limit = "in time" if limit_s is None else f"within {limit_s:g} s"
    return DeadlineExceeded(f"{address} did not answer {method} {limit}; allow more time or ask for less at once")


def check_text(value: object, what: str) -> None:
    """Refuse a value that the protocol cannot carry as text.
    Raises InvalidRequest: it is not a str, or contains an unpaired surrogate, which UTF-8 cannot encode.
    """
    if not isinstance(value, str):
        raise InvalidRequest(f"{what} must be text, not {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{what} must be text that UTF-8 can encode, not {value!r}: {error.reason}") from None


def is_above_0(value: object) -> bool:
    """Return whether `value` is a number above 0; True and False do not count as numbers."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool) and bool(value > 0)


def from_rpc_error(error: Any, *, method: str, address: str, timeout_s: float | None) -> ClientError:
    """Return the exception for one failed call, with the server's own text; with a line of advice if grpc reports the failure
    itself.

    `error` is a grpc.RpcError that is also a grpc.Call, as both grpc and grpc.aio raise it.
    """
    code, details = error.code().name, (error.details() or "").strip()
    if (trouble := _connection_trouble(code, details, address)) is not None:
        return trouble
    if (local := _local_failure(code, details, method=method, address=address, timeout_s=timeout_s)) is not None:
        return local
    # The server does not know how its clients reach it.
    message = details.replace(LISTING, f"`halfserve models --address {address}`")
    message = message or f"{address} answered {method} with {code} and no explanation"
    retry_after_s, repeat = _retry_hint(error.trailing_metadata(), code)
    return error_of_code(code, message, retry_after_s=retry_after_s, repeat=repeat)


def _local_failure(code: str, details: str, *, method: str, address: str, timeout_s: float | None) -> ClientError | None:
    if code == "DEADLINE_EXCEEDED" and details.startswith(TIME_IS_UP):
        return deadline_exceeded(method=method, address=address, limit_s=timeout_s)
    if code == "UNIMPLEMENTED" and details in ("", "Method not found!"):
        return Unsupported(f"the server at {address} does not offer {method}")
    if code == "RESOURCE_EXHAUSTED" and "larger than max" in details:
        # grpc has one status for "too many" and "too big"; waiting helps only against the first.
        return InvalidRequest(f"the message is too big for the server at {address}: {details}", code=code)
    if code == "CANCELLED" and details in CANCELLED_HERE:
        return Cancelled(f"{method} was cancelled before {address} answered: the call was cancelled, or the client closed")
    return None


def _connection_trouble(code: str, details: str, address: str) -> ServerUnavailable | None:
    if code != "UNAVAILABLE" and details != WRITE_FAILED:
        return None
    has_none = any(text in details for text in NO_CONNECTION)
    if details == WRITE_FAILED or any(text in details for text in LOST_CONNECTION):
        # A text of NO_CONNECTION means that the connection was lost earlier, so this call was not sent.
        return ServerUnavailable(CLOSED.format(address), repeat=Repeat.SAFE if has_none else Repeat.IF_IDEMPOTENT)
    if "http1" in details:
        text = f"{address} answers in HTTP/1, not gRPC; is it the HTTP port? The gRPC port is 8001 unless chosen otherwise"
        return ServerUnavailable(text)
    # grpc's "tcp handshaker" runs before TLS; it is shut down if a connection takes too long.
    if any(text in details.replace("tcp handshaker", "") for text in TLS_TROUBLE):
        return ServerUnavailable(_tls_trouble(details, address))
    if has_none:
        reasons = re.findall(r"connection refused|timed out|timeout|not found|no such file|unreachable", details.lower())
        reason = f" ({reasons[-1]})" if reasons else ""
        port = address.rpartition(":")[2]
        option = "" if port == "8001" or not port.isdecimal() else f" --grpc-port {port}"
        text = f"no server answers at {address}{reason}; start one with: halfserve serve PATH{option}"
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
    """Seconds to wait, and whether a repetition is allowed."""
    hints = [str(value) for key, value in trailers or () if key == RETRY_HINT_KEY]
    if hints and (wait_s := hinted_s(hints[0])) is not None:
        return wait_s, Repeat.SAFE if code in REFUSALS else Repeat.NO
    # UNAVAILABLE without a hint may come from a proxy that lost the server during the call.
    return None, Repeat.IF_IDEMPOTENT if code == "UNAVAILABLE" and not hints else Repeat.NO
