"""Errors of inference requests and of loading models; protocol/status.py maps each class to a wire status.

Texts are for the client: they name its own model, input and values, never paths, stack frames or other clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import islice
from typing import Self

from halfserve.protos.triton_errors import TritonPhrase

# Most characters of an error's text. It is encoded on the event loop, and gRPC's trailers hold at most MAX_DETAILS bytes (see
# transports/grpc_framing).
MAX_TEXT = 4096
LISTING = "`halfserve models` (RepositoryIndex)"  # how clients list the models; errors over REST name its path instead
MAX_COMPARED, MAX_NAME = 20, 64  # names that are compared with an unknown one, and their length
MAX_TYPED = 3  # most characters that a name may be longer or shorter than a near one
# Signs of a lost device in error texts. After such an error, CUDA fails every call of the process's context:
# https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html
DEVICE_LOST_SIGNS = (
    *("illegal memory access", "illegal address", "illegal instruction", "invalid program counter", "misaligned address"),
    *("unspecified launch failure", "device-side assert", "uncorrectable ecc error", "hardware stack error"),
    *("global/shared address space", "uncorrectable nvlink error", "the launch timed out"),
    *("cuda failure 700", "cuda failure 719", "cuda error 700", "cuda error 719"),
)
# Signs of memory shortage in the error texts of Python, numpy, ONNX Runtime, the C++ library, CUDA, cuBLAS and torch.
OUT_OF_MEMORY_SIGNS = (
    "failed to allocate",  # ONNX Runtime, and OpenVINO ("Failed to allocate 4096 bytes of memory")
    *("bad_alloc", "bad allocation", "out of memory", "unable to allocate"),
    *("cublas_status_alloc_failed", "cudnn_status_alloc_failed"),
    "resource allocation failed",  # cuBLAS 13 ("CUBLAS failure 3: the resource allocation failed")
    "_allocation_failed",  # cuDNN 9's CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED and ..._HOST_...
)


def cut(text: str, most: int) -> str:
    """Shorten a text of more than `most` characters (at least 100) to its beginning and end, with the number of characters left
    out.
    """
    if len(text) <= most:
        return text
    kept = most // 2 - 24  # 48 characters are for the note in between
    return f"{text[:kept]} ... ({len(text) - 2 * kept} characters left out) ... {text[-kept:]}"


OTHER_INPUTS = "send inputs of the size that the model was verified with, or serve it with the guard's policy 'fallback'"


class InferenceError(Exception):
    """A request could not be answered. The text says what was wrong, what was expected and what to do.

    The text may quote a client's message, or an exception of a model or a runtime: it is cut to MAX_TEXT characters.

    Attributes:
        phrase: Triton's text for this error; None if no client compares it.
        facts: what the phrase names.
        ensemble: name of the ensemble whose step failed; "" for none.
    """

    phrase: TritonPhrase | None = None
    ensemble = ""
    facts: Mapping[str, object] = {}

    def __init__(self, text: str = "") -> None:
        super().__init__(cut(text, MAX_TEXT))

    def like(self, phrase: TritonPhrase, **facts: object) -> Self:
        """Note Triton's text for this error, and return the error."""
        self.phrase, self.facts = phrase, facts
        return self


class InvalidArgumentError(InferenceError):
    """The request contradicts the model's interface; a retry cannot help."""


class NotFoundError(InferenceError):
    """The model or version is not served."""


def near_name(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean model 'NAME'?)" for a known model with nearly this name; "" without one.

    Few and short names are compared, as a request must not occupy the event loop for long.
    """
    alike = (one for one in known if len(one) <= MAX_NAME and "'" not in one and abs(len(one) - len(name)) <= MAX_TYPED)
    spelled = {one.casefold(): one for one in islice(alike, MAX_COMPARED)}
    near = get_close_matches(name.casefold(), spelled, n=1) if len(name) <= MAX_NAME else []
    return f" (did you mean model {spelled[near[0]]!r}?)" if near else ""


class AlreadyExistsError(InferenceError):
    """The object to create exists already."""


class FailedPreconditionError(InferenceError):
    """The request does not fit the server's state or configuration; a retry cannot help."""


class RequestCancelledError(InferenceError):
    """The model or the client cancelled this request, or one that it depends on was cancelled."""


class QueueFullError(InferenceError):
    """The model's queue has reached its bound; the request was not taken.

    Attributes:
        retry_after_s: seconds after which a place is likely to be free.
    """

    def __init__(self, text: str, *, retry_after_s: float) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class OverloadedError(QueueFullError):
    """The queue is too long for the model's latency target; the request was not computed."""


class RateLimitedError(QueueFullError):
    """The client exceeds its rate limit; the request was not taken."""


class UnauthenticatedError(InferenceError):
    """The caller has not shown a valid token."""


class PermissionDeniedError(InferenceError):
    """The caller may not do this here."""


