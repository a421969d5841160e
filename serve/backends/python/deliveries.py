"""Responses of decoupled models on their way to their clients, by the event loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from halfserve.serve.backends.python_child.server_access import WINDOW_BYTES
from halfserve.serve.engine.errors import InferenceError
from halfserve.serve.engine.execution.output_backlog import OutputBacklog
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.tensors import Tensors

Tell = Callable[[dict[str, Any], list[Any]], None]


class ReadingProgress:
    """Tells a copy of a decoupled model how far the client of a request has read the responses. Lives on the event loop.

    Attributes:
        is_withdrawn: whether the model should end its work on the request; its responses still count.
    """

    def __init__(self, tell: Tell, number: int) -> None:
        """`tell` sends a message to the copy, without waiting; `number`: the request's number in messages."""
        self._tell = tell
        self._number = number
        self._bytes = 0  # bytes that the client has read and the copy does not know of
        self.is_withdrawn = False

    def read(self, size: int) -> None:
        """Count a response that the client has read: one message for several small ones."""
        self._bytes += size
        if self._bytes >= WINDOW_BYTES // 2:
            self._tell({"request": self._number, "read": self._bytes}, [])
            self._bytes = 0

    def withdraw(self) -> None:
        """See `AnswerProgress`."""
        self.is_withdrawn = True

    def gone(self) -> None:
        """See `AnswerProgress`: let the model go on without the client."""
        self._tell({"request": self._number, "gone": 1}, [])


class ResponseDelivery:
    """Gives one response of a decoupled model to its request, on the event loop."""

    def __init__(
        self,
        request: InferRequest,
        response: Tensors | InferenceError | None,
        size: int,
        progress: ReadingProgress,
        backlog: OutputBacklog,
        *,
        final: bool,
    ) -> None:
        """`size`: as the model's process counts the response; `backlog`: the responses that wait for the event loop."""
        self._request = request
        self._response = response
        self._size = size
        self._progress = progress
        self._backlog = backlog
        self._final = final
        backlog.add(size)

    def __call__(self) -> None:
        request, respond = self._request, self._request.respond
        self._backlog.remove(self._size)
        if request.cancelled:
            self._progress.gone()
        elif self._response is not None and respond is not None:
            respond(self._response, self._final, partial(self._progress.read, self._size))
        if self._final:
            request.finish({})


class Failure:
    """Fails a request, on the event loop."""

    def __init__(self, request: InferRequest, error: InferenceError) -> None:
        self._request = request
        self._error = error

    def __call__(self) -> None:
        self._request.finish(self._error)
