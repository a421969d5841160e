"""POST /v2/models/<model>[/versions/<version>]/generate and /generate_stream: Triton's generate extension.

The fields of a request's JSON object are the model's inputs and the request's parameters; the fields of a response's are the
outputs. `generate` answers with one object, `generate_stream` with any number of them as server-sent events. See
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_generate.md.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from halfserve.protos import inference_pb2 as pb
from halfserve.protos.datatypes import BY_WIRE
from halfserve.protos.triton_errors import TritonPhrase
from halfserve.serve.engine.errors import BackendError, InferenceError, InvalidArgumentError, worded
from halfserve.serve.http import json_bodies as fields
from halfserve.serve.http.http_options import HttpLimits, memory_of
from halfserve.serve.http.infer_route import (
    Buffer,
    inference_entry,
    joined,
    named,
    parameter_values,
    raw_from_json,
    record_refusal,
    set_parameters,
    timing_headers,
)
from halfserve.serve.http.json_tensors import json_pieces
from halfserve.serve.http.request_body import BodyReader, RequestMemory, answered_or_gone, memory_held
from halfserve.serve.http.responses import dump_json, http_status, json_text_response
from halfserve.serve.http.routes import rpc_response
from halfserve.serve.http.routing.infer_operations import EVENT_STREAM, GENERATE, GENERATE_STREAM
from halfserve.serve.http.routing.route_table import serves_versions
from halfserve.serve.protocol.inference import InferenceEntry
from halfserve.serve.protocol.messages import split_response
from halfserve.serve.protocol.raw_tensors import from_raw
from halfserve.serve.protocol.rpc import INFERENCE
from halfserve.serve.protocol.service import Service

PARAMETERS = "parameters"
Inputs = Mapping[str, Any]  # ModelMetadataResponse.TensorMetadata by name


class GenerateRoute:
    """Answers generate requests. Large bodies are decoded and encoded on threads, so that no other request waits for them."""

    def __init__(self, service: Service, bodies: BodyReader, limits: HttpLimits) -> None:
        self._service = service
        self._bodies = bodies
        self._limits = limits

    @serves_versions("POST", "/generate", INFERENCE, GENERATE)
    async def answer(self, request: Request) -> Response:
        """Return the model's only response. Raises InferenceError: the request is invalid, refused, or failed, or the model
        gives another number of responses; ClientDisconnect: the client has disconnected; its place in the queue is free again.
        """
        responses = await self._ask(request)
        only = await responses.next_or_gone(request)
        if isinstance(only, InferenceError):
            raise only
        if only is None or await responses.next_or_gone(request) is not None:
            number = "none" if only is None else "more"
            error = BackendError(
                f"the model gave {number}, and generate takes exactly one response; send it to generate_stream"
            )
            raise error.like(TritonPhrase.NOT_ONE_RESPONSE)
        return json_text_response(await self._written(only), headers=timing_headers(request, (only,)))

    @serves_versions("POST", "/generate_stream", INFERENCE, GENERATE_STREAM)
    async def stream(self, request: Request) -> Response:
        """Return the model's responses as they come; its errors too, the first of which sets the status if it comes first.

        Raises:
            InferenceError: the request is invalid, or refused before it is queued.
            ClientDisconnect: the client has disconnected; its place in the queue is free again.
        """
        responses = await self._ask(request)
        first = await responses.next_or_gone(request)
        status, _, headers = http_status(first) if isinstance(first, InferenceError) else (200, "", {})

        async def events() -> AsyncIterator[str]:
            response = first
            while response is not None:
                yield f"data: {await self._event(response)}\n\n"
                response = await responses.next()

        if isinstance(first, bytes):
            headers = timing_headers(request, (first,))
        return StreamingResponse(events(), status, {"cache-control": "no-store", **headers}, EVENT_STREAM)

    async def _ask(self, request: Request) -> Responses:
        """Queue a request, which is cancelled if the current task ends before the last response has come."""
        name, version = named(request)
        try:
            asked = pb.ModelMetadataRequest(name=name, version=version)
            metadata = await rpc_response(self._service, request, "ModelMetadata", asked)
            inputs = {tensor.name: tensor for tensor in metadata.inputs}
            body = await self._bodies.read(request)
            message = await self._bodies.understand(body, lambda body: read_request(body, inputs, name, version))
        except InferenceError as error:
            record_refusal(self._service, request, error, name, version)
            raise
        responses = Responses(inference_entry(self._service, request), message, memory_held(request))
        task = asyncio.current_task()
        if task is not None:
            task.add_done_callback(lambda _: responses.give_up())
        responses.ask()
        return responses

    async def _event(self, response: bytes | InferenceError) -> str:
        if isinstance(response, bytes):
            try:
                return await self._written(response)
            except InferenceError as error:
                response = error
        return dump_json({"error": http_status(response)[1]})

    async def _written(self, message: bytes) -> str:
        return await self._bodies.understand(message, write_response)


class Responses:
    """The responses to one request, any number of them. Lives on the event loop.

    The request's memory counts what has come and is not read yet. The model waits for a client that reads slowly; the client
    loses the rest of its responses only if others need the memory.
    """

    def __init__(self, inference: InferenceEntry, message: bytes, memory: RequestMemory) -> None:
        self._inference = inference
        self._message = message
        self._memory = memory
        # None after the last response. A function is called once the client has taken the response before it.
        self._coming: asyncio.Queue[bytes | InferenceError | Callable[[], None] | None] = asyncio.Queue()
        self._cancel: Callable[[], None] | None = None
        self._is_many = False

    def ask(self) -> None:
        """Queue the request. Raises InferenceError: it is wrong or refused."""
        try:
            self._cancel = self._inference.infer(self._message, None, self._reply, many=self)
        except InferenceError as error:
            self._inference.failed(self._message, error)
            raise

    async def next(self) -> bytes | InferenceError | None:
        """Return the next response; None after the last one."""
        while callable(response := await self._coming.get()):
            response()
        if isinstance(response, bytes):
            self._memory.shrink(_memory_of(response))
        return response

    async def next_or_gone(self, request: Request) -> bytes | InferenceError | None:
        """Return the next response of a request whose answer has not begun; None after the last one.
        Raises ClientDisconnect: the client has disconnected.
        """
        coming = asyncio.ensure_future(self.next())
        if not await answered_or_gone(request, coming, self.give_up):
            raise ClientDisconnect
        return coming.result()

    def give_up(self) -> None:
        """Cancel the request, unless its last response has come."""
        cancel, self._cancel = self._cancel, None
        if cancel is not None:
            cancel()
            self._inference.gone(self._message)

    def begin(self, *, wants_empty_final: bool) -> None:  # noqa: ARG002  (the end of the body is the end of the responses)
        """See ManyReplies."""
        self._is_many = True

    def response(
        self,
        response: bytes | InferenceError,
        *,
        final: bool,  # noqa: ARG002  (`_reply` follows the last one)
        read: Callable[[], None],
    ) -> None:
        """See ManyReplies."""
        if self._cancel is not None:
            self._put(response)
            self._coming.put_nowait(read)

    def _reply(self, result: bytes | InferenceError) -> None:
        if self._cancel is None:
            return
        if isinstance(result, InferenceError):
            self._inference.failed(self._message, result)
        if not self._is_many or isinstance(result, InferenceError):
            self._put(result)
        self._cancel = None
        self._coming.put_nowait(None)

    def _put(self, response: bytes | InferenceError) -> None:
        if isinstance(response, bytes):
            try:
                self._memory.grow(_memory_of(response))
            except InferenceError as refusal:
                self.give_up()
                self._coming.put_nowait(refusal)
                self._coming.put_nowait(None)
                return
        self._coming.put_nowait(response)


def _memory_of(response: bytes) -> int:
    """Bytes of memory for a response and its JSON."""
    return memory_of(2 * len(response))


def read_request(body: bytes, inputs: Inputs, model: str, version: str) -> bytes:
    """Return the serialized ModelInferRequest of a generate request. Fields that are no inputs of the model are parameters.

    Raises InvalidArgumentError: a field is invalid; the text names it.
    """
    content = dict(fields.parse_object(body, unique=True))
    head = pb.ModelInferRequest(model_name=model, model_version=version, id=fields.text(content, "id", "the request", ""))
    if PARAMETERS in inputs:
        raise InvalidArgumentError(f"model {model!r} has an input {PARAMETERS!r}, which generate cannot fill; send it to infer")
    with worded(TritonPhrase.GENERATE_PARAMETERS):
        nested = fields.members(content, PARAMETERS, "the request")
    given = {name: value for name, value in content.items() if name not in {"id", PARAMETERS}}
    for name in given.keys() & nested.keys():
        raise InvalidArgumentError(f"the request has {name!r:.40} beside {PARAMETERS} and in it, expected it once")
    raw: list[Buffer] = []
    for name, value in (*given.items(), *nested.items()):
        if name in inputs:
            tensor = inputs[name]
            shape = _filled(tensor.shape, len(value) if isinstance(value, list) else 1)
            with worded(TritonPhrase.GENERATE_FLAG if tensor.datatype == "BOOL" else TritonPhrase.GENERATE_TEXT):
                raw.append(raw_from_json(value, tensor.datatype, shape, f"input {name!r}"))
            head.inputs.add(name=name, datatype=tensor.datatype, shape=shape)
        else:
            with worded(TritonPhrase.GENERATE_NESTED if name in nested else TritonPhrase.PARAMETER_TYPE, parameter=name):
                set_parameters(head.parameters, {name: value}, "the request", skip=set())
    return joined(head, raw)


def _filled(declared: Any, elements: int) -> list[int]:
    """Return the shape of a flat list for an input: the last open size takes what fixed sizes leave, the other open sizes are
    1.
    """
    shape, fixed = list(declared), math.prod(size for size in declared if size != -1)
    for place in reversed(range(len(shape))):
        if shape[place] == -1:
            shape[place] = elements // fixed if fixed else 0
            elements = fixed
    return shape


def write_response(message: bytes) -> str:
    """Return the JSON of a serialized ModelInferResponse; outputs of one element are no lists.
    Raises InvalidArgumentError: an output cannot be written as JSON.
    """
    head, tensors = split_response(message)
    response = pb.ModelInferResponse.FromString(head)
    content = {"model_name": response.model_name, "model_version": response.model_version}
    if response.id:
        content["id"] = response.id
    written = dump_json({**parameter_values(response.parameters), **content})[:-1]
    for entry, raw in zip(response.outputs, tensors, strict=True):
        datatype, shape = BY_WIRE[entry.datatype], list(entry.shape)
        try:
            values = b"".join(json_pieces(from_raw(raw, datatype, shape), datatype)).decode()
        except ValueError as error:
            raise InvalidArgumentError(f"output {entry.name!r} {error}") from None
        written += f",{json.dumps(entry.name)}:{values[1:-1] if math.prod(shape) == 1 else values}"
    return written + "}"
