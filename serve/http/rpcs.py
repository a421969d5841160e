"""Call the service's RPCs by name: whatever gRPC serves, REST serves in the same way."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from google.protobuf.message import Message

from serve.engine.errors import BackendError, UnsupportedError
from serve.protocol.service import SERVICE, Service


class Rpcs:
    """The RPCs of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def call(self, name: str, request: Message) -> Any:
        """The response message of an RPC.

        Raises:
            InferenceError: as the RPC raises it.
            UnsupportedError: this server has no such RPC.
            BackendError: the RPC gave no answer.
        """
        path = f"/{SERVICE}/{name}"
        unary, stream = self._service.unary.get(path), self._service.streams.get(path)
        if unary is not None:
            return unary.answer(request)
        if stream is None:
            raise UnsupportedError(f"{name} is not served here; GET /v2 lists the extensions that are")
        # What takes its time to answer is a stream of one message each way.
        async for response in stream.answer(_only(request)):
            return response
        raise BackendError(f"{name} ended without an answer; the server's log says why")


async def _only(request: Message) -> AsyncIterator[Any]:
    yield request
