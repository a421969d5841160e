"""POST /v2/models/<model>[/versions/<version>]/infer: REST body to gRPC message and back.

The body is JSON of Inference-Header-Content-Length bytes, followed by the bytes of binary tensors (Triton's extension). The
checks of the message are shared with gRPC. See https://github.com/kserve/open-inference-protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from halfserve.files.varint import encoded_varint
from halfserve.protos.datatypes import BY_WIRE
from halfserve.protos.inference_pb2 import ModelInferRequest, ModelInferResponse
from halfserve.protos.request_parameters import BINARY_OUTPUTS
from halfserve.protos.shared_memory_parameters import REGION
from halfserve.protos.triton_errors import TritonPhrase
from halfserve.serve.engine.errors import InferenceError, InvalidArgumentError, UnavailableError
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model import Model
from halfserve.serve.http import json_bodies as fields
from halfserve.serve.http.guards import GRANT, client_of, peer_of
from halfserve.serve.http.http_options import HttpLimits
from halfserve.serve.http.json_bodies import Fields
from halfserve.serve.http.json_tensors import array_from_json, json_pieces
from halfserve.serve.http.request_body import (
    SMALLEST_WORTH_BYTES,
    BodyReader,
    accepted_coding,
    answered_or_gone,
    compressed,
    header_length,
)
from halfserve.serve.http.responses import dump_json, dump_up_to
from halfserve.serve.http.routing.infer_operations import INFER
from halfserve.serve.http.routing.operations import JSON_TYPE
from halfserve.serve.http.routing.route_table import serves_versions
from halfserve.serve.protocol.inference import Inference, InferenceEntry
from halfserve.serve.protocol.large_bytes import join_unlocked
from halfserve.serve.protocol.messages import split_response
from halfserve.serve.protocol.raw_tensors import LENGTH_PREFIX_BYTES, from_raw, to_raw
from halfserve.serve.protocol.rpc import INFERENCE
from halfserve.serve.protocol.service import Service
from halfserve.serve.security.gate import AccessGrant

T = TypeVar("T")
RAW_ENTRY = bytes((ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER << 3 | 2,))
BINARY, BINARY_SIZE = "binary_data", "binary_data_size"
Buffer = bytes | memoryview


class InferRoute:
    """Answers inference requests. Large bodies are decoded and encoded on threads, so that no other request waits for them."""

    def __init__(self, core: InferenceCore, service: Service, bodies: BodyReader, limits: HttpLimits) -> None:
        self._core = core
        self._service = service
        self._bodies = bodies
        self._limits = limits

    # The token is checked again when the request is queued.
    @serves_versions("POST", "/infer", INFERENCE, INFER, checks_token=True)
    async def answer(self, request: Request) -> Response:
        """Infer.

        Raises InferenceError: the request is invalid, refused, or failed; ClientDisconnect: the client has disconnected, and
        its place in the queue is free again.
        """
        try:
            asked = await self._asked(request)
        except InferenceError as error:
            record_refusal(self._service, request, error, *named(request))
            raise
        message = await self._infer(request, asked)
        asked = replace(asked, message=b"")  # frees its bytes
        return await self._response(request, asked, message)

    async def _asked(self, request: Request) -> RestRequest:
        name, version = named(request)
        if not (self._core.loads_on_demand and self._core.knows(name)):
            self._core.model(name, version)  # fails before the body is read
        body = await self._bodies.read(request)
        json_bytes = header_length(request, len(body))
        if json_bytes == 0:
            return _only_input(await self._core.arrival(name, version), version, body)
        return await self._apart(len(body), lambda: read_request(body, json_bytes, name, version))

    async def _infer(self, request: Request, asked: RestRequest) -> bytes:
        answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def reply(result: bytes | InferenceError) -> None:
            if answered.done():
                return  # cancelled in the same turn of the loop
            if isinstance(result, InferenceError):
                answered.set_exception(result)
                return
            try:  # now, as many answers may wait for the threads that encode them
                self._bodies.hold_answer(request, len(asked.message) + 2 * len(result))
            except UnavailableError as refusal:
                answered.set_exception(refusal.with_traceback(None))  # a traceback would keep the result in memory
            else:
                answered.set_result(result)

        inference = inference_entry(self._service, request)
        try:
            cancel = inference.infer(asked.message, None, reply)
        except InferenceError as error:
            inference.failed(asked.message, error)
            raise
        if not await answered_or_gone(request, answered, cancel):
            inference.gone(asked.message)
            raise ClientDisconnect
        failure = answered.exception()
        if failure is not None:
            inference.failed(asked.message, cast("InferenceError", failure))
        return answered.result()

    async def _response(self, request: Request, asked: RestRequest, message: bytes) -> Response:
        self._bodies.hold_answer(request, 2 * len(message))  # and no longer the request's
        coding = accepted_coding(request.headers.get("accept-encoding", ""))

        def write() -> tuple[RestResponse, bytes, str | None]:
            written = write_response(message, asked.is_binary)
            if coding is None or len(written.body) < SMALLEST_WORTH_BYTES:
                return written, written.body, None
            return written, compressed(written.body, coding), coding

        written, body, used = await self._apart(len(message), write)
        self._bodies.hold_answer(request, len(message) + len(body))
        headers = {"cache-control": "no-store", "vary": "accept-encoding"}
        if used is not None:
            headers["content-encoding"] = used
        if written.json_bytes is None:
            return Response(body, 200, headers, JSON_TYPE)
        headers["inference-header-content-length"] = str(written.json_bytes)
        return Response(body, 200, headers, "application/octet-stream")

    async def _apart(self, size: int, work: Callable[[], T]) -> T:
        return await asyncio.to_thread(work) if size > self._limits.inline_bytes else work()


def inference_entry(service: Service, request: Request) -> InferenceEntry:
    """Return the entry for the inference requests of one HTTP request, as its token permits."""
    given: AccessGrant | None = request.scope.get(GRANT)
    inference = _inference_of(service, request)
    return inference if given is None else given.inference(inference, peer_of(request.scope), is_charged=True)


def record_refusal(service: Service, request: Request, error: InferenceError | None, name: str, version: str = "") -> None:
    """Record a request for a model that ends before it is queued: refused, or, with None, as its client has disconnected."""
    _inference_of(service, request).refused(name, version, error)


def _inference_of(service: Service, request: Request) -> Inference:
    scope = request.scope
    given: AccessGrant | None = scope.get(GRANT)
    holder = "" if given is None else given.holder
    return service.inference_of(peer_of(scope), dict(scope["headers"]), holder, partial(client_of, scope), is_rest=True)


def named(request: Request) -> tuple[str, str]:
    """Return the model and the version in a request's path; "" where the path has no version."""
    return request.path_params["model"], request.path_params.get("version", "")


