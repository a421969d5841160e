"""ModelInfer with somebody listening; a call that nobody listens to does not come by here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from serve.engine.errors import InvalidArgumentError
from serve.observability.exchange import Caller, Exchange
from serve.observability.observer import Observer
from serve.protocol.inference import Cancel, Reply, Watch
from serve.protocol.messages import parse_request
from serve.protocol.status import status_of


class Onlooker(Protocol):
    """Who is told of requests that get no answer."""

    def failed(self, data: bytes, error: Exception) -> None:
        """As `Inference.failed`."""

    def gone(self, data: bytes) -> None:
        """As `Inference.gone`."""


class WayIn(Protocol):
    """Takes requests."""

    def infer(self, data: bytes | memoryview, time_left_s: float | None, reply: Reply) -> Cancel:
        """As `Inference.infer`."""


class AnyInference(WayIn, Onlooker, Protocol):
    """A way in for requests, as transports see it: `Inference`, or one that stands before it."""


class WatchableInference(AnyInference, Protocol):
    """A way in that tells of a request before it is queued."""

    def infer(self, data: bytes | memoryview, time_left_s: float | None, reply: Reply, watch: Watch | None = None) -> Cancel:
        """As `Inference.infer`."""


# https://grpc.github.io/grpc/core/md_doc_statuscodes.html
NAMES = {
    3: "INVALID_ARGUMENT",
    4: "DEADLINE_EXCEEDED",
    5: "NOT_FOUND",
    6: "ALREADY_EXISTS",
    7: "PERMISSION_DENIED",
    8: "RESOURCE_EXHAUSTED",
    9: "FAILED_PRECONDITION",
    12: "UNIMPLEMENTED",
    13: "INTERNAL",
    14: "UNAVAILABLE",
    16: "UNAUTHENTICATED",
}


def status_name(error: Exception | None) -> str:
    """The wire's word for an error; CANCELLED for none, where the client has gone."""
    if error is None:
        return "CANCELLED"
    code = status_of(error).code
    return NAMES.get(code, str(code))


class ObservedInference:
    """The way in for calls with one list of headers on one connection: counts, and lets by those that are of no interest."""

    __slots__ = ("_caller", "_inference", "_observer", "has_parent")

    def __init__(self, inference: WatchableInference, observer: Observer, peer: str, headers: Mapping[bytes, bytes]) -> None:
        """A way in.

        Args:
            inference: answers requests.
            observer: is told of them.
            peer: the client's address.
            headers: of the calls, names in lower case.
        """
        self._inference = inference
        self._observer = observer
        self._caller = Caller(peer, headers)
        self.has_parent = self._caller.parent is not None  # a trace, which may have to be gone on with

    def infer(self, data: bytes | memoryview, time_left_s: float | None, reply: Reply) -> Cancel:
        """As `Inference.infer`."""
        observer = self._observer
        observer.until -= 1
        if observer.until and (observer.tracer is None or not self.has_parent):
            return self._inference.infer(data, time_left_s, reply)
        return self.chosen().infer(data, time_left_s, reply)

    def chosen(self) -> ChosenInference:
        """The way in for one request, which has been counted and may be of interest."""
        chosen = ChosenInference(self._inference, self._observer, self._caller)
        self._observer.choose(chosen)
        return chosen

    def failed(self, data: bytes, error: Exception) -> None:
        """As `Inference.failed`."""
        self._observer.failed(self._caller, _asked(data), len(data), error)

    def gone(self, data: bytes) -> None:
        """As `Inference.gone`."""
        self._observer.failed(self._caller, _asked(data), len(data), None)


class ChosenInference(Exchange):
    """The way in for one request, and what becomes of it."""

    __slots__ = ("_inference",)

    def __init__(self, inference: WatchableInference, observer: Observer, caller: Caller) -> None:
        """A way in.

        Args:
            inference: answers requests.
            observer: is told of this one.
            caller: of it.
        """
        super().__init__(observer, caller)
        self._inference = inference

    def infer(self, data: bytes | memoryview, time_left_s: float | None, reply: Reply) -> Cancel:
        """As `Inference.infer`."""
        self.expect(len(data), reply)
        try:
            self.cancel = self._inference.infer(data, time_left_s, self.answered, self)
        except Exception as error:
            self.refused(error)
            raise
        return self.gone


def _asked(data: bytes) -> tuple[str, str, str]:
    """Model, version and id of a request, as far as they can be read."""
    try:
        request = parse_request(data)
    except InvalidArgumentError:
        return "", "", ""
    return request.model_name, request.model_version, request.id
