"""Calls to the other members, over the Unix sockets in their shared folder.

A socket is named after its member, PLACE-RESTARTS, a name that is never reused. A socket without a listener belongs to a
member that has ended for good.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from halfserve.serve.engine.errors import FailedPreconditionError, InferenceError, NotFoundError, UnavailableError
from halfserve.serve.fleet.member.member_socket import CHANNEL_OPTIONS, SUFFIX, answered_error

QUERY_S = 5.0  # time limit for an answer that takes a member some milliseconds
M = TypeVar("M", bound=Message)


class Siblings:
    """The other members. Lives on the event loop."""

    def __init__(self, folder: Path, own: str) -> None:
        """Access the members of a folder; `own` is the name of this one."""
        self._folder = folder
        self._own = own
        self._channels: dict[str, Any] = {}  # grpc.aio.Channel; grpcio ships no types

    def names(self) -> list[str]:
        """Names of the other members with sockets in the folder."""
        return sorted(path.stem for path in self._folder.glob(f"*{SUFFIX}") if path.stem != self._own)

    async def ask(
        self, path: str, request: Message, answer: type[M], *, timeout_s: float | None = QUERY_S
    ) -> dict[str, M | InferenceError]:
        """Call a method of all other members concurrently; a member that refuses answers with its error.

        Members that have ended are left out.

        Args:
            path: path of the method.
            request: request to send.
            answer: class of the answers.
            timeout_s: time limit of each answer in seconds; None for no limit.
        """
        names = self.names()
        answers = await asyncio.gather(*(self._ask(name, path, request, answer, timeout_s) for name in names))
        return {name: one for name, one in zip(names, answers, strict=True) if one is not None}

    async def query(self, path: str, request: Message, answer: type[M]) -> dict[str, M]:
        """Call a method that all other members must answer; a member that does not know the requested target is left out.

        Raises:
            UnavailableError: a member refused, or did not answer.
        """
        answers = await self.ask(path, request, answer)
        for name, one in answers.items():
            if isinstance(one, InferenceError) and not isinstance(one, NotFoundError):
                raise UnavailableError(f"{process(name)} of this server does not answer now ({one}); ask again in a moment")
        return {name: one for name, one in answers.items() if not isinstance(one, InferenceError)}

    async def close(self) -> None:
        """Close the connections."""
        channels, self._channels = self._channels, {}
        await asyncio.gather(*(channel.close() for channel in channels.values()))

    async def _ask(
        self, name: str, path: str, request: Message, answer: type[M], timeout_s: float | None
    ) -> M | InferenceError | None:
        channel = self._channels.get(name)
        if channel is None:
            channel = self._channels[name] = grpc.aio.insecure_channel(f"unix:{self._path(name)}", CHANNEL_OPTIONS)
        call = channel.unary_unary(path, type(request).SerializeToString, answer.FromString)
        try:
            received: M = await call(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE and self._has_ended(name):
                self._channels.pop(name, None)
                await channel.close()
                return None
            return answered_error(error)
        return received

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{SUFFIX}"

    def _has_ended(self, name: str) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(self._path(name)))
            except (ConnectionRefusedError, FileNotFoundError):
                self._path(name).unlink(missing_ok=True)
                return True
            except OSError:  # the listener's backlog is full
                return False
        return False


def process(name: str) -> str:
    """Name of a member for clients and the log."""
    return f"process {name.partition('-')[0]}"


def raise_first(answers: Mapping[str, Message | InferenceError]) -> None:
    """Raise an error if a member refused what the others have carried out.

    Raises:
        FailedPreconditionError: a member refused.
    """
    for name, answer in answers.items():
        if isinstance(answer, InferenceError):
            raise FailedPreconditionError(f"{process(name)} of this server refused what others have done: {answer}")
