"""State of one stream: request numbers, order of the answers, time limits. No threads, event loops or gRPC calls."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import grpc

from halfserve.protos.inference_pb2 import ModelMetadataResponse, ModelStreamInferResponse
from halfserve.protos.request_parameters import EMPTY_FINAL
from halfserve.serve.client.array_conversion import Array
from halfserve.serve.client.errors import (
    RETRY_HINT_KEY,
    ClientError,
    DeadlineExceeded,
    InvalidRequest,
    ServerUnavailable,
    error_of_code,
    hinted_s,
)
from halfserve.serve.client.exchange import Exchange
from halfserve.serve.client.infer_exchange import InferState, fresh_metadata
from halfserve.serve.client.infer_messages import (
    InferResponse,
    LargeResponse,
    Parameter,
    check_answer,
    output_arrays,
    request_parts,
    serialized_request,
    values_of,
)

METHOD = "ModelStreamInfer"
DEFAULT_IN_FLIGHT = 32
MAX_IN_FLIGHT = 65536
LONGEST_NUMBER = 20  # most digits of a request's number; Python refuses to read 5,000
# The protocol gives only a text for a failed request; this project's server adds the status and the retry hint as parameters.
STATUS = "grpc-status"
# Triton's parameters: a request asks for a marked last answer, and an answer is marked as the last.
IS_FINAL = "triton_final_response"
CODE_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}


class StreamAnswer:
    """Answer to one request of a stream; only a decoupled model gives several per request.

    Attributes:
        index: number of the request, counted from 0.
        error: reason why it was not answered; None if it was. Other requests of the stream are not affected.
        is_final: whether this is the last answer to the request. The last one of a decoupled model may have no outputs.
        parameters: parameters of the response, such as its times; empty for an error.
    """

    __slots__ = ("_outputs", "error", "index", "is_final", "parameters")

    def __init__(
        self,
        index: int,
        outputs: dict[str, Array],
        error: ClientError | None = None,
        *,
        is_final: bool = True,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        self.index = index
        self.error = error
        self.is_final = is_final
        self.parameters = parameters or {}
        self._outputs = outputs

    @property
    def outputs(self) -> dict[str, Array]:
        """Name -> array, as `Client.infer` returns it.

        Raises:
            ClientError: the request was not answered; see `error`.
        """
        if self.error is not None:
            raise self.error
        return self._outputs

    def __repr__(self) -> str:
        what = f"outputs={list(self._outputs)}" if self.error is None else f"error={self.error!r}"
        return f"StreamAnswer(index={self.index}, {what})"


class StreamSession:
    """The requests of one stream and their answers, in the requests' order; `options` are those of `request_parts`.

    One thread makes requests while another takes answers.
    """

    def __init__(self, metadata: ModelMetadataResponse, options: Mapping[str, Any], *, address: str) -> None:
        self._metadata = metadata
        self._options = options
        self._address = address
        self._lock = threading.Lock()
        self._made = 0
        self._taken = 0
        self._arrived: dict[int, deque[StreamAnswer]] = {}
        self._answered: set[int] = set()  # requests whose final answer has arrived but is not taken yet
        self._many: set[int] = set()  # unfinished requests that already have an answer which is not final
        self._complete = False
        self._progress_s = time.monotonic()

    @property
    def unanswered(self) -> int:
        return self._made - self._taken - len(self._answered)

    def request(self, inputs: Mapping[str, Any]) -> bytes | None:
        """Make the next request's message; None if it does not fit the model, in which case the error is its answer."""
        index, serialized, misfit = self._made, None, None
        try:
            request, raw = request_parts(self._metadata, inputs, **{**self._options, "request_id": str(index)})
            request.parameters[EMPTY_FINAL].bool_param = True
            serialized = serialized_request(request, raw)
        except InvalidRequest as error:
            misfit = error
        with self._lock:
            if not self.unanswered:
                self._progress_s = time.monotonic()
            if misfit is not None:
                self._add(StreamAnswer(index, {}, misfit))
            self._made += 1
        return serialized

    def complete(self) -> None:
        """Record that no further request follows."""
        with self._lock:
            self._complete = True
            self._progress_s = time.monotonic()

    def accept(self, response: ModelStreamInferResponse | LargeResponse) -> None:
        """Take in an answer of the server. Raises ClientError: it belongs to no request (code "INTERNAL")."""
        infer = _infer_response(response)
        with self._lock:
            index = self._index(infer.id)
            if not self._taken <= index < self._made or index in self._answered:
                raise ClientError(
                    f"{self._address} answered request {infer.id!r} of a stream, which does not wait for an answer",
                    code="INTERNAL",
                )
            is_final = infer.parameters[IS_FINAL].bool_param if IS_FINAL in infer.parameters else True
            if not is_final:
                self._many.add(index)
            # Each answer of a decoupled model has the outputs that the model chose.
            wanted = () if index in self._many else self._options.get("outputs") or ()
            self._add(_answer(index, response, wanted, is_final=is_final))
            self._progress_s = time.monotonic()

    def _add(self, answer: StreamAnswer) -> None:
        self._arrived.setdefault(answer.index, deque()).append(answer)
        if answer.is_final:
            self._answered.add(answer.index)

    def _index(self, request_id: str) -> int:
        """Return the number of the request that an answer belongs to; -1 if it belongs to none of this stream."""
        if not request_id:  # some servers answer an error without the request's id; they keep the order
            return next(index for index in range(self._taken, self._made + 1) if index not in self._answered)
        is_number = request_id.isdecimal() and request_id.isascii() and len(request_id) < LONGEST_NUMBER
        return int(request_id) if is_number else -1

    def ready(self) -> Iterator[StreamAnswer]:
        """Yield the answers that have arrived and are next in order; each is yielded once."""
        while answers := self._arrived.get(self._taken):
            with self._lock:
                answer = answers.popleft()
                if answer.is_final:
                    del self._arrived[answer.index]
                    self._answered.remove(answer.index)
                    self._many.discard(answer.index)
                    self._taken += 1
            yield answer

    def patience_s(self, timeout_s: float | None) -> float | None:
        """Seconds to wait for an event before calling this again; None for no limit.
        Raises DeadlineExceeded: requests have waited for `timeout_s` without any answer.
        """
        if timeout_s is None:
            return None
        left_s = self._progress_s + timeout_s - time.monotonic()
        if left_s > 0:
            return left_s
        if self.unanswered:
            text = f"{self._address} answered none of {self.unanswered} requests of a stream within {timeout_s:g} s"
            raise DeadlineExceeded(f"{text}; allow more time, or keep fewer in flight")
        return timeout_s

    def is_over(self, timeout_s: float | None) -> bool:
        """Return whether every request is answered, and the server has had `timeout_s` to end the stream."""
        over = self._complete and not self.unanswered
        return over and timeout_s is not None and time.monotonic() >= self._progress_s + timeout_s

    def check_complete(self) -> None:
        """Check, when the server has ended the stream, that no answer is missing.
        Raises ServerUnavailable: requests are left without an answer.
        """
        if self.unanswered:
            raise ServerUnavailable(
                f"{self._address} ended a stream with {self.unanswered} requests unanswered; send them again"
            )


