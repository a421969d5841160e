"""How a service that answers for all members replaces its own methods."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

from google.protobuf.message import Message

from halfserve.serve.protocol.rpcs import one_message
from halfserve.serve.protocol.service import Service, StreamMethod

Local = Callable[[Any], Awaitable[Any]]


def answer_for_all(service: Service, path: str, answer: Callable[[Local, Any], Awaitable[Message]]) -> None:
    """Replace a method by `answer`, which gets the service's own method and the request.

    The method becomes a stream with one message each way, because other members take time; the wire format is the same.
    """
    request, is_large = request_class(service, path), path in service.streams and service.streams[path].is_large
    whole = one_message(partial(answer, local_method(service, path)))
    service.unary.pop(path, None)
    service.streams[path] = StreamMethod(request, whole, is_large=is_large)


def request_class(service: Service, path: str) -> type[Message]:
    """Class of a method's requests."""
    method = service.unary.get(path) or service.streams[path]
    return method.request


def local_method(service: Service, path: str) -> Local:
    """The service's current implementation of a method with one message each way."""
    unary = service.unary.get(path)
    if unary is not None:
        answer = unary.answer

        async def at_once(request: Any) -> Message:
            return answer(request)

        return at_once
    stream = service.streams[path].answer

    async def in_time(request: Any) -> Message:
        return await anext(stream(only(request)))

    return in_time


async def only(request: Any) -> AsyncIterator[Any]:
    """Yield a single request as a stream."""
    yield request
