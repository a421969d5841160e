"""What can go wrong when a server is asked."""

from __future__ import annotations

from enum import Enum

RETRY_HINT_KEY = "grpc-retry-pushback-ms"  # gRPC's own trailer for "come back in so many milliseconds"
LONGEST_HINT = 10  # digits, 115 days: gRPC's own clients take no longer one, and no sleep lasts as long


def hinted_s(hint: str) -> float | None:
    """The seconds that a retry hint asks to wait; None for any value but a number of milliseconds, gRPC's word for "don't"."""
    return int(hint) / 1000 if hint.isdecimal() and hint.isascii() and len(hint) <= LONGEST_HINT else None


class Repeat(Enum):
    """Whether a call that failed may be made again.

    Attributes:
        SAFE: the server has not begun with it.
        IF_IDEMPOTENT: nobody knows how far the server got.
        NO: it would fail again, or the server does not want it.
    """

    SAFE = "safe"
    IF_IDEMPOTENT = "if idempotent"
    NO = "no"


class InferenceClientError(Exception):
    """A request that was not answered; every error of this package is one.

    Attributes:
        code: the gRPC status by name, such as "INTERNAL"; errors found before anything is sent have the status that a server
            would have given.
        retry_after_s: seconds after which the server asks to be tried again; None when it gave no hint.
        repeat: whether the call may be made again.
    """

    code = "UNKNOWN"

    def __init__(
        self, message: str, *, code: str | None = None, retry_after_s: float | None = None, repeat: Repeat = Repeat.NO
    ) -> None:
        super().__init__(message)
        self.code = code or self.code
        self.retry_after_s = retry_after_s
        self.repeat = repeat


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


class AccessDenied(InferenceClientError):  # noqa: N818  (see ServerUnavailable)
    """The server does not know this client (code "UNAUTHENTICATED") or does not let it do this ("PERMISSION_DENIED")."""

    code = "PERMISSION_DENIED"


class Unsupported(InferenceClientError):  # noqa: N818  (see ServerUnavailable)
    """The server does not offer this."""

    code = "UNIMPLEMENTED"


class AlreadyExists(InferenceClientError):  # noqa: N818  (see ServerUnavailable)
    """What is to be made is there already."""

    code = "ALREADY_EXISTS"


class Cancelled(InferenceClientError):  # noqa: N818  (see ServerUnavailable)
    """The call was given up, or its client was closed."""

    code = "CANCELLED"


class Overloaded(InferenceClientError):  # noqa: N818  (see ServerUnavailable)
    """The server's queue is full; try again later (`retry_after_s`) or send less."""

    code = "RESOURCE_EXHAUSTED"


_KINDS = (
    ServerUnavailable,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    AccessDenied,
    Unsupported,
    AlreadyExists,
    Cancelled,
    Overloaded,
)
_BY_CODE: dict[str, type[InferenceClientError]] = {kind.code: kind for kind in _KINDS}
_BY_CODE |= {"UNAUTHENTICATED": AccessDenied, "FAILED_PRECONDITION": InvalidRequest, "OUT_OF_RANGE": InvalidRequest}


def error_of_code(
    code: str, message: str, *, retry_after_s: float | None = None, repeat: Repeat = Repeat.NO
) -> InferenceClientError:
    """The exception for a gRPC status, by its name."""
    return _BY_CODE.get(code, InferenceClientError)(message, code=code, retry_after_s=retry_after_s, repeat=repeat)


def deadline_exceeded(*, method: str, address: str, limit_s: float | None) -> DeadlineExceeded:
    """The error for a call whose time has run out on this side."""
    limit = "in time" if limit_s is None else f"within {limit_s:g} s"
    return DeadlineExceeded(f"{address} did not answer {method} {limit}; allow more time or ask for less at once")
