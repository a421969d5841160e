"""RPCs that concern all members; the member that receives one answers for all.

They become streams with one message each way, because other members' answers take time; the wire format is the same. The
receiving member acts first, so that a request that it refuses does not reach the others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from google.protobuf import empty_pb2, wrappers_pb2
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.engine.errors import InferenceError, RegionInUseError
from halfserve.serve.fleet.member.command_journal import Journal
from halfserve.serve.fleet.member.member_counters import CounterFolder, MemberCounters
from halfserve.serve.fleet.member.merging import add_statistics, merge_index, merge_metrics
from halfserve.serve.fleet.member.siblings import Refusal, Siblings, process, raise_first
from halfserve.serve.observability.metrics import CONTENT_TYPE, MetricTexts
from halfserve.serve.protocol.rpcs import Health, one_message
from halfserve.serve.protocol.service import SERVICE, Service, StreamMethod

Local = Callable[[Any], Awaitable[Any]]
Work = Callable[[Local, Any], Coroutine[Any, Any, Message]]
HealthResponse = health_pb2.HealthCheckResponse
Thing = tuple[str, str, Message]  # kind and name of a thing, and the command for it alone


@dataclass(frozen=True, kw_only=True)
class Command:
    """A method that changes something at all members.

    Attributes:
        answer: class of its answers.
        things: splits a request into the things that it changes, to be kept for members that join later; empty for a mere
            query.
        undoes: path of the command whose things (that of the request's `name`, or all) this one takes back; "" for none.
        timeout_s: time limit of another member's answer in seconds; None for no limit.
    """

    answer: type[Message]
    things: Callable[[Any], Iterable[Thing]] = lambda _: ()
    undoes: str = ""
    timeout_s: float | None = 5.0


def _model(request: pb.RepositoryModelLoadRequest | pb.RepositoryModelUnloadRequest) -> list[Thing]:
    return [("model", request.model_name, request)]


def _trace_settings(request: pb.TraceSettingRequest) -> list[Thing]:
    found: list[Thing] = []
    for name, setting in request.settings.items():
        one = pb.TraceSettingRequest(model_name=request.model_name)
        one.settings[name].CopyFrom(setting)
        found.append(("trace", f"{name} {request.model_name}", one))
    return found


def _log_settings(request: pb.LogSettingsRequest) -> list[Thing]:
    found: list[Thing] = []
    for name, setting in request.settings.items():
        one = pb.LogSettingsRequest()
        one.settings[name].CopyFrom(setting)
        found.append(("log", name, one))
    return found


TRACE_SETTING, LOG_SETTINGS = f"/{SERVICE}/TraceSetting", f"/{SERVICE}/LogSettings"
SYSTEM_REGISTER, CUDA_REGISTER = f"/{SERVICE}/SystemSharedMemoryRegister", f"/{SERVICE}/CudaSharedMemoryRegister"
# Loads take long, so they have a journal and a lock of their own.
MODEL_COMMANDS = {
    f"/{SERVICE}/RepositoryModelLoad": Command(answer=pb.RepositoryModelLoadResponse, things=_model, timeout_s=None),
    f"/{SERVICE}/RepositoryModelUnload": Command(answer=pb.RepositoryModelUnloadResponse, things=_model, timeout_s=None),
}
OTHER_COMMANDS = {
    TRACE_SETTING: Command(answer=pb.TraceSettingResponse, things=_trace_settings),
    LOG_SETTINGS: Command(answer=pb.LogSettingsResponse, things=_log_settings),
    SYSTEM_REGISTER: Command(
        answer=pb.SystemSharedMemoryRegisterResponse, things=lambda request: [("system", request.name, request)]
    ),
    f"/{SERVICE}/SystemSharedMemoryUnregister": Command(answer=pb.SystemSharedMemoryUnregisterResponse, undoes=SYSTEM_REGISTER),
    CUDA_REGISTER: Command(
        answer=pb.CudaSharedMemoryRegisterResponse, things=lambda request: [("cuda", request.name, request)]
    ),
    f"/{SERVICE}/CudaSharedMemoryUnregister": Command(answer=pb.CudaSharedMemoryUnregisterResponse, undoes=CUDA_REGISTER),
}
READ_COUNTERS = "/halfserve.Member/Figures"
COMMANDS = MODEL_COMMANDS | OTHER_COMMANDS
STATISTICS, INDEX, READY = (f"/{SERVICE}/{name}" for name in ("ModelStatistics", "RepositoryIndex", "ModelReady"))


class ProcessService:
    """Makes services answer for all members. Lives on the event loop.

    Attributes:
        models: journal of loads and unloads.
        others: journal of all other commands.
    """

    def __init__(self, siblings: Siblings, left: CounterFolder, models: Journal, others: Journal) -> None:
        self._siblings = siblings
        self._left = left
        self.models = models
        self.others = others
        self._tasks: set[asyncio.Task[Message]] = set()

    def spread(self, service: Service) -> None:
        """Have a service answer for all members."""
        registers = {
            path: (request_class(service, path), local_method(service, path)) for path in (SYSTEM_REGISTER, CUDA_REGISTER)
        }
        for path, command in COMMANDS.items():
            journal = self.models if path in MODEL_COMMANDS else self.others
            work = partial(self._unregister, *registers[command.undoes]) if command.undoes else self._carry_out
            self._replace(service, path, partial(self._command, partial(work, journal, path, command), command))
        self._replace(service, STATISTICS, self._statistics)
        self._replace(service, INDEX, self._index)
        self._replace(service, READY, self._model_ready)
        self._replace(service, Health.CHECK_PATH, self._check_health)
        service.exposition = partial(self._exposition, service)

    def _replace(self, service: Service, path: str, answer: Callable[[Local, Any], Awaitable[Message]]) -> None:
        """Replace a method by `answer`, which gets this service's own method and the request."""
        request, is_large = request_class(service, path), path in service.streams and service.streams[path].is_large
        whole = one_message(partial(answer, local_method(service, path)))
        service.unary.pop(path, None)
        service.streams[path] = StreamMethod(request, whole, is_large=is_large)

    async def _command(self, work: Work, command: Command, local: Local, request: Any) -> Message:
        if not list(command.things(request)) and not command.undoes:
            answer: Message = await local(request)
            return answer
        # A command that was begun is completed even if the client disconnects.
        task = asyncio.get_running_loop().create_task(work(local, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _carry_out(self, journal: Journal, path: str, command: Command, local: Local, request: Any) -> Message:
        things = command.things(request)
        async with journal.turn():
            answer: Message = await local(request)
            # On a thread, as a load request may contain a model's files.
            begun = [
                await asyncio.to_thread(journal.begin, kind, name, path, one.SerializeToString()) for kind, name, one in things
            ]
            answers = await self._siblings.ask(path, request, command.answer, timeout_s=command.timeout_s)
            for entry in begun:
                journal.done(entry)
        raise_first(answers)
        return answer

    async def _unregister(
        self,
        registration: type[Message],
        register: Local,
        journal: Journal,
        path: str,
        command: Command,
        local: Local,
        request: Any,
    ) -> Message:
        """Take back what `register` has done, each region at all members or at none: a member refuses one that it uses."""
        registers, refusals = COMMANDS[command.undoes], list[str]()
        async with journal.turn():
            for entry in journal.entries():
                if entry.path != command.undoes:
                    continue
                region = registration.FromString(entry.request)
                ((kind, name, _),) = registers.things(region)
                if request.name not in {"", name}:
                    continue
                one = type(request)(name=name)
                try:
                    await local(one)
                except RegionInUseError as error:
                    refusals.append(str(error))
                    continue
                answers = await self._siblings.ask(path, one, command.answer, timeout_s=command.timeout_s)
                refused = [answer.text for answer in answers.values() if isinstance(answer, Refusal)]
                if not refused:
                    journal.forget(kind, name)
                    continue
                refusals += refused
                # Those that still have it refuse that.
                await self._siblings.ask(command.undoes, region, registers.answer, timeout_s=registers.timeout_s)
                with contextlib.suppress(InferenceError):  # its memory is gone
                    await register(region)
        if refusals:
            raise RegionInUseError("; ".join(refusals))
        return command.answer()

    async def _statistics(self, local: Local, request: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
        while True:
            mark = self._left.mark()
            answer: pb.ModelStatisticsResponse = await local(request)
            others = await self._siblings.query(STATISTICS, request, pb.ModelStatisticsResponse)
            ended = self._left.of_ended(others)
            if self._left.mark() == mark:  # otherwise an answering member may have ended and be counted twice
                break
        add_statistics(answer, [*others.values(), *(one.statistics for one in ended)])
        return answer

    async def _index(self, local: Local, request: pb.RepositoryIndexRequest) -> pb.RepositoryIndexResponse:
        whole = pb.RepositoryIndexRequest(repository_name=request.repository_name)
        answer: pb.RepositoryIndexResponse = await local(whole)
        others = await self._siblings.query(INDEX, whole, pb.RepositoryIndexResponse)
        return merge_index(answer, {process(name): one for name, one in others.items()}, ready=request.ready)

    async def _model_ready(self, local: Local, request: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        answer: pb.ModelReadyResponse = await local(request)
        if answer.ready:
            others = await self._siblings.ask(READY, request, pb.ModelReadyResponse)
            answer.ready = all(not isinstance(one, Refusal) and one.ready for one in others.values())
        return answer

    async def _check_health(self, local: Local, request: health_pb2.HealthCheckRequest) -> Message:
        answer: Message = await local(request)
        if request.service in {"", SERVICE} or answer.status != HealthResponse.SERVING:  # type: ignore[attr-defined]  # grpc_health ships no types
            return answer  # the server as a whole is as ready as this member
        others = await self._siblings.ask(Health.CHECK_PATH, request, HealthResponse)
        if any(isinstance(one, Refusal) or one.status != HealthResponse.SERVING for one in others.values()):
            return HealthResponse(status=HealthResponse.NOT_SERVING)  # type: ignore[no-any-return]  # as above
        return answer

    async def _exposition(self, service: Service) -> tuple[bytes, str]:
        while True:
            mark = self._left.mark()
            own = await MemberCounters.of(service.core)
            others = await self._siblings.query(READ_COUNTERS, empty_pb2.Empty(), wrappers_pb2.BytesValue)
            ended = self._left.of_ended(others)
            if self._left.mark() == mark:
                break
        living = [MemberCounters.from_bytes(one.value) for one in others.values()]
        texts = MetricTexts()
        texts.add(merge_metrics(own.metrics, (one.metrics for one in (*living, *ended))))
        return texts.joined(), CONTENT_TYPE


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


def add_counters(service: Service) -> None:
    """Let other members read this member's counters through its own service."""

    async def answer(_: Message) -> Message:
        return wrappers_pb2.BytesValue(value=(await MemberCounters.of(service.core)).to_bytes())

    service.streams[READ_COUNTERS] = StreamMethod(empty_pb2.Empty, one_message(answer))
