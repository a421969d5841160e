"""Membership of a server in a cluster: the agent beside it started it, reads its counters and connects it to the controller."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path
from typing import Any

from google.protobuf import empty_pb2
from google.protobuf.message import Message

from halfserve.protos import inference_pb2 as pb
from halfserve.protos.agent_pb2 import MemberState
from halfserve.protos.cluster_pb2 import Directory
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.resource_limits import memory_limit_bytes
from halfserve.serve.fleet.member.cluster_service import AgentLink, ClusterService
from halfserve.serve.fleet.member.forwarder import Forwarder
from halfserve.serve.fleet.member.handover import Handover
from halfserve.serve.fleet.member.kept_counters import LastingCounters
from halfserve.serve.fleet.member.member_socket import MemberSocket
from halfserve.serve.fleet.member.shared_rpcs import TRACE_SETTING
from halfserve.serve.protocol.rpcs import one_message
from halfserve.serve.protocol.service import Service, StreamMethod, UnaryMethod
from halfserve.serve.security.tls import ServerTls
from halfserve.serve.transports.listener import ConnectionLimit

logger = logging.getLogger(__name__)

SOCKET = "server"  # name of the socket in the folder, without the suffix
STATE, PUBLISH = "/halfserve.Member/State", "/halfserve.Member/Publish"
LIST_S = 5.0  # interval between two listings of the repository, which may be in object storage


class ClusterMember:
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
        core.figures.readings["processes"] = lambda: 1  # summed over the members
        core.figures.readings["forwarded"] = lambda: self._forwarder.forwarded

    def connections(self, most: float, reason: str) -> ConnectionLimit:
        return ConnectionLimit(most, reason)

    async def join(self, service: Service) -> None:
        """Listen for the agent, and have the service answer for the cluster; see `Membership.join`."""
        own = Service(self._core, server_version=service.server_version, beside=service)
        own.streams[STATE] = StreamMethod(empty_pb2.Empty, one_message(self._state))
        own.streams[PUBLISH] = StreamMethod(Directory, one_message(self._cluster.publish), is_large=True)
        own.unary[TRACE_SETTING] = UnaryMethod(pb.TraceSettingRequest, partial(_set_traces, service))
        await self._socket.listen(own, self._counters.counters)
        self._measure()
        self._core.on_change(self._measure)
        self._counters.keeper.begin(self._counters.sums)
        service.spread = self._cluster.spread
        service.spread(service)
        self._listing = asyncio.create_task(self._list_models())

    async def all_here(self) -> None: ...

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

    async def _state(self, _: Any) -> MemberState:
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


def _set_traces(service: Service, request: pb.TraceSettingRequest) -> Message:
    """Apply a setting of the cluster; its model may not be served here yet, or only by other members."""
    changes = {name: list(setting.value) for name, setting in request.settings.items()}
    service.observability.update_traces(request.model_name, changes)
    return pb.TraceSettingResponse()


def _size(model: Model) -> int:
    """Size of a version's files in bytes, an approximation of its memory."""
    if model.path is None:
        return 0
    try:
        return sum(file.stat().st_size for file in model.path.parent.rglob("*") if file.is_file())
    except OSError:
        return 0
