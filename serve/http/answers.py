"""What goes out: JSON, and errors as {"error": "..."}."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from serve.engine.errors import InferenceError
from serve.http.statuses import http_status

JSON_TYPE = "application/json"


def json_answer(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer that a program reads; not to be kept, as the next one may differ."""
    return written_answer(written(content), status, headers)


def written_answer(content: str, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """The same of what is JSON already."""
    return Response(content.encode(), status, {"cache-control": "no-store", **(headers or {})}, JSON_TYPE)


def written(content: Any) -> str:
    """A value as JSON."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False)


async def written_one_by_one(entries: Iterable[Any]) -> str:
    """A list as JSON. It may have thousands of entries that each take their time: others get the event loop in between."""
    texts = []
    for entry in entries:
        texts.append(written(entry))
        await asyncio.sleep(0)
    return f"[{','.join(texts)}]"


def with_written(content: dict[str, Any], name: str, text: str) -> str:
    """An object, which has fields, as JSON, with one more field that is JSON already."""
    return f'{written(content)[:-1]},"{name}":{text}}}'


def error_answer(status: int, text: str, headers: dict[str, str] | None = None) -> Response:
    """An answer that says what is wrong."""
    return json_answer({"error": text}, status, headers)


async def on_inference_error(_: Request, error: Exception) -> Response:
    """Answer an error of the engine's."""
    status, text, headers = http_status(error)
    if status in {408, 413}:
        headers["connection"] = "close"  # the rest of the body is not wanted
    return error_answer(status, text, headers)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Answer what the router refuses."""
    if not isinstance(error, HTTPException):
        raise error
    text = error.detail
    if error.status_code == 404:
        text = "nothing is served at this path; /openapi.json lists what is"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        text = f"{request.method} is not served at this path, expected {allowed or 'another method'}"
    return error_answer(error.status_code, text, dict(error.headers or {}))


async def on_disconnect(_: Request, __: Exception) -> Response:
    """The client has gone: nobody reads this."""
    return Response(status_code=400)


async def on_half_character(_: Request, __: Exception) -> Response:
    """Answer a text that JSON can write and UTF-8 cannot."""
    return error_answer(400, "a text of the request has half of a surrogate pair, expected whole characters")


async def on_unexpected(_: Request, error: Exception) -> Response:
    """Answer what nobody raised on purpose; its text goes to the log alone, where uvicorn writes it. Then uvicorn closes."""
    status, text, headers = http_status(error)
    headers["connection"] = "close"
    return error_answer(status, text, headers)


HANDLERS: dict[Any, Any] = {
    InferenceError: on_inference_error,
    HTTPException: on_http_error,
    ClientDisconnect: on_disconnect,
    UnicodeEncodeError: on_half_character,
}
