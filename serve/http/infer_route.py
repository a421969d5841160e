"""POST /v2/models/<model>[/versions/<version>]/infer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from protos.inference_pb2 import ModelInferRequest
from serve.engine.errors import InferenceError, InvalidArgumentError
from serve.engine.inference_core import InferenceCore
from serve.engine.model import Model
from serve.http.answers import JSON_TYPE
from serve.http.content_coding import SMALLEST_WORTH_BYTES, accepted_coding, compressed
from serve.http.infer_request import RestRequest, raw_request, read_request
from serve.http.infer_response import RestResponse, write_response
from serve.http.options import HttpLimits
from serve.http.request_body import BodyReader, client_gone, header_length
from serve.http.token_guard import PASS, peer_of
from serve.protocol.inference import AnyInference, ObservedInference, WatchableInference
from serve.protocol.raw_tensors import LENGTH_PREFIX_BYTES
from serve.protocol.service import Service
from serve.security.gate_pass import Pass

T = TypeVar("T")


class InferRoute:
    """Answers inference requests. What is large is decoded and encoded on threads, so that no other request waits for it."""

    def __init__(self, core: InferenceCore, service: Service, bodies: BodyReader, limits: HttpLimits) -> None:
        self._core = core
        self._service = service
        self._bodies = bodies
        self._limits = limits

    async def answer(self, request: Request) -> Response:
        """Infer.

        Raises:
            InferenceError: the request is wrong, cannot be taken, or failed.
            ClientDisconnect: the client has gone; its place in the queue is free again.
        """
        try:
            asked = await self._asked(request)
        except InferenceError as error:
            self._core.figures.refuse(error)
            name, version = _named(request)
            self._inference(request).failed(
                ModelInferRequest(model_name=name, model_version=version).SerializeToString(), error
            )
            raise
        message = await self._infer(request, asked)
        asked = replace(asked, message=b"")  # its bytes are not counted any more
        return await self._response(request, asked, message)

    async def _asked(self, request: Request) -> RestRequest:
        name, version = _named(request)
        self._core.model(name, version)  # what is not there needs no body
        body = await self._bodies.read(request)
        json_bytes = header_length(request, len(body))
        if json_bytes == 0:
            return _only_input(self._core.model(name, version), version, body)
        return await self._apart(len(body), lambda: read_request(body, json_bytes, name, version))

    async def _infer(self, request: Request, asked: RestRequest) -> bytes:
        answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def reply(result: bytes | InferenceError) -> None:
            if answered.done():
                return  # cancelled in this very turn of the loop
            if isinstance(result, InferenceError):
                answered.set_exception(result)
            else:
                answered.set_result(result)

        inference = self._inference(request)
        try:
            cancel = inference.infer(asked.message, None, reply)
        except InferenceError as error:
            inference.failed(asked.message, error)
            raise
        gone = asyncio.create_task(client_gone(request))
        waited: list[asyncio.Future[Any]] = [answered, gone]
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not answered.done():
                cancel()
                answered.cancel()
            gone.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await gone
        if answered.cancelled():
            inference.gone(asked.message)
            raise ClientDisconnect
        failure = answered.exception()
        if failure is not None:
            inference.failed(asked.message, cast("InferenceError", failure))
        return answered.result()

    def _inference(self, request: Request) -> AnyInference:
        observer = self._service.observability.observer
        given: Pass | None = request.scope.get(PASS)
        inference: WatchableInference = self._service.inference
        if given is not None:
            inference = given.inference(inference, peer_of(request.scope), is_charged=True)
        if observer is None:
            return inference
        return ObservedInference(inference, observer, peer_of(request.scope), dict(request.scope["headers"]))

    async def _response(self, request: Request, asked: RestRequest, message: bytes) -> Response:
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


def _named(request: Request) -> tuple[str, str]:
    return request.path_params["model"], request.path_params.get("version", "")


def _only_input(model: Model, version: str, body: bytes) -> RestRequest:
    """A body that is one tensor's bytes: its shape is what the model says, and one size that is open follows from the bytes.

    Of BYTES it is the one element, without its length before it.
    """
    if len(model.inputs) != 1:
        raise InvalidArgumentError(
            f"Inference-Header-Content-Length is 0, but model {model.name!r} has {len(model.inputs)} inputs; send JSON"
        )
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
        )
    if -1 in shape:
        known = -size  # times every known size, of which -1 is one
        for length in shape:
            known *= length
        shape[shape.index(-1)] = len(body) // known if known else 0
    return raw_request(body, model.name, version, spec.name, spec.datatype.wire, shape)