def prepare_stream(
    state: InferState, model: str, version: str, in_flight: int, options: Mapping[str, Any], address: str
) -> Exchange[StreamSession]:
    """Read the model's metadata and check the arguments. Raises InvalidRequest: in_flight is out of range."""
    if isinstance(in_flight, bool) or not isinstance(in_flight, int) or not 0 < in_flight <= MAX_IN_FLIGHT:
        raise InvalidRequest(f"in_flight must be 1 to {MAX_IN_FLIGHT} requests, not {in_flight!r}")
    # Read the metadata now: a stream may last long, and cannot refresh it later.
    metadata = yield from fresh_metadata(state, (model, version))
    return StreamSession(metadata, {**options, "version": version}, address=address)


def _answer(
    index: int, response: ModelStreamInferResponse | LargeResponse, wanted: Collection[str], *, is_final: bool
) -> StreamAnswer:
    infer, text = _infer_response(response), "" if isinstance(response, LargeResponse) else response.error_message
    try:
        if not text:
            parameters = values_of(infer.parameters)
            parameters.pop(IS_FINAL, None)
            return StreamAnswer(index, _outputs(response, wanted), is_final=is_final, parameters=parameters)
    except ClientError as error:
        return StreamAnswer(index, {}, error, is_final=is_final)
    number = infer.parameters[STATUS].int64_param if STATUS in infer.parameters else -1  # no code has this number
    hint = infer.parameters[RETRY_HINT_KEY].string_param if RETRY_HINT_KEY in infer.parameters else ""
    refused = error_of_code(CODE_NAMES.get(number, "UNKNOWN"), text, retry_after_s=hinted_s(hint))
    return StreamAnswer(index, {}, refused, is_final=is_final)


def _outputs(response: ModelStreamInferResponse | LargeResponse, wanted: Collection[str]) -> dict[str, Array]:
    if isinstance(response, ModelStreamInferResponse) and not response.HasField("infer_response"):
        raise ClientError("the server's answer holds neither outputs nor an error", code="INTERNAL")
    infer = _infer_response(response)
    check_answer(infer, wanted)
    return output_arrays(infer)


def _infer_response(response: ModelStreamInferResponse | LargeResponse) -> InferResponse:
    return response if isinstance(response, LargeResponse) else response.infer_response
