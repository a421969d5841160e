"""The one table from the engine's errors to gRPC statuses."""

from __future__ import annotations

from dataclasses import dataclass

from serve.engine.errors import (
    AlreadyExistsError,
    BackendError,
    DeadlineExceededError,
    FailedPreconditionError,
    InferenceError,
    InvalidArgumentError,
    MessageTooLargeError,
    NotFoundError,
    OutOfMemoryError,
    OverloadedError,
    PermissionDeniedError,
    QueueFullError,
    RateLimitedError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedError,
)

# The numbers are gRPC's: https://grpc.github.io/grpc/core/md_doc_statuscodes.html
CODES: dict[type[InferenceError], int] = {
    InvalidArgumentError: 3,
    DeadlineExceededError: 4,
    NotFoundError: 5,
    AlreadyExistsError: 6,
    PermissionDeniedError: 7,
    QueueFullError: 8,
    RateLimitedError: 8,
    OverloadedError: 8,
    MessageTooLargeError: 8,
    OutOfMemoryError: 8,
    FailedPreconditionError: 9,
    UnsupportedError: 12,
    BackendError: 13,
    UnavailableError: 14,
    UnauthenticatedError: 16,
}
INTERNAL = 13
# Characters of an error's text: it may quote what a client sent, which may be as long as a message. What carries it looks at
# each of them, on the event loop, and gRPC's trailers have room for as many bytes at most (see transports/grpc_headers).
MAX_TEXT = 4096
CUT = " ..."
RETRY_HINT = "grpc-retry-pushback-ms"  # gRPC's own name for "try again in so many milliseconds"


@dataclass(frozen=True)
class Status:
    """How a failed call ends on the wire.

    Attributes:
        code: gRPC's number.
        details: the text for the client, at most MAX_TEXT characters.
        trailers: metadata that goes with it.
    """

    code: int
    details: str
    trailers: tuple[tuple[str, str], ...] = ()


def status_of(error: Exception) -> Status:
    """The status of an error. What the engine did not raise on purpose is INTERNAL, and its text stays here."""
    if not isinstance(error, InferenceError):
        return Status(INTERNAL, "the server failed on this request; its log says why")
    trailers: tuple[tuple[str, str], ...] = ()
    if isinstance(error, QueueFullError | UnavailableError) and error.retry_after_s is not None:
        trailers = ((RETRY_HINT, str(max(1, round(error.retry_after_s * 1000)))),)
    return Status(CODES.get(type(error), INTERNAL), _cut(str(error)), trailers)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - len(CUT)] + CUT
