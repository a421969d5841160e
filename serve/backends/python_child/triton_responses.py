"""`pb_utils.InferenceResponse`, the sender of a request's responses, and the iterator over the responses of another model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from halfserve.serve.backends.python_child.server_access import Reply, ServerAccess, response_bytes
from halfserve.serve.backends.python_child.triton_errors import ErrorCode, TritonError, TritonModelException, phrased
from halfserve.serve.backends.python_child.triton_tensors import Tensor, to_wire
from halfserve.serve.backends.python_child.wire import WireTensor

COMPLETE_FINAL = 1
RESPONSE_KINDS = (bool, int, str)  # types of parameters
REQUEST_KINDS = (*RESPONSE_KINDS, float)


class InferenceResponse:
    """The answer to one request: outputs, or an error."""

    __slots__ = ("_error", "_parameters", "_tensors")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        """Make an answer; with an error the outputs do not count.

        Raises:
            TritonModelException: something is of the wrong kind.
        """
        self._tensors = list(output_tensors)
        if not all(isinstance(tensor, Tensor) for tensor in self._tensors):
            raise TritonModelException("output_tensors has something else than pb_utils.Tensor")
        if error is not None and not isinstance(error, TritonError):
            raise TritonModelException(f"error is a {type(error).__name__}, expected a pb_utils.TritonError")
        self._error = error
        self._parameters = checked_parameters(parameters, RESPONSE_KINDS)

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        """Return the parameters as a JSON object."""
        return json.dumps(self._parameters)

    def to_message(self) -> dict[str, Any]:
        """Return the response without its tensors."""
        message: dict[str, Any] = {"n": 0 if self._error else len(self._tensors)}
        if self._error:
            message["error"] = [int(self._error.code()), self._error.message()]
        if self._parameters:
            message["p"] = self._parameters
        return message

    @classmethod
    def from_reply(cls, reply: Reply) -> InferenceResponse:
        """Response to a request that the server has answered."""
        message, tensors = reply
        error = message.get("error")
        return cls(
            [Tensor.from_wire(tensor) for tensor in tensors],
            None if error is None else TritonError(error[1], error[0]),
            message.get("p"),
        )


def checked_parameters(parameters: Mapping[str, Any] | None, kinds: tuple[type, ...]) -> dict[str, bool | int | str | float]:
    """Parameters of a request or response, whose values are of these types.

    Raises:
        TritonModelException: they are no dict, a name is no text, or a value is of another type. The texts begin as Triton's,
            which models may look for.
    """
    if parameters is not None and not isinstance(parameters, dict):
        raise TritonModelException(f"Expect parameters to be a dict, got {type(parameters)}")
    known = dict(parameters or {})
    for name, value in known.items():
        if not isinstance(name, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(name)} ({name!r})")
        if not isinstance(value, kinds):
            expected = "/".join(kind.__name__ for kind in kinds)
            raise TritonModelException(
                f"Expect parameters values to have type {expected}, found type {type(value)} of {name!r}"
            )
    return known


class ResponseSender:
    """Sends the responses of one request. May be used on any thread, also after execute.

    A decoupled model sends any number of responses, at the pace at which the client reads them; another one sends one, after
    which nothing but the final flag may come.

    Attributes:
        is_closed: the final flag was sent, or the request has ended otherwise.
        owes: execute has returned and left the request to this sender.
    """

    __slots__ = ("_access", "_has_sent", "_is_decoupled", "_number", "_unread", "is_closed", "owes")

    def __init__(self, access: ServerAccess, number: int, *, is_decoupled: bool) -> None:
        self._access = access
        self._number = number
        self._is_decoupled = is_decoupled
        self._has_sent = False
        self._unread = access.unread_responses(number) if is_decoupled else None
        self.is_closed = False
        self.owes = False
        access.await_finalizers()

    def __del__(self) -> None:
        if getattr(self, "_unread", None) is not None:
            self._access.forget(self._number)
        if getattr(self, "owes", False) and not self.is_answered:
            # Its thread has ended, or it was never used: nothing else could end the request.
            error = [int(ErrorCode.INTERNAL), "the model ended its work on this request without a final response"]
            self._access.tell_later("respond", {"number": self._number, "final": 1, "response": {"n": 0, "error": error}})

    @property
    def is_answered(self) -> bool:
        """Whether the server has, or will get, all that it waits for."""
        return self.is_closed or (self._has_sent and not self._is_decoupled)

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response; the last one has flags=TRITONSERVER_RESPONSE_COMPLETE_FINAL, and may have no response.

        Waits while the client of a decoupled model has much to read (see `WINDOW_BYTES`). Once the client has gone, responses
        are dropped.

        Raises:
            TritonModelException: the flags are unknown, there is nothing to send, or the last one was sent before; or a model
                that is not decoupled sends a second response, or none.
        """
        if flags not in {0, COMPLETE_FINAL}:
            raise TritonModelException(
                f"flags is {flags}, expected 0 or TRITONSERVER_RESPONSE_COMPLETE_FINAL ({COMPLETE_FINAL})"
            )
        if response is None and not flags:
            raise TritonModelException("send() has neither a response nor TRITONSERVER_RESPONSE_COMPLETE_FINAL")
        if not self._is_decoupled and response is not None:
            self.require_none_sent()
        if not self._is_decoupled and response is None and not self._has_sent:
            text = "a model that is not decoupled cannot send the final flag before its response"
            raise TritonModelException(phrased("FINAL_BEFORE_RESPONSE", text))
        self._require_open()
        if response is None and not self._is_decoupled:
            self.is_closed = True
            return  # the server takes the one response for the final one
        message: dict[str, Any] = {"number": self._number, "final": int(bool(flags) or not self._is_decoupled)}
        tensors: list[Any] = []
        if response is not None:
            tensors = to_wire(response.output_tensors()) if not response.has_error() else []
            if self._is_wanted(tensors, is_last=bool(flags)):
                message["response"] = response.to_message()
            elif not flags:
                return
            else:
                tensors = []
        self._has_sent = True
        if flags:
            self._close()
        self._access.tell("respond", message, tensors)

    def _is_wanted(self, tensors: Sequence[WireTensor], *, is_last: bool) -> bool:
        """Wait until the client has read enough of the earlier responses; returns False if it has gone."""
        if self._unread is None:
            return True
        is_wanted = self._unread.add(response_bytes(tensors), waits=bool(tensors) or not is_last)
        self._require_open()  # another thread may have sent the last one meanwhile
        return is_wanted

    def _require_open(self) -> None:
        if self.is_closed:
            raise TritonModelException(phrased("SENDER_CLOSED", "the response sender has sent its final response already"))

    def _close(self) -> None:
        self.is_closed = True
        if self._unread is not None:
            self._unread.end()

    def require_none_sent(self) -> None:
        """Check that a model that is not decoupled may still give a response.

        Raises:
            TritonModelException: it has given one.
        """
        if self._has_sent:
            text = "a model that is not decoupled gives one response to a request, and has sent it already"
            raise TritonModelException(phrased("SECOND_RESPONSE", text))

    def is_cancelled(self) -> bool:
        """Return whether the client has gone."""
        return bool(self._access.call("is_cancelled", {"number": self._number}, [])[0].get("cancelled", True))


