"""Calls between members: the Unix socket at which other processes, or the agent of a cluster's member, call a member."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from google.protobuf import empty_pb2, wrappers_pb2
from google.protobuf.message import Message

from halfserve.serve.engine.errors import InferenceError
from halfserve.serve.fleet.member.member_counters import MemberCounters
from halfserve.serve.protocol.rpcs import one_message
from halfserve.serve.protocol.service import Service, StreamMethod
from halfserve.serve.protocol.status import RETRY_HINT, error_of
from halfserve.serve.security.memory_budget import MemoryBudget
from halfserve.serve.security.security import PortSecurity
from halfserve.serve.transports.listening import Address, listen
from halfserve.serve.transports.transport import Transport, TransportName, make_transport

SUFFIX = ".sock"
READ_COUNTERS = "/halfserve.Member/Figures"
CHANNEL_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
CALLERS_BYTES = 2**32  # memory limit for messages of members, which have passed these members' limits, and of the agent
CLOSE_S = 0.5


class MemberSocket:
    """Socket of one member in a folder, which stays locked while the member lives.

    The lock shows agents that this server is alive, and systemd-tmpfiles that the folder is in use.
    """

    def __init__(self, folder: Path, name: str) -> None:
        """Lock the folder; the socket will be named after the member."""
        self._path = folder / f"{name}{SUFFIX}"
        self._held = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(self._held, fcntl.LOCK_SH)
        self._transport: Transport | None = None

    async def listen(self, own: Service, counters: Callable[[], Awaitable[MemberCounters]]) -> None:
        """Serve a service at the socket from now on, and the counters that `counters` reads.

        Raises:
            BindError: the folder is not writable.
        """

        async def read(_: Message) -> Message:
            return wrappers_pb2.BytesValue(value=(await counters()).to_bytes())

        own.streams[READ_COUNTERS] = StreamMethod(empty_pb2.Empty, one_message(read))
        # Bound under another name first: until it listens, it would look abandoned.
        hidden = self._path.with_suffix(".new")
        opened = listen(Address("", 0, "TMPDIR", hidden))
        hidden.rename(self._path)
        guard, budget = PortSecurity(socket=self._path.parent), MemoryBudget(CALLERS_BYTES)
        self._transport = make_transport(TransportName.NGHTTP2, own, "", 0, guard, opened, budget=budget)
        await self._transport.start()

    async def close(self) -> None:
        """Remove the socket, end its connections, and unlock the folder."""
        self._path.unlink(missing_ok=True)
        if self._transport is not None:
            await self._transport.stop(CLOSE_S)
        os.close(self._held)


def answered_error(error: Any) -> InferenceError:
    """The error that another member answered with; `error` is a grpc.aio.AioRpcError (grpcio ships no types)."""
    hints = [value for key, value in error.trailing_metadata() or () if key == RETRY_HINT]
    code: tuple[int, str] = error.code().value
    return error_of(code[0], str(error.details()), int(hints[0]) / 1000 if hints else None)
