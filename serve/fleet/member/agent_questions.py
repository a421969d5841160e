"""Questions of a server to its agent, about the whole cluster, which only the controller can answer.

The agent opens the connection: it receives the questions as a stream, and sends each answer by a call.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any, TypeVar

from google.protobuf import empty_pb2
from google.protobuf.message import Message

from halfserve.protos.agent_pb2 import Answer, Question
from halfserve.serve.engine.errors import UnavailableError
from halfserve.serve.protocol.rpcs import one_message
from halfserve.serve.protocol.service import Service, StreamMethod
from halfserve.serve.protocol.status import error_of

QUESTIONS, ANSWER = "/halfserve.Member/Questions", "/halfserve.Member/Answer"
METRICS = "/metrics"  # the path that stands for a question about metrics
M = TypeVar("M", bound=Message)


class AgentQuestions:
    """Sends questions to the agent and waits for the answers. Lives on the event loop."""

    def __init__(self) -> None:
        self._asked: asyncio.Queue[Question | None] | None = None  # None while no agent receives them
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._numbers = itertools.count(1)

    def add_to(self, service: Service) -> None:
        """Let the agent receive the questions from this service."""
        service.streams[QUESTIONS] = StreamMethod(empty_pb2.Empty, self._take)
        service.streams[ANSWER] = StreamMethod(Answer, one_message(self._answered), is_large=True)

    async def ask(self, path: str, request: Message, answer: type[M]) -> M:
        """Call a method for the whole cluster.

        Args:
            path: path of the method.
            request: request to send.
            answer: class of the answer.

        Raises:
            InferenceError: the cluster refused the request.
            UnavailableError: the agent or the controller cannot be reached now.
        """
        return answer.FromString((await self._ask(path, request.SerializeToString())).answer)

    async def metrics(self) -> tuple[bytes, str]:
        """Metrics of the whole cluster, and their content type.

        Raises:
            UnavailableError: the agent or the controller cannot be reached now.
        """
        answer = await self._ask(METRICS, b"")
        return answer.answer, answer.text

    def close(self) -> None:
        """End the stream of questions."""
        if self._asked is not None:
            self._asked.put_nowait(None)

    async def _ask(self, path: str, request: bytes) -> Answer:
        if self._asked is None:
            raise _gone()
        number = next(self._numbers)
        answered = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._asked.put_nowait(Question(number=number, path=path, request=request))
        try:
            answer: Answer = await answered
        finally:
            del self._waiting[number]
        if answer.code:
            raise error_of(answer.code, answer.text)
        return answer

    async def _take(self, requests: AsyncIterator[Any]) -> AsyncIterator[Message]:
        async for _ in requests:
            break
        asked = self._asked = asyncio.Queue[Question | None]()
        try:
            while (question := await asked.get()) is not None:
                yield question
        finally:
            if self._asked is asked:
                self._asked = None
                for answered in self._waiting.values():
                    if not answered.done():
                        answered.set_exception(_gone())

    async def _answered(self, answer: Answer) -> Message:
        answered = self._waiting.get(answer.number)  # None if the caller has gone
        if answered is not None and not answered.done():
            answered.set_result(answer)
        return empty_pb2.Empty()


def _gone() -> UnavailableError:
    return UnavailableError(
        "the agent of this server, which speaks for the whole cluster, cannot be reached now; inference goes on, ask again in "
        "a moment"
    )