def _only_input(model: Model, version: str, body: bytes) -> RestRequest:
    """Return a body of one tensor's bytes, with the model's shape; one open size follows from the number of bytes.

    For BYTES the body is the only element, without its length prefix.
    """
    if len(model.inputs) != 1:
        raise InvalidArgumentError(
            f"Inference-Header-Content-Length is 0, but model {model.name!r} has {len(model.inputs)} inputs; send JSON"
        ).like(TritonPhrase.RAW_INPUTS, count=len(model.inputs), model=model.name)
    (spec,) = model.inputs.values()
    shape = list(spec.shape)
    if model.max_batch_size:
        shape[0] = 1
    size = spec.datatype.itemsize
    if size is None and set(shape) == {1}:
        body, size = len(body).to_bytes(LENGTH_PREFIX_BYTES, "little") + body, 0
    if size is None or shape.count(-1) > 1:
        raise InvalidArgumentError(
            f"Inference-Header-Content-Length is 0, but input {spec.name!r} has no shape that follows from its bytes; send JSON"
        ).like(TritonPhrase.RAW_BYTES if size is None else TritonPhrase.RAW_SHAPE, input=spec.name)
    if -1 in shape:
        known = -size  # the product of the known sizes; -1 stands for the open one
        for length in shape:
            known *= length
        shape[shape.index(-1)] = len(body) // known if known else 0
    return raw_request(body, model.name, version, spec.name, spec.datatype.wire, shape)


