"""Management calls of an agent to its server, over the Unix socket that they share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeVar

import grpc
from google.protobuf import empty_pb2, wrappers_pb2
from google.protobuf.message import Message

from halfserve.protos.agent_pb2 import Answer, MemberState, Question
from halfserve.serve.fleet.member.agent_questions import ANSWER, QUESTIONS
from halfserve.serve.fleet.member.cluster_member import PUBLISH, SOCKET, STATE
from halfserve.serve.fleet.member.member_socket import CHANNEL_OPTIONS, READ_COUNTERS, SUFFIX, answered_error

M = TypeVar("M", bound=Message)
QUERY_S = 2.0  # time limit of calls that take the server milliseconds
COUNTERS_S = 10.0  # time limit of calls that take the server some milliseconds per model


class ServerLink:
    """Connection to the server. Lives on the event loop. Methods raise InferenceError: UnavailableError without an answer."""

    def __init__(self, folder: Path) -> None:
        """Connect to the server that shares this folder."""
        self._channel = grpc.aio.insecure_channel(f"unix:{folder / SOCKET}{SUFFIX}", CHANNEL_OPTIONS)

    async def state(self) -> MemberState:
        """Read the models that the server serves, and its counters."""
        return MemberState.FromString(await self.call(STATE, b"", QUERY_S))

    async def counters(self) -> bytes:
        """Read all its counters, serialized by `MemberCounters.to_bytes`."""
        answer = wrappers_pb2.BytesValue.FromString(await self.call(READ_COUNTERS, b"", COUNTERS_S))
        return bytes(answer.value)

    async def publish(self, directory: bytes) -> None:
        """Give the server the serialized Directory to answer clients with."""
        await self.call(PUBLISH, directory, QUERY_S)

    async def change_setting(self, path: str, request: bytes) -> None:
        """Change a setting of logs or traces: call the method at `path` with a serialized request."""
        await self.call(path, request, QUERY_S)

    async def questions(self) -> AsyncIterator[Question]:
        """Receive the server's questions about the whole cluster, until the server ends."""
        call = self._channel.unary_stream(QUESTIONS, empty_pb2.Empty.SerializeToString, Question.FromString)
        try:
            async for question in call(empty_pb2.Empty()):
                yield question
        except grpc.aio.AioRpcError as error:
            raise answered_error(error) from None

    async def answer(self, answer: Answer) -> None:
        """Send the answer to one of the server's questions."""
        await self.call(ANSWER, answer.SerializeToString(), None)

    async def call(self, path: str, request: bytes, timeout_s: float | None) -> bytes:
        """Call a method with a serialized message, and return the serialized answer; None for no time limit."""
        try:
            answer: bytes = await self._channel.unary_unary(path)(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise answered_error(error) from None
        return answer

    async def close(self) -> None:
        await self._channel.close()