class ResponseIterator:
    """The responses of a request to a decoupled model, in order; the last one may have no tensors.

    Once all have come, it may be iterated again.
    """

    def __init__(self, replies: Iterator[Reply], first: Reply, cancel: Callable[[], object]) -> None:
        """`cancel` tells the server that the called model should end its work."""
        self._replies = replies
        self._first: Reply | None = first
        self._cancel = cancel
        self._is_over = False
        self._come: list[InferenceResponse] = []
        self._next = 0

    def __iter__(self) -> ResponseIterator:
        if self._is_over:
            self._next = 0
        return self

    def __next__(self) -> InferenceResponse:
        if self._next == len(self._come):
            if self._is_over:
                raise StopIteration
            if self._first is not None:
                reply, self._first = self._first, None
            else:
                reply = next(self._replies)
            self._is_over = bool(reply[0].get("final"))
            self._come.append(InferenceResponse.from_reply(reply))
        self._next += 1
        return self._come[self._next - 1]

    def cancel(self) -> None:
        """Ask the called model to end its work. It decides what comes then, such as an error with the code CANCELLED."""
        if not self._is_over:
            self._cancel()


def error_of(error: BaseException) -> TritonError:
    """Return an exception as the one-line error that a model's client gets."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  (of the exception's own __str__)
        text = ""
    if isinstance(error, TritonModelException):
        return TritonError(text, ErrorCode.INTERNAL)
    text = text.strip().split("\n")[0]
    return TritonError(f"{type(error).__name__}: {text}" if text else type(error).__name__, ErrorCode.INTERNAL)