@dataclass(frozen=True, kw_only=True)
class RestRequest:
    """A decoded request."""

    message: bytes  # a serialized ModelInferRequest
    binary: Mapping[str, bool]  # whether outputs are answered as bytes, by name
    binary_default: bool  # whether outputs that the client does not name are

    def is_binary(self, output: str) -> bool:
        return self.binary.get(output, self.binary_default)


def read_request(body: bytes, json_bytes: int | None, model: str, version: str) -> RestRequest:
    """Decode a body: the first `json_bytes` are its JSON; None means all. The version "" is the latest.
    Raises InvalidArgumentError: a field is missing or invalid; the text names it.
    """
    view = memoryview(body)
    json_end = len(body) if json_bytes is None else json_bytes
    content = fields.parse_object(view[:json_end])
    head = ModelInferRequest(model_name=model, model_version=version, id=fields.text(content, "id", "the request", ""))
    parameters = fields.members(content, "parameters", "the request")
    binary_default = bool(fields.flag(parameters, BINARY_OUTPUTS, "parameters", default=False))
    set_parameters(head.parameters, parameters, "the request", skip={BINARY_OUTPUTS})
    binary = _read_outputs(head, content)
    raw = _read_inputs(head, content, view[json_end:])
    return RestRequest(message=joined(head, raw), binary=binary, binary_default=binary_default)


def raw_request(body: bytes, model: str, version: str, name: str, datatype: str, shape: list[int]) -> RestRequest:
    """Return the request of a body that is only the bytes of a model's only input (Inference-Header-Content-Length: 0)."""
    head = ModelInferRequest(model_name=model, model_version=version)
    head.inputs.add(name=name, datatype=datatype, shape=shape)
    return RestRequest(message=joined(head, [body]), binary={}, binary_default=True)


def set_parameters(target: Any, given: Mapping[str, Any], where: str, *, skip: set[str]) -> None:
    """Write JSON values into a map of InferParameter.
    Raises InvalidArgumentError: a value has no type that a parameter can have.
    """
    for name, value in given.items():
        if name in skip:
            continue
        if isinstance(value, bool):
            target[name].bool_param = value
        elif isinstance(value, int) and -(2**63) <= value < 2**64:
            setattr(target[name], "int64_param" if value < 2**63 else "uint64_param", value)
        elif isinstance(value, float):
            target[name].double_param = value
        elif isinstance(value, str):
            target[name].string_param = value
        else:
            text = f"{where} has parameter {name!r} that is not text, a number, true or false"
            raise InvalidArgumentError(text).like(TritonPhrase.PARAMETER_TYPE, parameter=name)


def _read_outputs(head: ModelInferRequest, content: Fields) -> dict[str, bool]:
    binary = {}
    for entry in fields.each_object(fields.items(content, "outputs", "the request"), "outputs"):
        name = fields.text(entry, "name", "an entry of outputs")
        where = f"output {name!r}"
        parameters = fields.members(entry, "parameters", where)
        asked = fields.flag(parameters, BINARY, where)
        if asked is not None:
            binary[name] = asked
        set_parameters(head.outputs.add(name=name).parameters, parameters, where, skip={BINARY})
    return binary


def _read_inputs(head: ModelInferRequest, content: Fields, behind: memoryview) -> list[Buffer]:
    raw: list[Buffer] = []
    position = 0
    for entry in fields.each_object(fields.items(content, "inputs", "the request"), "inputs"):
        name = fields.text(entry, "name", "an entry of inputs")
        where = f"input {name!r}"
        datatype, shape = fields.text(entry, "datatype", where), fields.shape(entry, where)
        parameters = fields.members(entry, "parameters", where)
        tensor = head.inputs.add(name=name, datatype=datatype, shape=shape)
        set_parameters(tensor.parameters, parameters, where, skip={BINARY_SIZE})
        if sum((BINARY_SIZE in parameters, "data" in entry, REGION in parameters)) != 1:
            raise InvalidArgumentError(
                f"{where} must have exactly one of data, parameter {BINARY_SIZE}, and a place in shared memory"
            )
        if BINARY_SIZE in parameters:
            size = fields.whole(parameters, BINARY_SIZE, where)
            if size > len(behind) - position:
                raise InvalidArgumentError(
                    f"{where} has {BINARY_SIZE} {size}, but {len(behind) - position} bytes are left behind the JSON; "
                    "its length goes into Inference-Header-Content-Length"
                )
            raw.append(behind[position : position + size])
            position += size
        elif "data" in entry:
            raw.append(raw_from_json(entry["data"], datatype, shape, where))
    if position != len(behind):
        raise InvalidArgumentError(f"{len(behind) - position} bytes behind the JSON belong to no input; expected none")
    return raw