class MessageTooLargeError(InferenceError):
    """A message exceeds the transport's limit.

    Args:
        size: size of the message in bytes; None if it was not read to its end.
        limit: most bytes that a message may have.
        advice: advice to the client.
    """

    def __init__(self, size: int | None, limit: int, advice: str = "split the request") -> None:
        size_text = f"more than {limit}" if size is None else str(size)
        super().__init__(f"a message of {size_text} bytes is too large, expected at most {limit}; {advice}")


class ResourceExhaustedError(InferenceError):
    """Another server, to which this one has forwarded the request, has no room for it."""


class DeadlineExceededError(InferenceError):
    """The deadline or timeout would pass, or has passed, before the answer; the request was not computed."""


class UnavailableError(InferenceError):
    """The server or the model is not ready, or is draining; another replica may answer.

    Attributes:
        retry_after_s: seconds after which it may be ready again; None if that is unknown.
    """

    def __init__(self, text: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class UnsupportedError(InferenceError):
    """A feature of the protocol that this server does not have."""


class BackendError(InferenceError):
    """The model failed on this request."""


class NonFiniteError(BackendError):
    """An answer held NaN or infinities although the request's inputs did not, and the guard's policy rejects it."""

    def __init__(self, what: str, trouble: str = OTHER_INPUTS) -> None:
        super().__init__(f"{what}, though every input is finite; {trouble}")


class UnknownError(InferenceError):
    """A Python model answered this request with Triton's code UNKNOWN."""


class OutOfMemoryError(InferenceError):
    """Memory ran out while a single row was computed, or a picture decoded."""

    def __init__(self) -> None:
        super().__init__("the server's memory does not suffice for this request; try again later, or send smaller tensors")


def reworded(error: InferenceError, text: str) -> InferenceError:
    """Return an error of the same class, with the same attributes and another text."""
    ours = type(error).__new__(type(error))
    ours.__dict__.update(error.__dict__)
    ours.args = (cut(text, MAX_TEXT),)
    ours.__cause__ = error
    return ours


class Wording:
    """How this process words its errors.

    Attributes:
        as_triton: whether errors begin with Triton's text, and have Triton's status where it differs.
    """

    as_triton = False


@contextmanager
def errors_as_in_triton(is_on: bool) -> Iterator[None]:
    """Word the errors of this process as Triton does, if `is_on`."""
    before = Wording.as_triton
    Wording.as_triton = is_on
    try:
        yield
    finally:
        Wording.as_triton = before


def told_text(error: Exception) -> str:
    """Return an error's text as a client gets it."""
    if not Wording.as_triton or not isinstance(error, InferenceError):
        return str(error)
    text = str(error) if error.phrase is None else error.phrase.before(str(error), error.facts)
    return f"in ensemble {error.ensemble!r}, {text}" if error.ensemble else text


def told_code(error: InferenceError) -> int | None:
    """Return gRPC's number of the status that Triton has for an error; None for that of the error's class."""
    return None if not Wording.as_triton or error.phrase is None else error.phrase.code


@contextmanager
def worded(phrase: TritonPhrase, **facts: object) -> Iterator[None]:
    """Give errors raised in this context Triton's text."""
    try:
        yield
    except InferenceError as error:
        error.like(phrase, **facts)
        raise


class ModelLoadError(Exception):
    """A model, its configuration or the repository cannot be used; the text names the file and what to do."""


class UnmetStepsError(ModelLoadError):
    """An ensemble does not fit the present models of its steps; it may fit when one of these changes."""


class InstanceLostError(Exception):
    """A copy of a model is broken and has to be loaded again; the requests of its batch have no answer."""


def is_device_lost(error: BaseException) -> bool:
    """Return whether an error, or one of its causes, shows that the device will not compute for this copy again."""
    return any(isinstance(cause, InstanceLostError) or _says_device_lost(cause) for cause in _causes(error))


def _says_device_lost(cause: BaseException) -> bool:
    # The engine's own texts quote names that clients choose.
    is_ours = isinstance(cause, InferenceError | ModelLoadError) and not isinstance(cause, BackendError)
    return not is_ours and _says(cause, DEVICE_LOST_SIGNS)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or one of its causes, shows that memory ran out."""
    return any(isinstance(cause, MemoryError) or _says(cause, OUT_OF_MEMORY_SIGNS) for cause in _causes(error))


def _says(error: BaseException, signs: tuple[str, ...]) -> bool:
    text = str(error).lower()
    return any(sign in text for sign in signs)


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


class ByteCountError(ValueError):
    """The bytes of a tensor do not fit its shape.

    Attributes:
        phrase: Triton's text for this error.
        given: number of bytes, or elements of BYTES, that came.
        expected: number that the shape has.
    """

    def __init__(self, text: str, phrase: TritonPhrase, *, given: int, expected: int) -> None:
        super().__init__(text)
        self.phrase, self.given, self.expected = phrase, given, expected
