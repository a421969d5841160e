"""REST responses: JSON, and errors as {"error": "..."} with the HTTP status of their gRPC status."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from halfserve.serve.engine.errors import LISTING, InferenceError, MessageTooLargeError
from halfserve.serve.http.routing.error_forms import in_form
from halfserve.serve.http.routing.operations import JSON_TYPE
from halfserve.serve.protocol.status import RETRY_HINT, status_of
from halfserve.serve.security.tokens import TOKEN_OPTION
from halfserve.serve.transports.task_turns import task_turns

# Errors of all interfaces say what a client of gRPC does; a client of REST asks the path of the index, and reads no token file.
FOR_REST = {LISTING: "POST /v2/repository/index", TOKEN_OPTION: ""}
# By gRPC status, as google.rpc.Code maps them, except that FAILED_PRECONDITION is a conflict:
# https://github.com/googleapis/googleapis/blob/master/google/rpc/code.proto
HTTP_STATUSES: dict[int, int] = {
    1: 499,  # CANCELLED
    2: 500,  # UNKNOWN
    3: 400,  # INVALID_ARGUMENT
    4: 504,  # DEADLINE_EXCEEDED
    5: 404,  # NOT_FOUND
    6: 409,  # ALREADY_EXISTS
    7: 403,  # PERMISSION_DENIED
    8: 429,  # RESOURCE_EXHAUSTED
    9: 409,  # FAILED_PRECONDITION
    10: 409,  # ABORTED
    11: 400,  # OUT_OF_RANGE
    12: 501,  # UNIMPLEMENTED
    13: 500,  # INTERNAL
    14: 503,  # UNAVAILABLE
    16: 401,  # UNAUTHENTICATED
}
_WIDE = {FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64}


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return json_text_response(dump_json(content), status, headers)


def json_text_response(content: str, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response of JSON text; never cached, as the state may change at any time."""
    return Response(content.encode(), status, {"cache-control": "no-store", **(headers or {})}, JSON_TYPE)


def empty_response() -> Response:
    """200 without a body."""
    return Response(None, 200, {"cache-control": "no-store"})


def json_in_pieces(pieces: Iterator[bytes], client: str) -> Response:
    """Return a response of JSON that is written while the client reads it, each piece when it is the client's turn."""

    async def written() -> AsyncIterator[bytes]:
        turns = task_turns()
        for piece in pieces:
            yield piece
            await turns.turn(client)

    return StreamingResponse(written(), 200, {"cache-control": "no-store"}, JSON_TYPE)


def dump_json(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"), allow_nan=False)


async def dump_list(entries: Iterable[Any]) -> str:
    """Return a list as JSON. It may have thousands of entries, so that the event loop gets a turn after each."""
    texts = []
    for entry in entries:
        texts.append(dump_json(entry))
        await asyncio.sleep(0)
    return f"[{','.join(texts)}]"


def dump_up_to(content: dict[str, Any], name: str) -> str:
    """Return a non-empty object as JSON, up to the value of one more field."""
    return f'{dump_json(content)[:-1]},"{name}":'


def message_dict(message: Message) -> dict[str, Any]:
    """Return a protobuf message as Triton's REST interface has it: original field names, defaults included, all numbers as
    numbers.

    protobuf's own JSON mapping writes 64-bit numbers as strings.
    """
    content = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    _widen(content, message.DESCRIPTOR)
    return content


def _widen(content: dict[str, Any], descriptor: Any) -> None:
    """Convert 64-bit numbers from strings, in place."""
    for field in descriptor.fields:
        convert = _converter(field) if field.name in content else None
        if convert is None:
            continue
        value = content[field.name]
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            content[field.name] = {key: convert(entry) for key, entry in value.items()}
        else:
            content[field.name] = [convert(entry) for entry in value] if isinstance(value, list) else convert(value)


def _converter(field: Any) -> Callable[[Any], Any] | None:
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        return _converter(inner.fields_by_name["value"])
    if field.cpp_type in _WIDE:
        return int
    if inner is None:
        return None

    def convert(content: dict[str, Any]) -> dict[str, Any]:
        _widen(content, inner)
        return content

    return convert


def http_status(error: Exception) -> tuple[int, str, dict[str, str]]:
    """Return the status, the text for the client, and headers. An unexpected error is 500, and its text is not sent."""
    status = status_of(error)
    text = status.details
    for words, ours in FOR_REST.items():
        text = text.replace(words, ours)
    if isinstance(error, MessageTooLargeError):
        return 413, text, {}
    headers = {}
    for name, value in status.trailers:
        if name == RETRY_HINT:
            headers["retry-after"] = str(max(1, math.ceil(int(value) / 1000)))
    return HTTP_STATUSES.get(status.code, 500), text, headers


def error_response(
    status: int, text: str, headers: dict[str, str] | None = None, *, scope: Mapping[str, Any], error: Exception | None = None
) -> Response:
    """Return an error's text, in the form of the request's route."""
    status, content = in_form(scope, status, text, error)
    return json_response(content, status, headers)


async def on_inference_error(request: Request, error: Exception) -> Response:
    status, text, headers = http_status(error)
    if status in {408, 413}:
        headers["connection"] = "close"  # the rest of the body is not read
    return error_response(status, text, headers, scope=request.scope, error=error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Answer an error of the router: an unknown path or a wrong method."""
    if not isinstance(error, HTTPException):
        raise error
    text = error.detail
    if error.status_code == 404:
        text = "nothing is served at this path; /openapi.json lists what is"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        text = f"{request.method} is not served at this path, expected {allowed or 'another method'}"
    return error_response(error.status_code, text, dict(error.headers or {}), scope=request.scope)


async def on_disconnect(_: Request, __: Exception) -> Response:
    """Return a response that is never read: the client has disconnected."""
    return Response(status_code=400)


async def on_lone_surrogate(request: Request, _: Exception) -> Response:
    """JSON can contain half a surrogate pair, which UTF-8 cannot encode."""
    refusal = "a text of the request has half of a surrogate pair, expected whole characters"
    return error_response(400, refusal, scope=request.scope)


async def on_unexpected(request: Request, error: Exception) -> Response:
    """Answer an unexpected error, which the connection logs before it closes."""
    status, text, headers = http_status(error)
    headers["connection"] = "close"
    return error_response(status, text, headers, scope=request.scope)


HANDLERS: dict[Any, Any] = {
    InferenceError: on_inference_error,
    HTTPException: on_http_error,
    ClientDisconnect: on_disconnect,
    UnicodeEncodeError: on_lone_surrogate,
}
