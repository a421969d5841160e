"""Call the service's RPCs by name: whatever gRPC serves, REST serves in the same way."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from google.protobuf.message import Message

from serve.protocol.service import SERVICE, Service


class Rpcs:
    """The RPCs of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def call(self, name: str, request: Message) -> Any:
        """The response message of an RPC.

        Raises:
            InferenceError: as the RPC raises it.
        """
        path = f"/{SERVICE}/{name}"
        unary = self._service.unary.get(path)
        if unary is not None:
            return unary.answer(request)
        # What takes its time to answer is a stream of one message each way.
        return await anext(self._service.streams[path].answer(_only(request)))


async def _only(request: Message) -> AsyncIterator[Any]:
    yield request
