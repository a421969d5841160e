"""ModelStreamInfer: many requests over one call, answered in the requests' order."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial

from halfserve.protos.inference_pb2 import ModelInferRequest, ModelInferResponse, ModelStreamInferResponse
from halfserve.protos.varint import encoded_varint
from halfserve.serve.engine.errors import InferenceError
from halfserve.serve.protocol.inference import AnyInference, Cancel
from halfserve.serve.protocol.messages import check_fields, parse, split_request
from halfserve.serve.protocol.status import status_of

logger = logging.getLogger(__name__)

INFER_RESPONSE = b"\x12"  # the field of a ModelStreamInferResponse
STATUS = "grpc-status"  # gRPC's own name for the number of a status
# Triton's clients read this to know a request's last response; here each request has one.
FINAL = ModelInferResponse()
FINAL.parameters["triton_final_response"].bool_param = True
FINAL_BYTES = FINAL.SerializeToString()


class _Slot:
    __slots__ = ("answer", "cancel", "request")

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.answer: bytes | None = None
        self.cancel: Cancel | None = None


class InferenceStream:
    """One streaming call. A failed request gets an error response; the stream continues."""

    def __init__(self, inference: AnyInference, send: Callable[[bytes], None]) -> None:
        """`send` gets each serialized ModelStreamInferResponse, on the event loop."""
        self._inference = inference
        self._send = send
        self._slots: deque[_Slot] = deque()
        self.held_bytes = 0  # of unanswered requests

    def __len__(self) -> int:
        """Unanswered requests."""
        return len(self._slots)

    def receive(self, data: bytes, time_left_s: float | None) -> None:
        """Take a serialized ModelInferRequest. Errors are answered, not raised."""
        slot = _Slot(data)
        self._slots.append(slot)
        self.held_bytes += len(data)
        try:
            slot.cancel = self._inference.infer(data, time_left_s, partial(self._reply, slot, data))
        except Exception as error:  # noqa: BLE001  (any failure is this request's, not the stream's)
            self._fail(slot, data, error)

    def cancel(self) -> None:
        """Cancel all requests and send nothing more."""
        self._send = _discard  # breaks a reference cycle
        for slot in self._slots:
            cancel, slot.cancel = slot.cancel, None  # breaks a reference cycle
            if cancel is not None and slot.answer is None:
                cancel()
                self._inference.gone(slot.request)
        self._slots.clear()
        self.held_bytes = 0

    def _reply(self, slot: _Slot, data: bytes, result: bytes | InferenceError) -> None:
        slot.cancel = None  # breaks a reference cycle
        if isinstance(result, InferenceError):
            self._fail(slot, data, result)
            return
        response = result + FINAL_BYTES  # protobuf merges concatenated messages
        self._answer(slot, INFER_RESPONSE + encoded_varint(len(response)) + response)

    def _fail(self, slot: _Slot, data: bytes, error: Exception) -> None:
        if not isinstance(error, InferenceError):
            logger.error("a request in a stream failed", exc_info=error)
        self._inference.failed(data, error)
        status = status_of(error)
        response = ModelStreamInferResponse(error_message=status.details)
        response.infer_response.MergeFrom(FINAL)
        # The protocol has only a text here; status code and trailers go into parameters.
        response.infer_response.parameters[STATUS].int64_param = status.code
        for name, value in status.trailers:
            response.infer_response.parameters[name].string_param = value
        response.infer_response.id = _id_of(data)
        self._answer(slot, response.SerializeToString())

    def _answer(self, slot: _Slot, answer: bytes) -> None:
        slot.answer = answer
        while self._slots and (first := self._slots[0].answer) is not None:
            self.held_bytes -= len(self._slots.popleft().request)
            self._send(first)


def _discard(_: bytes) -> None:
    pass


def _id_of(data: bytes) -> str:
    """The request's id, which its error response repeats; "" for undecodable bytes."""
    try:
        check_fields(data)
        cut = split_request(data)
        return str(parse(ModelInferRequest, data).id) if cut is None else cut.id.decode("ascii")
    except InferenceError:
        return ""
