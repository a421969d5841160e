"""A server as a member of a cluster: the agent beside it started it, reads its counters, and asks the controller for it.

What concerns the whole cluster, every member answers by asking the controller. Inference does not depend on it, and continues
if the agent or the controller is unreachable.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from google.protobuf import empty_pb2, wrappers_pb2
from google.protobuf.message import Message

from halfserve.protos import inference_pb2 as pb
from halfserve.protos.agent_pb2 import MemberState, ModelState
from halfserve.protos.cluster_pb2 import Directory, WatchRequest
from halfserve.serve.engine.errors import LISTING, NotFoundError, UnavailableError
from halfserve.serve.engine.hidden_steps import names_hidden
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model_statistics import Totals
from halfserve.serve.fleet.member.fleet_commands import (
    INDEX,
    LOAD,
    LOG_SETTINGS,
    METRICS,
    STATISTICS,
    TRACE_SETTING,
    UNLOAD,
)
from halfserve.serve.fleet.member.handover import Handover
from halfserve.serve.fleet.member.member_counters import MemberCounters
from halfserve.serve.fleet.member.member_socket import M, MemberChannel, MemberSocket, UnreachableError
from halfserve.serve.fleet.member.supervisor_link import Membership
from halfserve.serve.observability.metrics import CONTENT_TYPE, MetricTexts
from halfserve.serve.protocol.rpc import DESCRIPTION, Method, Rpc, RpcCall, ServerView
from halfserve.serve.protocol.service import METRICS as OWN_METRICS
from halfserve.serve.protocol.service import Service

SOCKET = "server"  # name of the socket in the folder, without the suffix
STATE, PUBLISH = "/halfserve.Member/State", "/halfserve.Member/Publish"
LIST_S = 5.0  # interval between two listings of the repository, which may be in object storage
AGENT = "agent"  # name of the agent's socket in the folder, without the suffix
WATCH = "/halfserve.Cluster/Watch"
REFUSALS = ("queue_full", "overloaded", "rate_limited")


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
    """Makes services answer for the whole cluster. Lives on the event loop.

    Attributes:
        directory: the current directory.
    """

    def __init__(self, agent: AgentLink) -> None:
        self.directory = Directory()
        self._agent = agent
        self._changed = asyncio.Event()
        self._is_over = False
        self._answers: dict[str, Callable[[Method, Any, RpcCall], Awaitable[Any]]] = {
            LOAD: self._load,
            UNLOAD: self._unload,
            STATISTICS: self._statistics,
            INDEX: self._index,
            OWN_METRICS.path: self._metrics,
            **{path: partial(self._change_settings, path) for path in (TRACE_SETTING, LOG_SETTINGS)},
        }

    async def publish(self, directory: Directory, _call: RpcCall) -> Message:
        """Send this directory to watchers from now on."""
        self.directory = directory
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

    def _layer(self, rpc: Rpc, method: Method) -> Method:
        answer = self._answers.get(rpc.path)
        return method if answer is None else partial(answer, method)

    async def _load(self, _local: Method, request: pb.RepositoryModelLoadRequest, call: RpcCall) -> Message:
        if not call.server.may_see(request.model_name):
            raise NotFoundError(f"the repository has no model {request.model_name!r}; {LISTING} lists what it has")
        with names_hidden(call.server.may_see):
            return await self._agent.ask(LOAD, request, pb.RepositoryModelLoadResponse)

    async def _unload(self, _local: Method, request: pb.RepositoryModelUnloadRequest, call: RpcCall) -> Message:
        if not call.server.may_see(request.model_name):
            raise NotFoundError(f"model {request.model_name!r} is not loaded; {LISTING} lists what is")
        return await self._agent.ask(UNLOAD, request, pb.RepositoryModelUnloadResponse)

    async def _change_settings(self, path: str, local: Method, request: Any, call: RpcCall) -> Message:
        answer: Message = await local(request, call)  # first here: a refused request does not reach the other members
        if request.settings:
            await self._agent.ask(path, request, type(answer))
        return answer

    async def _statistics(self, _local: Method, request: pb.ModelStatisticsRequest, call: RpcCall) -> Message:
        may_see = call.server.may_see
        if request.name and not may_see(request.name):
            raise NotFoundError(f"model {request.name!r} is not served here; {LISTING} lists what is")
        answer = await self._agent.ask(STATISTICS, request, pb.ModelStatisticsResponse)
        return pb.ModelStatisticsResponse(model_stats=[one for one in answer.model_stats if may_see(one.name)])

    async def _index(self, _local: Method, request: pb.RepositoryIndexRequest, call: RpcCall) -> Message:
        answer = await self._agent.ask(INDEX, request, pb.RepositoryIndexResponse)
        return pb.RepositoryIndexResponse(models=[one for one in answer.models if call.server.may_see(one.name)])

    async def _watch(self, requests: AsyncIterator[Any], call: RpcCall) -> None:
        async for _ in requests:
            sent = 0
            while not self._is_over:
                changed = self._changed
                if self.directory.version != sent:
                    sent = self.directory.version
                    await call.send(_visible(self.directory, call.server))
                await changed.wait()
            return

    async def _metrics(self, _local: Method, _: Message, call: RpcCall) -> tuple[bytes, str]:
        answer = await self._agent.ask(METRICS, empty_pb2.Empty(), wrappers_pb2.BytesValue)
        metrics = MemberCounters.from_bytes(answer.value).metrics
        for metric in metrics:
            metric.samples = [
                one for one in metric.samples if "model" not in one.labels or call.server.may_see(one.labels["model"])
            ]
        texts = MetricTexts()
        texts.add(metrics)
        return texts.joined(), CONTENT_TYPE

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _visible(directory: Directory, server: ServerView) -> Directory:
    shown = Directory()
    shown.CopyFrom(directory)
    for member in shown.members:
        names = [name for name in member.models if server.may_see(name)]
        del member.models[:]
        member.models.extend(names)
    return shown


class ClusterMember(Membership):
    """Server that shares a folder of its own with its agent. Lives on the event loop."""

    def __init__(self, given: Handover, core: InferenceCore) -> None:
        """Create a member that does not listen for its agent yet."""
        folder = Path(given.folder)
        self._core = core
        self._slots = 0 if core.slots is None else core.slots.free  # all slots are free, as no model is loaded yet
        self._agent = AgentLink(folder)
        self._cluster = ClusterService(self._agent)
        self._socket = MemberSocket(folder, SOCKET)
        self._listing: asyncio.Task[None] | None = None
        # Summed over the members.
        core.figures.gauge("halfserve_processes", "Server processes that serve together now", lambda: 1)

    async def join(self, service: Service) -> None:
        """Listen for the agent, and have the service answer for the cluster; see `Membership.join`."""
        own = Service(self._core, server_version=service.server_version, beside=service)
        own.rpcs[STATE] = Rpc(STATE, empty_pb2.Empty, self._state)
        own.rpcs[PUBLISH] = Rpc(PUBLISH, Directory, self._cluster.publish, is_large=True)
        own.rpcs[TRACE_SETTING] = Rpc(TRACE_SETTING, pb.TraceSettingRequest, _set_traces)
        await self._socket.listen(own)
        self._cluster.spread(service)
        self._listing = asyncio.create_task(self._list_models())

    def retire(self) -> None:
        """Send watchers of the directory to other members."""
        self._cluster.close()

    async def leave(self) -> None:
        """End the connections to the agent."""
        if self._listing is not None:
            self._listing.cancel()
        await self._agent.close()
        await self._socket.close()

    async def _state(self, _: Message, _call: RpcCall) -> MemberState:
        core = self._core
        state = MemberState(
            is_ready=core.is_ready,
            directory_version=self._cluster.directory.version,
            compute_slots=self._slots or max((len(model.backends) for model in core.models()), default=1) or 1,
        )
        for name in core.loadable:
            state.models[name].is_served = core.is_ready and core.comes_on_demand(name)
        for served in core.models():
            model = state.models[served.name]
            model.is_served = core.is_model_ready(served.name)
            model.versions.append(str(served.version))
            _add_totals(model, served.statistics.totals)
        return state

    async def _list_models(self) -> None:
        while True:
            await self._core.refresh()
            await asyncio.sleep(LIST_S)


def _add_totals(model: ModelState, totals: Totals) -> None:
    model.requests += totals.success.count
    model.refusals += sum(totals.failures.get(reason, 0) for reason in REFUSALS)
    model.queue_ns += max(0, totals.queue.ns)
    model.compute_ns += max(0, sum(size.compute_infer.ns for size in totals.by_batch_size.values()))


async def _set_traces(request: pb.TraceSettingRequest, call: RpcCall) -> Message:
    """Apply a setting of the cluster; its model may not be served here yet, or only by other members."""
    changes = {name: list(setting.value) for name, setting in request.settings.items()}
    call.server.observability.update_traces(request.model_name, changes)
    return pb.TraceSettingResponse()
