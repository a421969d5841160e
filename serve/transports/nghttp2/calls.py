"""From the headers of a call to the object that carries it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from ngh2 import Header

from serve.engine.errors import InferenceError, UnsupportedError
from serve.protocol.observed_inference import AnyInference, ObservedInference, WatchableInference
from serve.protocol.service import INFER_PATH, INFER_STREAM_PATH, Service
from serve.protocol.status import status_of
from serve.security.gate import Gate
from serve.security.gate_pass import Pass
from serve.security.memory_budget import Share
from serve.transports.grpc_headers import timeout_seconds
from serve.transports.nghttp2.call import Call
from serve.transports.nghttp2.session import GrpcSession, OpenCall
from serve.transports.nghttp2.streams import InferStreamCall, StreamCall
from serve.transports.nghttp2.unary import InferCall, UnaryCall


class Calls:
    """Opens the calls that headers ask for."""

    def __init__(self, service: Service, gate: Gate | None = None) -> None:
        self._service = service
        self._gate = gate
        self._infer = INFER_PATH.encode()
        self._infer_stream = INFER_STREAM_PATH.encode()

    def route(self, fields: Sequence[Header], share: Share) -> OpenCall:
        """What opens the calls that begin with these headers; one that is refused already takes no more than its end.

        Args:
            fields: the headers of a call.
            share: of the memory; its connection is trusted once it has shown a token, or where none is asked for.
        """
        headers = dict(fields)
        if self._gate is None:
            share.trust()
            return self._open(headers, None)
        try:
            authorization = [value for name, value in fields if name == b"authorization"]
            given = self._gate.admit_method(headers.get(b":path", b"").decode("latin-1"), authorization)
        except InferenceError as error:
            return partial(RefusedCall, error=error)
        if given.is_trusted:
            share.trust()
        open_call = self._open(headers, given)
        if isinstance(open_call, _Inferring) or not given.is_counted:
            return open_call
        return partial(_counted, given, open_call)

    def _open(self, headers: dict[bytes, bytes], given: Pass | None) -> OpenCall:
        service = self._service if given is None or given.sees_all else given.service(self._service)
        path = headers.get(b":path", b"")
        encoding = headers.get(b"grpc-encoding")
        try:
            time_left = timeout_seconds(headers.get(b"grpc-timeout"))
        except InferenceError as error:
            return partial(RefusedCall, error=error)
        if path == self._infer:
            return _InferringOnce(service, headers, encoding, time_left, given)
        if path == self._infer_stream:
            return _InferringOften(service, headers, encoding, time_left, given)
        name = path.decode("ascii", "replace")
        unary = service.unary.get(name)
        if unary is not None:
            return partial(UnaryCall, encoding=encoding, method=unary if given is None else given.unary(unary))
        method = service.streams.get(name)
        if method is not None:
            method = method if given is None else given.stream(method)
            return partial(StreamCall, encoding=encoding, method=method, time_left_s=time_left)
        return partial(RefusedCall, error=UnsupportedError(f"{name} is not served here; server reflection lists what is"))


class _Inferring:
    """Opens the inference calls of one list of headers in one session."""

    __slots__ = ("_encoding", "_given", "_headers", "_observability", "_observed", "_plain", "_time_left_s")

    def __init__(
        self,
        service: Service,
        headers: dict[bytes, bytes],
        encoding: bytes | None,
        time_left_s: float | None,
        given: Pass | None,
    ) -> None:
        self._plain: WatchableInference = service.inference
        self._observed: ObservedInference | None = None
        self._observability = service.observability
        self._headers = headers
        self._encoding = encoding
        self._time_left_s = time_left_s
        self._given = given  # by a gate, which may look at each request too

    def _pass_gate(self, session: GrpcSession) -> None:
        if self._given is not None:
            self._plain = self._given.inference(self._plain, session.peer)
            self._given = None


class _InferringOnce(_Inferring):
    """Unary calls: one request each, so that those of no interest are told apart here, before anything is made for them."""

    __slots__ = ()

    def __call__(self, session: GrpcSession, stream: int) -> Call:
        if self._given is not None:
            self._pass_gate(session)
        plain, encoding, time_left_s = self._plain, self._encoding, self._time_left_s
        observer = self._observability.observer  # which comes and goes while connections last
        if observer is None:
            return InferCall(session, stream, encoding, plain, plain, time_left_s)
        observed = self._observed
        if observed is None:
            observed = self._observed = ObservedInference(plain, observer, session.peer, self._headers)
        # Counted here, as `ObservedInference` does: asking it costs what all of observing may not, 0.1 us a request.
        observer.until -= 1
        if observer.until and (observer.tracer is None or not observed.has_parent):
            return InferCall(session, stream, encoding, plain, observed, time_left_s)
        return InferCall(session, stream, encoding, observed.chosen(), observed, time_left_s)


class _InferringOften(_Inferring):
    """Calls that carry any number of requests."""

    __slots__ = ()

    def __call__(self, session: GrpcSession, stream: int) -> Call:
        self._pass_gate(session)
        observer = self._observability.observer
        inference: AnyInference = self._plain
        if observer is not None:
            inference = ObservedInference(self._plain, observer, session.peer, self._headers)
        return InferStreamCall(session, stream, self._encoding, inference, self._time_left_s)


def _counted(given: Pass, open_call: OpenCall, session: GrpcSession, stream: int) -> Call:
    """Open a call, unless its client has had enough of them."""
    try:
        given.charge(session.peer)
    except InferenceError as error:
        return RefusedCall(session, stream, error)
    return open_call(session, stream)


class RefusedCall:
    """A call that was over when it began."""

    held_bytes = 0
    is_unary = False  # others that begin like this one may be served

    def __init__(self, session: GrpcSession, stream: int, error: InferenceError) -> None:
        # In the next turn of the loop: the session does not know of this call yet.
        asyncio.get_running_loop().call_soon(partial(session.fail, stream, status_of(error), ended=False))

    def take(self, message: bytes | memoryview) -> None:
        """Drop it."""

    def grew(self) -> None:
        """It will be dropped."""

    def receive(self, data: bytes) -> int:
        """Drop it."""
        return len(data)

    def receive_last(self, data: bytes) -> int:
        """Drop it."""
        return len(data)

    def end(self) -> None:
        """It has been answered."""

    def gone(self) -> None:
        """It has been answered."""

    def give_up(self, error: InferenceError) -> None:
        """It has been answered."""

    def give_up_stalled(self, before_s: float) -> None:
        """It has been answered."""
