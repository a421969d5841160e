"""The requests of one copy of a Python model that have no answer yet."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping

from halfserve.serve.engine.errors import InferenceError
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.results import LaterAnswer
from halfserve.serve.engine.tensors import Tensors


class OpenRequests:
    """Requests without an answer, by their numbers in messages. Any thread may use it.

    A model that is not decoupled may answer a request by its response sender: while `execute` runs, or after it has left the
    request open.

    Attributes:
        has_ended: whether the copy has gone, so that nothing answers them.
    """

    def __init__(self) -> None:
        self.has_ended = False
        self._lock = threading.Lock()
        self._active: dict[int, InferRequest] = {}
        self._early: dict[int, Tensors | InferenceError] = {}  # responses that were sent while `execute` runs
        self._later: dict[int, tuple[InferRequest, LaterAnswer]] = {}  # requests that `execute` has left open

    def add(self, numbered: Mapping[int, InferRequest]) -> None:
        """Add the requests of a batch."""
        with self._lock:
            self._active.update(numbered)

    def discard(self, numbers: Iterable[int]) -> None:
        """Remove the requests of a batch that `execute` has not left open."""
        with self._lock:
            for number in numbers:
                self._active.pop(number, None)
                self._early.pop(number, None)

    def find(self, number: int) -> InferRequest | None:
        """Return a request without an answer; None if there is none of this number."""
        with self._lock:
            return self._active.get(number) or self._later.get(number, (None,))[0]

    def receiver(self, number: int, *, final: bool) -> InferRequest | None:
        """Return the request that gets a response of a decoupled model; `final`: whether that is its last one."""
        with self._lock:
            return self._active.pop(number, None) if final else self._active.get(number)

    def leave_open(self, number: int, request: InferRequest) -> Tensors | InferenceError | LaterAnswer | None:
        """Return the response of a request that `execute` has left to its response sender, or the answer that it will have;
        None if the copy has gone.
        """
        with self._lock:
            if number in self._early:
                return self._early.pop(number)
            if self.has_ended:
                return None
            later = LaterAnswer()
            self._later[number] = request, later
            return later

    def respond(self, number: int, response: Tensors | InferenceError) -> LaterAnswer | None:
        """Take the one response of a request from its response sender.

        Returns:
            The answer to give it to; None if `execute` still runs, or the request has an answer.
        """
        with self._lock:
            _, later = self._later.pop(number, (None, None))
            if later is None and number in self._active:
                self._early[number] = response
            return later

    def end(self, executing: Collection[int]) -> tuple[list[InferRequest], list[LaterAnswer]]:
        """Note that the copy has gone.

        Args:
            executing: the ids (see `id`) of the requests that `execute` runs with, whose caller reports the error.

        Returns:
            The other requests, and the answers that were to come later; both are removed.
        """
        with self._lock:
            self.has_ended = True
            left = {number: request for number, request in self._active.items() if id(request) not in executing}
            for number in left:
                del self._active[number]
            later = [answer for _, answer in self._later.values()]
            self._later.clear()
            return list(left.values()), later

    def lose(self, numbers: Iterable[int]) -> list[bool]:
        """Note that the copy has gone, and remove the requests of a batch; returns for each whether it had no answer."""
        with self._lock:
            self.has_ended = True
            return [self._active.pop(number, None) is not None for number in numbers]
