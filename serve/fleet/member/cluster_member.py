"""A server as a member of a cluster: the agent beside it started it, reads its counters, and asks the controller for it.

What concerns the whole cluster, every member answers by asking the controller. Inference of models that this member serves does
not depend on it, and continues if the agent or the controller is unreachable.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from google.protobuf import empty_pb2, wrappers_pb2
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from halfserve.protos import inference_pb2 as pb
from halfserve.protos.agent_pb2 import MemberState
from halfserve.protos.cluster_pb2 import Directory, WatchRequest
from halfserve.serve.engine.errors import NotFoundError, UnavailableError
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.resource_limits import memory_limit_bytes
from halfserve.serve.fleet.member.forwarder import Forwarder
from halfserve.serve.fleet.member.handover import Handover
from halfserve.serve.fleet.member.kept_counters import LastingCounters
from halfserve.serve.fleet.member.member_socket import M, MemberChannel, MemberSocket, UnreachableError
from halfserve.serve.fleet.member.shared_rpcs import (
    INDEX,
    LOAD,
    LOG_SETTINGS,
    METRICS,
    READY,
    STATISTICS,
    TRACE_SETTING,
    UNLOAD,
)
from halfserve.serve.fleet.member.supervisor_link import Membership
from halfserve.serve.observability.metrics import CONTENT_TYPE
from halfserve.serve.protocol.rpc import DESCRIPTION, Method, Rpc, RpcCall, ServerView
from halfserve.serve.protocol.rpcs import RECHECK_S, Health
from halfserve.serve.protocol.service import METRICS as OWN_METRICS
from halfserve.serve.protocol.service import SERVICE, Service, rpc_table
from halfserve.serve.security.tls import ServerTls

logger = logging.getLogger(__name__)

SOCKET = "server"  # name of the socket in the folder, without the suffix
STATE, PUBLISH = "/halfserve.Member/State", "/halfserve.Member/Publish"
LIST_S = 5.0  # interval between two listings of the repository, which may be in object storage
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
        self._answers: dict[str, Callable[[Method, Any, RpcCall], Awaitable[Any]]] = {
            LOAD: self._load,
            UNLOAD: self._unload,
            STATISTICS: self._statistics,
            INDEX: self._index,
            READY: self._model_ready,
            Health.CHECK_PATH: self._check_health,
            Health.WATCH_PATH: self._watch_health,
            OWN_METRICS.path: self._metrics,
            **{path: partial(self._change_settings, path) for path in (TRACE_SETTING, LOG_SETTINGS)},
            **{path: partial(self._describe, path) for path in DESCRIPTIONS},
        }

    @property
    def directory_version(self) -> int:
        """Version of the current directory; 0 before the first."""
        return int(self._forwarder.directory.version)

    async def publish(self, directory: Directory, _call: RpcCall) -> Message:
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
        service.spread(self._layer)
        service.rpcs[WATCH] = Rpc(WATCH, WatchRequest, self._watch, DESCRIPTION, is_stream=True)
        service.inference_with = self._forwarder.inference

    def _layer(self, rpc: Rpc, method: Method) -> Method:
        answer = self._answers.get(rpc.path)
        return method if answer is None else partial(answer, method)

    async def _load(self, _local: Method, request: pb.RepositoryModelLoadRequest, call: RpcCall) -> Message:
        if not call.server.may_see(request.model_name):
            raise NotFoundError(f"the repository has no model {request.model_name!r}; RepositoryIndex lists what it has")
        return await self._agent.ask(LOAD, request, pb.RepositoryModelLoadResponse)

    async def _unload(self, _local: Method, request: pb.RepositoryModelUnloadRequest, call: RpcCall) -> Message:
        if not call.server.may_see(request.model_name):
            raise NotFoundError(f"model {request.model_name!r} is not loaded; RepositoryIndex lists what is")
        return await self._agent.ask(UNLOAD, request, pb.RepositoryModelUnloadResponse)

    async def _change_settings(self, path: str, local: Method, request: Any, call: RpcCall) -> Message:
        answer: Message = await local(request, call)  # first here: a refused request does not reach the other members
        if request.settings:
            await self._agent.ask(path, request, type(answer))
        return answer

    async def _statistics(self, _local: Method, request: pb.ModelStatisticsRequest, call: RpcCall) -> Message:
        may_see = call.server.may_see
        if request.name and not may_see(request.name):
            raise NotFoundError(f"model {request.name!r} is not served here; RepositoryIndex lists what is")
        answer = await self._agent.ask(STATISTICS, request, pb.ModelStatisticsResponse)
        return pb.ModelStatisticsResponse(model_stats=[one for one in answer.model_stats if may_see(one.name)])

    async def _index(self, _local: Method, request: pb.RepositoryIndexRequest, call: RpcCall) -> Message:
        answer = await self._agent.ask(INDEX, request, pb.RepositoryIndexResponse)
        return pb.RepositoryIndexResponse(models=[one for one in answer.models if call.server.may_see(one.name)])

    async def _model_ready(self, _local: Method, request: pb.ModelReadyRequest, call: RpcCall) -> pb.ModelReadyResponse:
        if not call.server.may_see(request.name):
            return pb.ModelReadyResponse(ready=False)
        return await self._agent.ask(READY, request, pb.ModelReadyResponse)

    async def _check_health(self, local: Method, request: health_pb2.HealthCheckRequest, call: RpcCall) -> Message:
        if request.service in {"", SERVICE}:
            return await local(request, call)  # type: ignore[no-any-return]  # grpc_health ships no types
        if not self._forwarder.serving(request.service) or not call.server.may_see(request.service):
            await local(request, call)  # raises NotFoundError for an unknown name
        ready = await self._model_ready(local, pb.ModelReadyRequest(name=request.service), call)
        return HealthResponse(status=HealthResponse.SERVING if ready.ready else HealthResponse.NOT_SERVING)  # type: ignore[no-any-return]  # as above

    async def _watch_health(self, local: Method, requests: AsyncIterator[Any], call: RpcCall) -> None:
        """Send the status of a model at any member, or of this server, whenever it changes."""
        async for request in requests:
            if request.service in {"", SERVICE}:
                await local(_only(request), call)
                return
            sent: int | None = None
            while not self._is_over:
                changed = self._changed
                status = await self._status(request, call)
                if status != sent:
                    sent = status
                    await call.send(HealthResponse(status=status))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RECHECK_S):
                        await changed.wait()
            return

    async def _status(self, request: health_pb2.HealthCheckRequest, call: RpcCall) -> int:
        if self._forwarder.serving(request.service) and call.server.may_see(request.service):
            return int(HealthResponse.SERVING)
        try:
            return int((await rpc_table()[Health.CHECK_PATH].method(request, call)).status)
        except NotFoundError:
            return int(HealthResponse.SERVICE_UNKNOWN)

    async def _describe(self, path: str, local: Method, request: Any, call: RpcCall) -> Message:
        try:
            answer: Message = await local(request, call)
        except (NotFoundError, UnavailableError):
            if call.server.core.served(request.name) or not call.server.may_see(request.name):
                raise
            there = await self._forwarder.call(request.name, path, request, DESCRIPTIONS[path], call.headers)
            if there is None:
                raise
            return there
        return answer

    async def _watch(self, requests: AsyncIterator[Any], call: RpcCall) -> None:
        async for _ in requests:
            sent = 0
            while not self._is_over:
                changed = self._changed
                if self.directory_version != sent:
                    sent = self.directory_version
                    await call.send(_visible(self._forwarder.directory, call.server))
                await changed.wait()
            return

    async def _metrics(self, _local: Method, _: Message, call: RpcCall) -> tuple[bytes, str]:
        text: bytes = (await self._agent.ask(METRICS, empty_pb2.Empty(), wrappers_pb2.BytesValue)).value
        if not call.server.is_whole:
            text = b"".join(line for line in text.splitlines(keepends=True) if _is_visible(line, call.server))
        return text, CONTENT_TYPE

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


async def _only(request: Any) -> AsyncIterator[Any]:
    yield request


def _visible(directory: Directory, server: ServerView) -> Directory:
    shown = Directory()
    shown.CopyFrom(directory)
    for member in shown.members:
        names = [name for name in member.models if server.may_see(name)]
        del member.models[:]
        member.models.extend(names)
    return shown


def _is_visible(line: bytes, server: ServerView) -> bool:
    found = OF_MODEL.search(line)
    return found is None or server.may_see(found[1].decode("unicode_escape"))


class ClusterMember(Membership):
    """Server that shares a folder of its own with its agent. Lives on the event loop."""

    def __init__(self, given: Handover, core: InferenceCore, tls: ServerTls | None) -> None:
        """Create a member that does not listen for its agent yet; for `tls` see `Forwarder`."""
        self._folder = Path(given.folder)
        self._core = core
        self._slots = 0 if core.slots is None else core.slots.free  # all slots are free, as no model is loaded yet
        self._counters = LastingCounters(self._folder, SOCKET, core)
        self._agent = AgentLink(self._folder)
        self._forwarder = Forwarder(given.member, core, tls)
        self._cluster = ClusterService(self._agent, self._forwarder)
        self._socket = MemberSocket(self._folder, SOCKET)
        self._listing: asyncio.Task[None] | None = None
        self._sizes: dict[Model, int] = {}
        # Summed over the members.
        core.figures.gauge("halfserve_processes", "Server processes that serve together now", lambda: 1)
        core.figures.counter(
            "halfserve_requests_forwarded_total",
            "Requests passed on to members that serve the model",
            lambda: self._forwarder.forwarded,
        )

    async def join(self, service: Service) -> None:
        """Listen for the agent, and have the service answer for the cluster; see `Membership.join`."""
        own = Service(self._core, server_version=service.server_version, beside=service)
        own.rpcs[STATE] = Rpc(STATE, empty_pb2.Empty, self._state)
        own.rpcs[PUBLISH] = Rpc(PUBLISH, Directory, self._cluster.publish, is_large=True)
        own.rpcs[TRACE_SETTING] = Rpc(TRACE_SETTING, pb.TraceSettingRequest, _set_traces)
        await self._socket.listen(own, self._counters.counters)
        self._measure()
        self._core.on_change(self._measure)
        self._counters.keeper.begin(self._counters.sums)
        self._cluster.spread(service)
        self._listing = asyncio.create_task(self._list_models())

    def retire(self) -> None:
        """Send watchers of the directory to other members."""
        self._cluster.close()

    async def leave(self) -> None:
        """Write the last counters to the folder."""
        if self._listing is not None:
            self._listing.cancel()
        await self._counters.keeper.end()
        await self._agent.close()
        await self._forwarder.close()
        await self._socket.close()

    def _measure(self) -> None:
        self._sizes = {model: self._sizes.get(model) or _size(model) for model in self._core.models()}

    async def _state(self, _: Message, _call: RpcCall) -> MemberState:
        core = self._core
        state = MemberState(
            is_ready=core.is_ready,
            directory_version=self._cluster.directory_version,
            compute_slots=self._slots or max((len(model.backends) for model in core.models()), default=1) or 1,
            memory_size=memory_limit_bytes() or 0,
        )
        sums = self._counters.sums()
        for name in {*core.loadable, *sums}:
            model = state.models[name]
            if name in sums:
                model.CopyFrom(sums[name])
            model.is_served = bool(core.served(name)) and core.is_model_ready(name)
            model.versions.extend(str(one.version) for one in core.served(name))
            model.size = sum(self._sizes.get(one, 0) for one in core.served(name))
        return state

    async def _list_models(self) -> None:
        while True:
            await self._core.refresh()
            await asyncio.sleep(LIST_S)


async def _set_traces(request: pb.TraceSettingRequest, call: RpcCall) -> Message:
    """Apply a setting of the cluster; its model may not be served here yet, or only by other members."""
    changes = {name: list(setting.value) for name, setting in request.settings.items()}
    call.server.observability.update_traces(request.model_name, changes)
    return pb.TraceSettingResponse()


def _size(model: Model) -> int:
    """Size of a version's files in bytes, an approximation of its memory."""
    if model.path is None:
        return 0
    try:
        return sum(file.stat().st_size for file in model.path.parent.rglob("*") if file.is_file())
    except OSError:
        return 0
