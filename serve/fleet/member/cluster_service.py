"""Answers RPCs that concern the whole cluster at every member, by asking the controller through the agent.

Inference of models that this member serves does not depend on it, and continues if the agent or controller is unreachable.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from google.protobuf import empty_pb2, wrappers_pb2
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from halfserve.protos import inference_pb2 as pb
from halfserve.protos.cluster_pb2 import Directory, WatchRequest
from halfserve.serve.engine.errors import NotFoundError, UnavailableError
from halfserve.serve.fleet.member.forwarder import Forwarder
from halfserve.serve.fleet.member.member_socket import M, MemberChannel, UnreachableError
from halfserve.serve.fleet.member.shared_rpcs import (
    INDEX,
    LOAD,
    LOG_SETTINGS,
    METRICS,
    READY,
    STATISTICS,
    TRACE_SETTING,
    UNLOAD,
    Local,
    answer_for_all,
    local_method,
    only,
    request_class,
)
from halfserve.serve.observability.metrics import CONTENT_TYPE
from halfserve.serve.protocol.rpcs import RECHECK_S, Answer, Health, one_message
from halfserve.serve.protocol.service import SERVICE, Headers, LimitedService, Service, StreamMethod

AGENT = "agent"  # name of the agent's socket in the folder, without the suffix
WATCH = "/halfserve.Cluster/Watch"
DESCRIPTIONS: dict[str, type[Message]] = {
    f"/{SERVICE}/ModelMetadata": pb.ModelMetadataResponse,
    f"/{SERVICE}/ModelConfig": pb.ModelConfigResponse,
}
HealthResponse = health_pb2.HealthCheckResponse
OF_MODEL = re.compile(rb'[{,]model="((?:[^"\\]|\\.)*)"')  # the label of a metric that names its model


class AgentLink:
    """Connection of a server to its agent, which asks the controller for the whole cluster. Lives on the event loop."""

    def __init__(self, folder: Path) -> None:
        """Connect to the agent that shares this folder."""
        self._channel = MemberChannel(folder, AGENT)

    async def ask(self, path: str, request: Message, answer: type[M]) -> M:
        """Call the method at `path` for the whole cluster.

        Raises:
            InferenceError: the cluster refused the request.
            UnavailableError: the agent or the controller cannot be reached now.
        """
        try:
            return await self._channel.ask(path, request, answer, None)
        except UnreachableError:
            raise UnavailableError(
                "the agent of this server, which speaks for the whole cluster, cannot be reached now; inference goes on, ask "
                "again in a moment"
            ) from None

    async def close(self) -> None:
        await self._channel.close()


class ClusterService:
    """Makes services answer for the whole cluster. Lives on the event loop."""

    def __init__(self, agent: AgentLink, forwarder: Forwarder) -> None:
        self._agent = agent
        self._forwarder = forwarder
        self._changed = asyncio.Event()
        self._is_over = False

    @property
    def directory_version(self) -> int:
        """Version of the current directory; 0 before the first."""
        return int(self._forwarder.directory.version)

    async def publish(self, directory: Directory) -> Message:
        """Send this directory to watchers from now on."""
        await self._forwarder.follow(directory)
        self._wake()
        return empty_pb2.Empty()

    def close(self) -> None:
        """End all watches, so that clients continue with another member."""
        self._is_over = True
        self._wake()

    def spread(self, service: Service) -> None:
        """Have a service answer for all members."""
        answer_for_all(service, LOAD, partial(self._load, service))
        answer_for_all(service, UNLOAD, partial(self._unload, service))
        answer_for_all(service, STATISTICS, partial(self._statistics, service))
        answer_for_all(service, INDEX, partial(self._index, service))
        answer_for_all(service, READY, partial(self._model_ready, service))
        local_check, watch = local_method(service, Health.CHECK_PATH), service.streams[Health.WATCH_PATH]
        answer_for_all(service, Health.CHECK_PATH, partial(self._check_health, service))
        watched = partial(self._watch_health, service, local_check, watch.answer)
        service.streams[Health.WATCH_PATH] = replace(watch, answer=watched)
        for path in (TRACE_SETTING, LOG_SETTINGS):
            answer_for_all(service, path, partial(self._change_settings, path))
        for path in DESCRIPTIONS:
            described = partial(self._describe, service, path, local_method(service, path))
            method = StreamMethod(request_class(service, path), one_message(partial(described, {})))
            service.unary.pop(path)
            service.streams[path] = replace(method, with_headers=partial(_with_headers, method, described))
        service.streams[WATCH] = StreamMethod(WatchRequest, partial(self._watch, service))
        service.exposition = partial(self._exposition, service)
        service.inference_with = partial(self._forwarder.inference, service)

    async def _load(self, service: Service, _: Local, request: pb.RepositoryModelLoadRequest) -> Message:
        if not service.may_see(request.model_name):
            raise NotFoundError(f"the repository has no model {request.model_name!r}; RepositoryIndex lists what it has")
        return await self._agent.ask(LOAD, request, pb.RepositoryModelLoadResponse)

    async def _unload(self, service: Service, _: Local, request: pb.RepositoryModelUnloadRequest) -> Message:
        if not service.may_see(request.model_name):
            raise NotFoundError(f"model {request.model_name!r} is not loaded; RepositoryIndex lists what is")
        return await self._agent.ask(UNLOAD, request, pb.RepositoryModelUnloadResponse)

    async def _change_settings(self, path: str, local: Local, request: Any) -> Message:
        answer: Message = await local(request)  # first here: a refused request does not reach the other members
        if request.settings:
            await self._agent.ask(path, request, type(answer))
        return answer

    async def _statistics(self, service: Service, _: Local, request: pb.ModelStatisticsRequest) -> Message:
        if request.name and not service.may_see(request.name):
            raise NotFoundError(f"model {request.name!r} is not served here; RepositoryIndex lists what is")
        answer = await self._agent.ask(STATISTICS, request, pb.ModelStatisticsResponse)
        return pb.ModelStatisticsResponse(model_stats=[one for one in answer.model_stats if service.may_see(one.name)])

    async def _index(self, service: Service, _: Local, request: pb.RepositoryIndexRequest) -> Message:
        answer = await self._agent.ask(INDEX, request, pb.RepositoryIndexResponse)
        return pb.RepositoryIndexResponse(models=[one for one in answer.models if service.may_see(one.name)])

    async def _model_ready(self, service: Service, _: Local, request: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        if not service.may_see(request.name):
            return pb.ModelReadyResponse(ready=False)
        return await self._agent.ask(READY, request, pb.ModelReadyResponse)

    async def _check_health(self, service: Service, local: Local, request: health_pb2.HealthCheckRequest) -> Message:
        if request.service in {"", SERVICE}:
            return await local(request)  # type: ignore[no-any-return]  # grpc_health ships no types
        if not self._forwarder.serving(request.service) or not service.may_see(request.service):
            await local(request)  # raises NotFoundError for an unknown name
        ready = await self._model_ready(service, local, pb.ModelReadyRequest(name=request.service))
        return HealthResponse(status=HealthResponse.SERVING if ready.ready else HealthResponse.NOT_SERVING)  # type: ignore[no-any-return]  # as above

    async def _watch_health(
        self, service: Service, local_check: Local, local_watch: Answer, requests: AsyncIterator[Any]
    ) -> AsyncIterator[Message]:
        """Stream the status of a model at any member, or of this server, whenever it changes."""
        async for request in requests:
            if request.service in {"", SERVICE}:
                async for answer in local_watch(only(request)):
                    yield answer
                return
            sent: int | None = None
            while not self._is_over:
                changed = self._changed
                status = await self._status(service, local_check, request)
                if status != sent:
                    sent = status
                    yield HealthResponse(status=status)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RECHECK_S):
                        await changed.wait()
            return

    async def _status(self, service: Service, local_check: Local, request: health_pb2.HealthCheckRequest) -> int:
        if self._forwarder.serving(request.service) and service.may_see(request.service):
            return int(HealthResponse.SERVING)
        try:
            return int((await local_check(request)).status)
        except NotFoundError:
            return int(HealthResponse.SERVICE_UNKNOWN)

    async def _describe(self, service: Service, path: str, local: Local, headers: Headers, request: Any) -> Message:
        try:
            answer: Message = await local(request)
        except (NotFoundError, UnavailableError):
            if service.core.served(request.name) or not service.may_see(request.name):
                raise
            there = await self._forwarder.call(request.name, path, request, DESCRIPTIONS[path], headers)
            if there is None:
                raise
            return there
        return answer

    async def _watch(self, service: Service, requests: AsyncIterator[Any]) -> AsyncIterator[Message]:
        async for _ in requests:
            sent = 0
            while not self._is_over:
                changed = self._changed
                if self.directory_version != sent:
                    sent = self.directory_version
                    yield _visible(self._forwarder.directory, service)
                await changed.wait()
            return

    async def _exposition(self, service: Service) -> tuple[bytes, str]:
        text: bytes = (await self._agent.ask(METRICS, empty_pb2.Empty(), wrappers_pb2.BytesValue)).value
        if isinstance(service, LimitedService):
            text = b"".join(line for line in text.splitlines(keepends=True) if _is_visible(line, service))
        return text, CONTENT_TYPE

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _with_headers(method: StreamMethod, described: Callable[..., Awaitable[Message]], headers: Headers) -> StreamMethod:
    return replace(method, answer=one_message(partial(described, headers)), with_headers=None)


def _visible(directory: Directory, service: Service) -> Directory:
    shown = Directory()
    shown.CopyFrom(directory)
    for member in shown.members:
        names = [name for name in member.models if service.may_see(name)]
        del member.models[:]
        member.models.extend(names)
    return shown


def _is_visible(line: bytes, service: Service) -> bool:
    found = OF_MODEL.search(line)
    return found is None or service.may_see(found[1].decode("unicode_escape"))
