"""Answers RPCs that concern all processes; the process that receives one asks the others.

The receiving process acts first, so that a request that it refuses does not reach the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Container
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from google.protobuf import empty_pb2, wrappers_pb2
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.engine.errors import InferenceError
from halfserve.serve.fleet.member.fleet_commands import (
    COMMANDS,
    INDEX,
    LOAD,
    MODEL,
    READ_COUNTERS,
    READY,
    STATISTICS,
    Command,
    finished,
    merge_index,
)
from halfserve.serve.fleet.member.member_counters import MemberCounters, add_statistics, merge_metrics
from halfserve.serve.fleet.member.member_socket import Siblings, process, raise_first, read_counters
from halfserve.serve.observability.metrics import CONTENT_TYPE, MetricTexts
from halfserve.serve.protocol.rpc import Method, Rpc, RpcCall
from halfserve.serve.protocol.rpcs import Health, model_ready
from halfserve.serve.protocol.service import METRICS, SERVICE, rpc_table

HealthResponse = health_pb2.HealthCheckResponse
RETRY_S = 0.01  # polled, because a thread that blocks on the lock could not be cancelled
BEGUN = "-begun"


@dataclass(frozen=True, kw_only=True)
class JournalEntry:
    """One command: the path of its method, and the serialized request.

    Attributes:
        name: name of its file, which sorts in the order of the commands.
        is_begun: a member began it and ended before all others had carried it out.
    """

    name: str
    path: str
    request: bytes
    is_begun: bool = False


class Journal:
    """Commands that all members have carried out, kept for members that join later: one file per target.

    A command that replaces an earlier one replaces its file. Members take turns by an exclusive lock, which the system releases
    when a member ends.
    """

    def __init__(self, folder: Path) -> None:
        """Use the journal in this folder, which need not exist yet."""
        folder.mkdir(exist_ok=True)
        self._folder = folder

    @asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[None]:
        """Hold the lock of this name inside the context, so that no other member issues commands under it."""
        file = os.open(self._folder / f".{name}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    await asyncio.sleep(RETRY_S)
            yield
        finally:
            os.close(file)

    def begin(self, kind: str, name: str, path: str, request: bytes) -> JournalEntry:
        """Record a command that this member has carried out, but the others have not; `kind` has no dash."""
        # The monotonic clock is shared by all processes of a machine, and never set back.
        entry = JournalEntry(name=f"{time.monotonic_ns():020}-{_key(kind, name)}", path=path, request=request)
        hidden = self._folder / f".{entry.name}"
        hidden.write_bytes(path.encode() + b"\n" + request)
        hidden.rename(self._folder / f"{entry.name}{BEGUN}")
        return entry

    def done(self, entry: JournalEntry) -> None:
        """Mark a command as carried out by all members; it replaces earlier commands for the same target."""
        key = entry.name.partition("-")[2]
        for older in self._files():
            if older.name.partition("-")[2] == key:
                older.unlink(missing_ok=True)
        (self._folder / f"{entry.name}{BEGUN}").rename(self._folder / entry.name)

    def forget(self, kind: str, name: str) -> None:
        """Remove the commands for a target."""
        for file in self._files():
            if file.name.partition("-")[2].startswith(_key(kind, name)):
                file.unlink(missing_ok=True)

    def entries(self, known: Container[str] = ()) -> list[JournalEntry]:
        """Return the commands in order, those for models first, as others may be about them, except those whose names are
        known.
        """
        found = []
        for file in self._files():
            name = file.name.removesuffix(BEGUN)
            if name in known:
                continue
            with contextlib.suppress(FileNotFoundError):  # another member, in its turn, has just replaced or finished it
                path, _, request = file.read_bytes().partition(b"\n")
                found.append(JournalEntry(name=name, path=path.decode(), request=request, is_begun=file.name != name))
        return found

    def _files(self) -> list[Path]:
        files = (file for file in self._folder.iterdir() if file.name[0].isdigit())
        return sorted(files, key=lambda file: (f"-{MODEL}-" not in file.name, file.name))


class ProcessService:
    """Layer around the RPCs that answers for all members. Lives on the event loop.

    Attributes:
        journal: commands for processes that join later.
    """

    def __init__(self, siblings: Siblings, journal: Journal) -> None:
        self._siblings = siblings
        self.journal = journal
        self._tasks: set[asyncio.Task[Any]] = set()
        self._answers: dict[str, Callable[[Method, Any, RpcCall], Awaitable[Any]]] = {
            STATISTICS: self._statistics,
            INDEX: self._index,
            READY: self._model_ready,
            Health.CHECK_PATH: self._check_health,
            METRICS.path: self._metrics,
        }

    def layer(self, rpc: Rpc, method: Method) -> Method:
        """Return the method that answers for all members, where all are concerned."""
        command = COMMANDS.get(rpc.path)
        if command is not None:
            work = self._unregister if command.undoes else self._carry_out

            async def to_its_end(request: Any, call: RpcCall) -> Message:
                return await finished(work(rpc.path, command, method, request, call), self._tasks)

            return to_its_end
        answer = self._answers.get(rpc.path)
        return method if answer is None else partial(answer, method)

    async def _carry_out(self, path: str, command: Command, local: Method, request: Any, call: RpcCall) -> Message:
        targets = list(command.targets(request))
        if not targets:
            asked: Message = await local(request, call)
            return asked
        async with self.journal.turn(command.turn):
            answer: Message = await local(request, call)
            if path == LOAD:
                _name_override(request, call.server.core.override(request.model_name))
            begun = []
            for kind, name, one in targets:  # on a thread, as a load request may contain a model's files
                begun.append(await asyncio.to_thread(self.journal.begin, kind, name, path, one.SerializeToString()))
            answers = await self._siblings.ask(path, request, command.answer, timeout_s=command.timeout_s)
            for entry in begun:
                self.journal.done(entry)
        raise_first(answers)
        return answer

    async def _unregister(self, path: str, command: Command, local: Method, request: Any, call: RpcCall) -> Message:
        """Take back registrations; a member keeps a region until its requests that use it have ended."""
        registers, register = COMMANDS[command.undoes], rpc_table()[command.undoes]
        async with self.journal.turn(command.turn):
            for entry in self.journal.entries():
                if entry.path != command.undoes:
                    continue
                region = register.request.FromString(entry.request)
                ((kind, name, _whole),) = registers.targets(region)
                if request.name not in {"", name}:
                    continue
                one = type(request)(name=name)
                await local(one, call)
                raise_first(await self._siblings.ask(path, one, command.answer, timeout_s=command.timeout_s))
                self.journal.forget(kind, name)
        return command.answer()

    async def _statistics(self, local: Method, request: pb.ModelStatisticsRequest, call: RpcCall) -> pb.ModelStatisticsResponse:
        answer: pb.ModelStatisticsResponse = await local(request, call)
        others = await self._siblings.query(STATISTICS, request, pb.ModelStatisticsResponse)
        add_statistics(answer, others.values(), everything=_has_own_models(call))
        return answer

    async def _index(self, local: Method, request: pb.RepositoryIndexRequest, call: RpcCall) -> pb.RepositoryIndexResponse:
        whole = pb.RepositoryIndexRequest(repository_name=request.repository_name)
        answer: pb.RepositoryIndexResponse = await local(whole, call)
        others = await self._siblings.query(INDEX, whole, pb.RepositoryIndexResponse)
        return merge_index(answer, {process(name): one for name, one in others.items()}, ready=request.ready)

    async def _model_ready(self, local: Method, request: pb.ModelReadyRequest, call: RpcCall) -> pb.ModelReadyResponse:
        answer: pb.ModelReadyResponse = await local(request, call)
        if answer.ready:
            others = await self._siblings.ask(READY, request, pb.ModelReadyResponse)
            answer.ready = all(not isinstance(one, InferenceError) and one.ready for one in others.values())
        return answer

    async def _check_health(self, local: Method, request: health_pb2.HealthCheckRequest, call: RpcCall) -> Message:
        answer: Message = await local(request, call)
        if request.service in {"", SERVICE} or answer.status != HealthResponse.SERVING:  # type: ignore[attr-defined]  # grpc_health ships no types
            return answer  # the server as a whole is as ready as this member
        everywhere = await self._model_ready(model_ready, pb.ModelReadyRequest(name=request.service), call)
        return HealthResponse(status=HealthResponse.SERVING if everywhere.ready else HealthResponse.NOT_SERVING)  # type: ignore[no-any-return]  # as above

    async def _metrics(self, _local: Method, _: Message, call: RpcCall) -> tuple[bytes, str]:
        own = await read_counters(call.server.core)
        others = await self._siblings.query(READ_COUNTERS, empty_pb2.Empty(), wrappers_pb2.BytesValue)
        texts = MetricTexts()
        metrics = (MemberCounters.from_bytes(one.value).metrics for one in others.values())
        texts.add(merge_metrics(own.metrics, metrics, everything=_has_own_models(call)))
        return texts.joined(), CONTENT_TYPE


def _has_own_models(call: RpcCall) -> bool:
    """Return whether each process has models of its own, all of which the caller may see."""
    return call.server.is_whole and call.server.core.loads_on_demand


def _name_override(request: pb.RepositoryModelLoadRequest, config: str | None) -> None:
    """Add the configuration that a load without one has kept, as members that join later did not see the load before."""
    if config is not None:
        request.parameters["config"].string_param = config


def _key(kind: str, name: str) -> str:
    return f"{kind}-{hashlib.sha256(name.encode()).hexdigest()[:32]}"
