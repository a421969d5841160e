"""ModelStreamInfer: many requests over one call, answered in the order of the requests.

Requests of decoupled models get any number of responses, which are sent as soon as they are ready, between the others.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from halfserve.files.varint import encoded_varint
from halfserve.protos.inference_pb2 import ModelInferRequest, ModelInferResponse, ModelStreamInferResponse
from halfserve.serve.engine.errors import InferenceError
from halfserve.serve.protocol.inference import Cancel, InferenceEntry
from halfserve.serve.protocol.messages import check_fields, parse, split_request
from halfserve.serve.protocol.status import status_of

logger = logging.getLogger(__name__)

INFER_RESPONSE = b"\x12"  # the field of a ModelStreamInferResponse
ENDS_WITH_ERROR = (b"triton_grpc_error", b"true")  # a client's header: the first error ends the stream, with its status
STATUS = "grpc-status"  # gRPC's own name for the number of a status
IS_FINAL = "triton_final_response"  # Triton's clients read this to know a request's last response


def _marked(*, final: bool) -> ModelInferResponse:
    message = ModelInferResponse()
    message.parameters[IS_FINAL].bool_param = final
    return message


MARKS = {final: _marked(final=final) for final in (False, True)}
MARK_BYTES = {final: mark.SerializeToString() for final, mark in MARKS.items()}


class _Slot:
    """One request of the stream.

    Attributes:
        request: the serialized request.
        answer: waits until all earlier requests are answered; an error if it ends the stream.
        cancel: cancels the request.
        is_many: whether the request gets any number of responses, out of order.
        wants_empty_final: whether the client wants a last response without outputs.
        is_final_sent: whether the last response has been sent.
    """

    __slots__ = ("_stream", "answer", "cancel", "is_final_sent", "is_many", "request", "wants_empty_final")

    def __init__(self, stream: InferenceStream, request: bytes) -> None:
        self._stream = stream
        self.request = request
        self.answer: bytes | Exception | None = None
        self.cancel: Cancel | None = None
        self.is_many = self.wants_empty_final = self.is_final_sent = False

    def begin(self, *, wants_empty_final: bool) -> None:
        self.is_many, self.wants_empty_final = True, wants_empty_final
        self._stream.leave_order(self)

    def response(self, response: bytes | InferenceError, *, final: bool, read: Callable[[], None]) -> None:
        self.is_final_sent |= final
        self._stream.respond(self, response, final=final)
        self._stream.when_read(read)


class StreamClient(Protocol):
    """The client of a streaming call. Lives on the event loop."""

    def send(self, response: bytes) -> None: ...  # send a serialized ModelStreamInferResponse
    def when_read(self, then: Callable[[], None]) -> None: ...  # call `then` once the client can take more, maybe at once
    def request_ended(self) -> None: ...  # a request has ended without a last message
    def fail(self, error: Exception) -> None: ...  # end the call with a request's error; earlier requests are answered


class _GoneClient:
    """Takes the place of the client of a cancelled call."""

    def send(self, response: bytes) -> None: ...
    def when_read(self, then: Callable[[], None]) -> None: ...
    def request_ended(self) -> None: ...
    def fail(self, error: Exception) -> None: ...


class InferenceStream:
    """One streaming call. A failed request gets an error response and the stream continues, unless errors end it."""

    def __init__(self, inference: InferenceEntry, client: StreamClient, *, ends_with_error: bool) -> None:
        """Open a stream without requests, which `inference` answers.

        `ends_with_error`: the error of a request ends the stream, once the requests before it are answered.
        """
        self._inference = inference
        self._client = client
        self._ends_with_error = ends_with_error
        self._slots: deque[_Slot] = deque()
        self._many: set[_Slot] = set()
        self.held_bytes = 0  # total size of the unanswered requests

    def __len__(self) -> int:
        """Return the number of unanswered requests."""
        return len(self._slots) + len(self._many)

    def receive(self, data: bytes, time_left_s: float | None) -> None:
        """Take a serialized ModelInferRequest. Errors become responses and are not raised."""
        slot = _Slot(self, data)
        self._slots.append(slot)
        self.held_bytes += len(data)
        try:
            slot.cancel = self._inference.infer(data, time_left_s, partial(self._reply, slot, data), many=slot)
        except Exception as error:  # noqa: BLE001  (any failure is this request's, not the stream's)
            self._fail(slot, data, error)

    def cancel(self) -> None:
        """Cancel all requests and send nothing more."""
        self._client = _GoneClient()  # breaks a reference cycle
        for slot in (*self._slots, *self._many):
            cancel, slot.cancel = slot.cancel, None  # breaks a reference cycle
            if cancel is not None and slot.answer is None:
                cancel()
                self._inference.gone(slot.request)
        self._slots.clear()
        self._many.clear()
        self.held_bytes = 0

    def leave_order(self, slot: _Slot) -> None:
        """Take a request out of the order: its responses are sent as they come, and later requests no longer wait for it."""
        self._slots.remove(slot)
        self._many.add(slot)
        self._send_in_order()

    def respond(self, slot: _Slot, response: bytes | InferenceError, *, final: bool) -> None:
        """Send one of many responses to a request."""
        if slot not in self._many:
            return
        if isinstance(response, Exception):
            self._put(self._answer_of(slot.request, response, final=final))
        else:
            self._client.send(_ok(response, final))

    def when_read(self, then: Callable[[], None]) -> None:
        """Call `then` once the client can take more."""
        self._client.when_read(then)

    def _reply(self, slot: _Slot, data: bytes, result: bytes | InferenceError) -> None:
        slot.cancel = None  # breaks a reference cycle
        if isinstance(result, InferenceError):
            self._fail(slot, data, result)
        elif slot.is_many:
            self._end(slot, _ok(result, final=True) if slot.wants_empty_final and not slot.is_final_sent else None)
        else:
            self._answer(slot, _ok(result, final=True))

    def _fail(self, slot: _Slot, data: bytes, error: Exception) -> None:
        if not isinstance(error, InferenceError):
            logger.error("a request in a stream failed", exc_info=error)
        self._inference.failed(data, error)
        answer = self._answer_of(data, error, final=True)
        if slot.is_many:
            self._end(slot, answer)
        else:
            self._answer(slot, answer)

    def _answer_of(self, data: bytes, error: Exception, *, final: bool) -> bytes | Exception:
        """Return the response to a failed request; the error itself if errors end the stream."""
        return error if self._ends_with_error else _error(data, error, final=final)

    def _put(self, answer: bytes | Exception) -> None:
        if isinstance(answer, Exception):
            self._client.fail(answer)
        else:
            self._client.send(answer)

    def _end(self, slot: _Slot, last: bytes | Exception | None) -> None:
        if slot not in self._many:
            return
        self._many.remove(slot)
        self.held_bytes -= len(slot.request)
        if last is not None:
            self._put(last)
        else:
            self._client.request_ended()

    def _answer(self, slot: _Slot, answer: bytes | Exception) -> None:
        slot.answer = answer
        self._send_in_order()

    def _send_in_order(self) -> None:
        while self._slots and (first := self._slots[0].answer) is not None:
            self.held_bytes -= len(self._slots.popleft().request)
            self._put(first)


def _ok(response: bytes, final: bool) -> bytes:
    marked = response + MARK_BYTES[final]  # protobuf merges concatenated messages
    return INFER_RESPONSE + encoded_varint(len(marked)) + marked


def _error(data: bytes, error: Exception, *, final: bool) -> bytes:
    status = status_of(error)
    response = ModelStreamInferResponse(error_message=status.details)
    response.infer_response.MergeFrom(MARKS[final])
    # The protocol has only a text here; status code and trailers go into parameters.
    response.infer_response.parameters[STATUS].int64_param = status.code
    for name, value in status.trailers:
        response.infer_response.parameters[name].string_param = value
    response.infer_response.id = _id_of(data)
    return response.SerializeToString()


def _id_of(data: bytes) -> str:
    """Return the request's id, which its error response repeats; "" if the bytes cannot be decoded."""
    try:
        check_fields(data)
        cut = split_request(data)
        return str(parse(ModelInferRequest, data).id) if cut is None else cut.id.decode("ascii")
    except InferenceError:
        return ""
