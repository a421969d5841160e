"""What can go wrong with a request, in the engine's own terms; protocol/status.py maps each class to a wire status.

Texts are written for the client: they name its own model, input and values, never paths, stack frames or other clients.
"""

from __future__ import annotations


class InferenceError(Exception):
    """A request could not be answered. The text says what was wrong, what was expected and what to do."""


class InvalidArgumentError(InferenceError):
    """The request contradicts the model's interface; sending it again cannot help."""


class NotFoundError(InferenceError):
    """No such model or version is served."""


class AlreadyExistsError(InferenceError):
    """What is to be made is there already."""


class FailedPreconditionError(InferenceError):
    """What is asked for does not fit the state that things are in, and will not until somebody changes it."""


class QueueFullError(InferenceError):
    """The model's queue has reached its bound; the request was not taken.

    Attributes:
        retry_after_s: seconds after which a place is likely to be free.
    """

    def __init__(self, text: str, *, retry_after_s: float) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class OverloadedError(QueueFullError):
    """There is more to do than the model's latency target allows for; the request was not computed.

    Attributes:
        retry_after_s: seconds after which a request is likely to be taken.
    """


class RateLimitedError(QueueFullError):
    """The client asks for more than its share; the request was not taken.

    Attributes:
        retry_after_s: seconds after which its share allows for one more.
    """


class UnauthenticatedError(InferenceError):
    """The caller has not shown who it is; with a valid token it may be let in."""


class PermissionDeniedError(InferenceError):
    """The caller is known, or need not be, and may not do this here."""


class MessageTooLargeError(InferenceError):
    """A message is over the transport's limit; its size is None where it was not read to its end."""

    def __init__(self, size: int | None, limit: int, advice: str = "split the request") -> None:
        told = f"more than {limit}" if size is None else str(size)
        super().__init__(f"a message of {told} bytes is too large, expected at most {limit}; {advice}")


class DeadlineExceededError(InferenceError):
    """The time that the client gave ran out before the request's batch started, or would have; it was not computed."""


class UnavailableError(InferenceError):
    """The server or the model is not ready, or is draining; another replica may answer.

    Attributes:
        retry_after_s: seconds after which it may be ready again; None where that is not known.
    """

    def __init__(self, text: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class UnsupportedError(InferenceError):
    """The protocol has this feature, this server does not."""


class BackendError(InferenceError):
    """The model failed while it ran on this request."""


class OutOfMemoryError(InferenceError):
    """Memory ran out while the model computed one row alone."""

    def __init__(self) -> None:
        super().__init__("the server's memory does not suffice for this request; try again later, or send smaller tensors")


class ModelLoadError(Exception):
    """A model, its configuration or the repository cannot be used; the text names the file and what to do."""
