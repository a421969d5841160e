"""The one table from the engine's errors to gRPC statuses."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from halfserve.serve.engine import errors
from halfserve.serve.engine.errors import InferenceError, QueueFullError, UnavailableError, told_code, told_text


class Code(IntEnum):
    """gRPC's status codes, whose meaning https://grpc.github.io/grpc/core/md_doc_statuscodes.html defines."""

    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


CODES: dict[type[InferenceError], Code] = {
    errors.RequestCancelledError: Code.CANCELLED,
    errors.UnknownError: Code.UNKNOWN,
    errors.InvalidArgumentError: Code.INVALID_ARGUMENT,
    errors.DeadlineExceededError: Code.DEADLINE_EXCEEDED,
    errors.NotFoundError: Code.NOT_FOUND,
    errors.AlreadyExistsError: Code.ALREADY_EXISTS,
    errors.PermissionDeniedError: Code.PERMISSION_DENIED,
    errors.QueueFullError: Code.RESOURCE_EXHAUSTED,
    errors.RateLimitedError: Code.RESOURCE_EXHAUSTED,
    errors.OverloadedError: Code.RESOURCE_EXHAUSTED,
    errors.MessageTooLargeError: Code.RESOURCE_EXHAUSTED,
    errors.OutOfMemoryError: Code.RESOURCE_EXHAUSTED,
    errors.ResourceExhaustedError: Code.RESOURCE_EXHAUSTED,
    errors.FailedPreconditionError: Code.FAILED_PRECONDITION,
    errors.UnsupportedError: Code.UNIMPLEMENTED,
    errors.BackendError: Code.INTERNAL,
    errors.UnavailableError: Code.UNAVAILABLE,
    errors.UnauthenticatedError: Code.UNAUTHENTICATED,
}
RETRY_HINT = "grpc-retry-pushback-ms"  # gRPC's trailer that asks a client to retry after a number of milliseconds


@dataclass(frozen=True)
class Status:
    """The status of a failed call."""

    code: int  # gRPC's number
    details: str  # the text for the client
    trailers: tuple[tuple[str, str], ...] = ()  # additional metadata


def status_of(error: Exception) -> Status:
    """Return the status of an error. Unexpected exceptions are INTERNAL, and their text is not disclosed."""
    if not isinstance(error, InferenceError):
        return Status(Code.INTERNAL, "the server failed on this request; its log says why")
    trailers: tuple[tuple[str, str], ...] = ()
    if isinstance(error, QueueFullError | UnavailableError) and error.retry_after_s is not None:
        trailers = ((RETRY_HINT, str(max(1, round(error.retry_after_s * 1000)))),)
    # A class that derives from one of these, defined elsewhere, has the code of its base class.
    code = told_code(error) or next((CODES[kind] for kind in type(error).__mro__ if kind in CODES), Code.INTERNAL)
    return Status(code, told_text(error), trailers)


def error_of(code: int, text: str, retry_after_s: float | None = None) -> InferenceError:
    """Return the error for a status that another server has answered; an unknown code becomes a BackendError."""
    if code == Code.RESOURCE_EXHAUSTED:
        if retry_after_s is None:
            return errors.ResourceExhaustedError(text)
        return QueueFullError(text, retry_after_s=retry_after_s)
    if code == Code.UNAVAILABLE:
        return UnavailableError(text, retry_after_s=retry_after_s)
    return next((kind(text) for kind, known in CODES.items() if known == code), errors.BackendError(text))


def status_name(error: Exception | None) -> str:
    """Return the name of an error's status; CANCELLED for None."""
    if error is None:
        return "CANCELLED"
    return Code(status_of(error).code).name
