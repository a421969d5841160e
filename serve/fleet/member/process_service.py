"""Answers RPCs that concern all processes; the process that receives one asks the others.

The receiving process acts first, so that a request that it refuses does not reach the others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from google.protobuf import empty_pb2, wrappers_pb2
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.engine.errors import InferenceError, RegionInUseError
from halfserve.serve.fleet.member.command_journal import Journal
from halfserve.serve.fleet.member.kept_counters import CounterFolder
from halfserve.serve.fleet.member.member_counters import MemberCounters, add_statistics, merge_metrics
from halfserve.serve.fleet.member.member_socket import READ_COUNTERS, Siblings, process, raise_first
from halfserve.serve.fleet.member.shared_rpcs import (
    COMMANDS,
    CUDA_REGISTER,
    INDEX,
    MODEL_COMMANDS,
    READY,
    STATISTICS,
    SYSTEM_REGISTER,
    Command,
    Local,
    answer_for_all,
    local_method,
    merge_index,
    request_class,
)
from halfserve.serve.observability.metrics import CONTENT_TYPE, MetricTexts
from halfserve.serve.protocol.rpcs import Health
from halfserve.serve.protocol.service import SERVICE, Service

HealthResponse = health_pb2.HealthCheckResponse


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
            answer_for_all(service, path, partial(self._finished, partial(work, journal, path, command)))
        answer_for_all(service, STATISTICS, self._statistics)
        answer_for_all(service, INDEX, self._index)
        answer_for_all(service, READY, self._model_ready)
        answer_for_all(service, Health.CHECK_PATH, self._check_health)
        service.exposition = partial(self._exposition, service)

    async def _finished(
        self, work: Callable[[Local, Any], Coroutine[Any, Any, Message]], local: Local, request: Any
    ) -> Message:
        """Complete a command that was begun even if the client disconnects."""
        task = asyncio.get_running_loop().create_task(work(local, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _carry_out(self, journal: Journal, path: str, command: Command, local: Local, request: Any) -> Message:
        targets = list(command.targets(request))
        if not targets:
            asked: Message = await local(request)
            return asked
        async with journal.turn():
            answer: Message = await local(request)
            # On a thread, as a load request may contain a model's files.
            begun = [
                await asyncio.to_thread(journal.begin, kind, name, path, one.SerializeToString()) for kind, name, one in targets
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
                ((kind, name, _whole),) = registers.targets(region)
                if request.name not in {"", name}:
                    continue
                one = type(request)(name=name)
                try:
                    await local(one)
                except RegionInUseError as error:
                    refusals.append(str(error))
                    continue
                answers = await self._siblings.ask(path, one, command.answer, timeout_s=command.timeout_s)
                refused = [str(answer) for answer in answers.values() if isinstance(answer, InferenceError)]
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
        answer: pb.ModelStatisticsResponse = await local(request)
        living, ended = await self._left.with_ended(
            partial(self._siblings.query, STATISTICS, request, pb.ModelStatisticsResponse)
        )
        add_statistics(answer, [*living, *(one.statistics for one in ended)])
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
            answer.ready = all(not isinstance(one, InferenceError) and one.ready for one in others.values())
        return answer

    async def _check_health(self, local: Local, request: health_pb2.HealthCheckRequest) -> Message:
        answer: Message = await local(request)
        if request.service in {"", SERVICE} or answer.status != HealthResponse.SERVING:  # type: ignore[attr-defined]  # grpc_health ships no types
            return answer  # the server as a whole is as ready as this member
        others = await self._siblings.ask(Health.CHECK_PATH, request, HealthResponse)
        if any(isinstance(one, InferenceError) or one.status != HealthResponse.SERVING for one in others.values()):
            return HealthResponse(status=HealthResponse.NOT_SERVING)  # type: ignore[no-any-return]  # as above
        return answer

    async def _exposition(self, service: Service) -> tuple[bytes, str]:
        own = await MemberCounters.of(service.core)
        living, ended = await self._left.with_ended(
            partial(self._siblings.query, READ_COUNTERS, empty_pb2.Empty(), wrappers_pb2.BytesValue)
        )
        others = [*(MemberCounters.from_bytes(one.value) for one in living), *ended]
        texts = MetricTexts()
        texts.add(merge_metrics(own.metrics, (one.metrics for one in others)))
        return texts.joined(), CONTENT_TYPE
