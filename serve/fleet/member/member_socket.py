"""Calls over Unix sockets in a folder: between the processes of one machine, and between a cluster's member and its agent.

A process is named PLACE-RESTARTS, a name that is never reused. A socket without a listener belongs to a member that has ended.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.protobuf import empty_pb2, wrappers_pb2
from google.protobuf.message import Message
from prometheus_client.metrics_core import Metric

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.engine.errors import FailedPreconditionError, InferenceError, NotFoundError, UnavailableError
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.fleet.member.fleet_commands import READ_COUNTERS
from halfserve.serve.fleet.member.member_counters import MemberCounters
from halfserve.serve.observability.exposition import collect
from halfserve.serve.protocol.rpc import Rpc, RpcCall
from halfserve.serve.protocol.rpcs import model_statistics
from halfserve.serve.protocol.service import Service
from halfserve.serve.protocol.status import RETRY_HINT, error_of
from halfserve.serve.security.memory_budget import MemoryBudget
from halfserve.serve.security.security import PortSecurity
from halfserve.serve.transports.listening import Address, listen
from halfserve.serve.transports.transport import Transport, TransportName, make_transport

SUFFIX = ".sock"
CHANNEL_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
CALLERS_BYTES = 2**32  # memory limit for messages of members, which have passed these members' limits, and of the agent
CLOSE_S = 0.5
QUERY_S = 5.0  # time limit for an answer that takes a member some milliseconds
# Matches gRPC's own status texts for a call that got no answer.
NO_CONNECTION = re.compile("onnect|ocket|ackends|andshake|recvmsg|sendmsg|GOAWAY|Stream removed|DNS|keepalive")
M = TypeVar("M", bound=Message)


class MemberSocket:
    """Socket of one member in a folder, which stays locked while the member lives: systemd-tmpfiles leaves it alone then."""

    def __init__(self, folder: Path, name: str) -> None:
        """Lock the folder; the socket will be named after the member."""
        self._path = folder / f"{name}{SUFFIX}"
        self._held = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(self._held, fcntl.LOCK_SH)
        self._transport: Transport | None = None

    async def listen(self, own: Service) -> None:
        """Serve a service at the socket from now on, and the counters of its server.

        Raises:
            BindError: the folder is not writable.
        """

        async def read(_: Message, _call: RpcCall) -> Message:
            return wrappers_pb2.BytesValue(value=(await read_counters(own.core)).to_bytes())

        own.rpcs[READ_COUNTERS] = Rpc(READ_COUNTERS, empty_pb2.Empty, read)
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


async def read_counters(core: InferenceCore) -> MemberCounters:
    """Read the current counters of a server."""
    metrics: dict[str, Metric] = {}
    async for metric in collect(core):
        known = metrics.setdefault(metric.name, metric)
        if known is not metric:
            known.samples += metric.samples
    statistics = pb.ModelStatisticsResponse(model_stats=[model_statistics(model) for model in core.models()])
    return MemberCounters(statistics=statistics, metrics=list(metrics.values()))


class UnreachableError(UnavailableError):
    """A call got no answer, as nothing listens at the socket or its process has ended meanwhile."""


class MemberChannel:
    """gRPC channel to the socket of a member, or to that of an agent. Lives on the event loop."""

    def __init__(self, folder: Path, name: str) -> None:
        """Connect to the socket of this name at the first call."""
        self._path = folder / f"{name}{SUFFIX}"
        self._channel = grpc.aio.insecure_channel(f"unix:{self._path}", CHANNEL_OPTIONS)

    async def ask(self, path: str, request: Message, answer: type[M], timeout_s: float | None) -> M:
        """Call the method at `path`; for `timeout_s` and the errors raised see `call`."""
        return answer.FromString(await self.call(path, request.SerializeToString(), timeout_s))

    async def call(self, path: str, request: bytes, timeout_s: float | None) -> bytes:
        """Call a method with a serialized message, and return the serialized answer; `timeout_s` None is no time limit.

        Raises:
            UnreachableError: there was no answer.
            InferenceError: the other side refused the request.
        """
        try:
            answer: bytes = await self._channel.unary_unary(path)(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise (answered_error(error) if has_answered(error) else UnreachableError(str(error.details()))) from None
        return answer

    def has_ended(self) -> bool:
        """Return whether nothing listens at the socket any more, which is removed then."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(self._path))
            except (ConnectionRefusedError, FileNotFoundError):
                self._path.unlink(missing_ok=True)
                return True
            except OSError:  # the listener's backlog is full
                return False
        return False

    async def close(self) -> None:
        await self._channel.close()


def has_answered(error: Any) -> bool:
    """Return whether a call's error came from the other side; `error` is a grpc.aio.AioRpcError (grpcio ships no types)."""
    return error.code() is not grpc.StatusCode.UNAVAILABLE or NO_CONNECTION.search(error.details() or "") is None


def answered_error(error: Any) -> InferenceError:
    """Return the error that the other side answered with; for `error` see `has_answered`."""
    hints = [value for key, value in error.trailing_metadata() or () if key == RETRY_HINT]
    code: tuple[int, str] = error.code().value
    return error_of(code[0], str(error.details()), int(hints[0]) / 1000 if hints else None)


class Siblings:
    """The other members. Lives on the event loop."""

    def __init__(self, folder: Path, own: str) -> None:
        """Access the members of a folder; `own` is the name of this one."""
        self._folder = folder
        self._own = own
        self._channels: dict[str, MemberChannel] = {}

    def names(self) -> list[str]:
        """Names of the other members with sockets in the folder."""
        return sorted(path.stem for path in self._folder.glob(f"*{SUFFIX}") if path.stem != self._own)

    async def ask(
        self, path: str, request: Message, answer: type[M], *, timeout_s: float | None = QUERY_S
    ) -> dict[str, M | InferenceError]:
        """Call a method of all other members concurrently; a member that refuses answers with its error.

        Members that have ended are left out. Without `timeout_s` there is no time limit for an answer.
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
            channel = self._channels[name] = MemberChannel(self._folder, name)
        try:
            return await channel.ask(path, request, answer, timeout_s)
        except UnavailableError as error:
            if not channel.has_ended():
                return error
            self._channels.pop(name, None)
            await channel.close()
            return None
        except InferenceError as error:
            return error


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
