"""What an agent asks its server, over the Unix socket at which the server listens for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeVar

import grpc
from google.protobuf import empty_pb2, wrappers_pb2
from google.protobuf.message import Message

from halfserve.protos.agent_pb2 import Answer, MemberState, Question
from halfserve.serve.engine.errors import InferenceError
from halfserve.serve.members.agent_questions import ANSWER, QUESTIONS
from halfserve.serve.members.cluster_member import PUBLISH, SOCKET, STATE
from halfserve.serve.members.siblings import OPTIONS, SUFFIX
from halfserve.serve.members.whole_service import FIGURES
from halfserve.serve.protocol.status import error_of

M = TypeVar("M", bound=Message)
QUERY_S = 2.0  # for what takes the server some milliseconds
FIGURES_S = 10.0  # for what takes it some milliseconds for each model


class ServerLink:
    """Lives on the event loop. Methods raise InferenceError: UnavailableError where the server does not answer."""

    def __init__(self, folder: Path) -> None:
        """A link to the server that shares this folder."""
        self._channel = grpc.aio.insecure_channel(f"unix:{folder / SOCKET}{SUFFIX}", OPTIONS)

    async def state(self) -> MemberState:
        """What it serves, and its sums."""
        return MemberState.FromString(await self.call(STATE, b"", QUERY_S))

    async def figures(self) -> bytes:
        """All its counters, as `Figures.to_bytes`."""
        answer = wrappers_pb2.BytesValue.FromString(await self.call(FIGURES, b"", FIGURES_S))
        return bytes(answer.value)

    async def publish(self, directory: bytes) -> None:
        """Have it answer clients with this serialized Directory."""
        await self.call(PUBLISH, directory, QUERY_S)

    async def change_setting(self, path: str, request: bytes) -> None:
        """Have it change a setting of logs or traces."""
        await self.call(path, request, QUERY_S)

    async def questions(self) -> AsyncIterator[Question]:
        """What it asks of the whole cluster, until it ends."""
        call = self._channel.unary_stream(QUESTIONS, empty_pb2.Empty.SerializeToString, Question.FromString)
        try:
            async for question in call(empty_pb2.Empty()):
                yield question
        except grpc.aio.AioRpcError as error:
            raise _error(error) from None

    async def answer(self, answer: Answer) -> None:
        """Answer a question."""
        await self.call(ANSWER, answer.SerializeToString(), None)

    async def call(self, path: str, request: bytes, timeout_s: float | None) -> bytes:
        """Call a method, from serialized message to message; without a time limit where it is None."""
        try:
            answer: bytes = await self._channel.unary_unary(path)(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _error(error) from None
        return answer

    async def close(self) -> None:
        await self._channel.close()


def _error(error: grpc.aio.AioRpcError) -> InferenceError:
    return error_of(error.code().value[0], str(error.details()))