def raw_from_json(data: Any, name: str, shape: list[int], where: str) -> bytes:
    """Return the wire bytes of a tensor's JSON values.
    Raises InvalidArgumentError: they do not fit the datatype of this name or the shape; the text begins with `where`.
    """
    datatype = BY_WIRE.get(name)
    if datatype is None:
        raise InvalidArgumentError(f"{where} has datatype {name!r:.40}, expected one of {', '.join(BY_WIRE)}")
    try:
        return to_raw(array_from_json(data, datatype, shape), datatype)
    except ValueError as error:
        raise InvalidArgumentError(f"{where} {error}") from None


def joined(head: ModelInferRequest, raw: list[Buffer]) -> bytes:
    """Return the message, with its raw contents appended by hand, so that they are copied once."""
    parts: list[Buffer] = [head.SerializeToString(deterministic=True)]
    for tensor in raw:
        parts += (RAW_ENTRY, encoded_varint(len(tensor)), tensor)
    return join_unlocked(parts)


@dataclass(frozen=True, kw_only=True)
class RestResponse:
    """An encoded answer."""

    body: bytes  # JSON, followed by the bytes of binary tensors
    json_bytes: int | None  # length of the JSON; None if nothing follows it


def write_response(message: bytes, is_binary: Callable[[str], bool]) -> RestResponse:
    """Encode a serialized ModelInferResponse; `is_binary` says whether an output is sent as bytes.
    Raises InvalidArgumentError: an output cannot be written as JSON.
    """
    head, tensors = split_response(message)
    response = ModelInferResponse.FromString(head)
    content: dict[str, Any] = {"model_name": response.model_name, "model_version": response.model_version}
    if response.id:
        content["id"] = response.id
    if response.parameters:
        content["parameters"] = parameter_values(response.parameters)
    behind: list[Buffer] = []
    text = [dump_up_to(content, "outputs").encode(), b"["]
    for index, (entry, raw) in enumerate(zip(response.outputs, tensors, strict=True)):
        text += [b","] if index else []
        text += _write_output(entry, raw, behind if is_binary(entry.name) else None)
    text.append(b"]}")
    follows = any(is_binary(entry.name) for entry in response.outputs if REGION not in entry.parameters)
    return RestResponse(body=join_unlocked([*text, *behind]), json_bytes=sum(map(len, text)) if follows else None)


def parameter_values(parameters: Any) -> dict[str, Any]:
    """Return the values in a map of InferParameter, by name."""
    return {name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in parameters.items()}


def _write_output(entry: ModelInferResponse.InferOutputTensor, raw: memoryview, behind: list[Buffer] | None) -> list[bytes]:
    shape = list(entry.shape)
    output: dict[str, Any] = {"name": entry.name, "datatype": entry.datatype, "shape": shape}
    there = REGION in entry.parameters
    # Triton's clients expect bytes of every output with parameters, so that outputs in shared memory have none.
    if behind is not None and not there:
        output["parameters"] = {"binary_data_size": len(raw)}
        behind.append(raw)
    if there or behind is not None:
        return [dump_json(output).encode()]
    datatype = BY_WIRE[entry.datatype]
    try:
        return [dump_up_to(output, "data").encode(), *json_pieces(from_raw(raw, datatype, shape), datatype), b"}"]
    except ValueError as error:
        raise InvalidArgumentError(f"output {entry.name!r} {error}") from None
