"""Calls with one message each way in a GrpcSession."""

from __future__ import annotations

import logging

from serve.engine.errors import DeadlineExceededError, InferenceError, InvalidArgumentError
from serve.protocol.inference import Cancel
from serve.protocol.messages import parse
from serve.protocol.observed_inference import Onlooker, WayIn
from serve.protocol.service import UnaryMethod
from serve.protocol.status import status_of
from serve.transports.grpc_framing import MessageReader, sole_message
from serve.transports.nghttp2.session import LARGE_BYTES, GrpcSession

logger = logging.getLogger(__name__)


class _Unary:
    """A call that takes one message and gives one."""

    is_unary = True
    __slots__ = ("_encoding", "_ended", "_failed", "_grown_s", "_message", "_reader", "_session", "_stream")

    def __init__(self, session: GrpcSession, stream: int, encoding: bytes | None) -> None:
        self._session = session
        self._stream = stream
        self._encoding = encoding
        self._reader: MessageReader | None = None  # for a message that comes in pieces, or compressed
        self._message: bytes | memoryview | None = None
        self._ended = self._failed = False
        self._grown_s = session.heard_s

    @property
    def held_bytes(self) -> int:
        """Bytes of an unfinished message."""
        return 0 if self._reader is None else self._reader.held_bytes

    @property
    def _max_bytes(self) -> int:
        """Of a message."""
        return self._session.limits.max_small_message_bytes

    def take(self, message: bytes | memoryview) -> None:
        """Take the only message, and the client's end: answer."""
        self._message = message
        self.end()

    def grew(self) -> None:
        """Some of the message has come."""
        self._grown_s = self._session.heard_s

    def receive(self, data: bytes) -> int:
        """Take what the client sent; all of it may be sent again, as a message must be whole before it can be read."""
        self._grown_s = self._session.heard_s
        if self._reader is None:
            self._reader = MessageReader(self._max_bytes, self._encoding, self._session.limits.max_inflated_bytes)
        elif self._reader.hold(data):
            return len(data)
        try:
            for message in self._reader.feed(data):
                if self._message is not None:
                    raise InvalidArgumentError("a second message came, expected one; this method is no stream")
                self._message = message
        except InferenceError as error:
            self._fail(error)
        return len(data)

    def receive_last(self, data: bytes) -> int:
        """The same, and the client's end."""
        if self._reader is None:
            self._message = sole_message(data, self._max_bytes)
        if self._message is None or self._reader is not None:
            self.receive(data)
        self.end()
        return len(data)

    def end(self) -> None:
        """The client will send no more: answer."""
        self._ended = True
        if self._failed:
            return
        try:
            if self._reader is not None:
                self._reader.finish()
            if self._message is None:
                raise InvalidArgumentError("the call ended without a message, expected one")  # noqa: TRY301  (see above)
            self._answer(self._message)
        except Exception as error:  # noqa: BLE001  (whatever went wrong must end this call with a status, not the session)
            self._fail(error)

    def gone(self) -> None:
        """Nothing to stop: the answer was given at once."""

    def give_up(self, error: InferenceError) -> None:
        """End the call, whatever of its message is still to come."""
        if not self._ended and not self._failed:
            self._fail(error)

    def give_up_stalled(self, before_s: float) -> None:
        """End the call if the client owes the rest of its message since `before_s`."""
        if self._grown_s < before_s:
            self.give_up(DeadlineExceededError("the rest of the request did not come; send it again"))

    def _answer(self, message: bytes | memoryview) -> None:
        raise NotImplementedError

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, InferenceError):
            logger.error("a call failed", exc_info=error)
        self._failed = True
        self._session.fail(self._stream, status_of(error), ended=self._ended)


class InferCall(_Unary):
    """ModelInfer: queued, and answered when its batch has run."""

    __slots__ = ("_cancel", "_deadline_s", "_inference", "_onlooker")

    def __init__(
        self,
        session: GrpcSession,
        stream: int,
        encoding: bytes | None,
        inference: WayIn,
        onlooker: Onlooker,
        time_left_s: float | None,
    ) -> None:
        super().__init__(session, stream, encoding)
        self._inference = inference
        self._onlooker = onlooker
        self._deadline_s = None if time_left_s is None else session.heard_s + time_left_s
        self._cancel: Cancel | None = None

    @property
    def _max_bytes(self) -> int:
        return self._session.limits.max_message_bytes

    def gone(self) -> None:
        """Free the request's place in the queue."""
        cancel, self._cancel = self._cancel, None  # a circle: it knows the request, which knows this call
        if cancel is not None:
            cancel()
            self._onlooker.gone(bytes(self._message or b""))

    def _answer(self, message: bytes | memoryview) -> None:
        if len(message) > LARGE_BYTES:
            self._session.check_room(self._stream)
            self._session.hold(self._stream, len(message), is_last=True)
        deadline_s = self._deadline_s
        time_left_s = None if deadline_s is None else deadline_s - self._session.heard_s  # the message may have taken its time
        self._cancel = self._inference.infer(message, time_left_s, self._reply)

    def _reply(self, result: bytes | InferenceError) -> None:
        self._cancel = None
        if isinstance(result, InferenceError):
            self._fail(result)
        else:
            self._session.answer(self._stream, result)

    def _fail(self, error: Exception) -> None:
        self._onlooker.failed(bytes(self._message or b""), error)
        super()._fail(error)


class UnaryCall(_Unary):
    """Any other method with one message each way, answered at once."""

    __slots__ = ("_method",)

    def __init__(self, session: GrpcSession, stream: int, encoding: bytes | None, method: UnaryMethod) -> None:
        super().__init__(session, stream, encoding)
        self._method = method

    def _answer(self, message: bytes | memoryview) -> None:
        answer = self._method.answer(parse(self._method.request, bytes(message)))
        self._session.answer(self._stream, answer.SerializeToString())
