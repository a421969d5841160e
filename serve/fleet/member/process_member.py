"""One of several server processes: it repeats earlier commands, and answers for all."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from pathlib import Path

from google.protobuf.message import Message

from halfserve.serve.engine.errors import FailedPreconditionError, InferenceError
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.resource_limits import available_bytes
from halfserve.serve.fleet.member.fleet_commands import COMMANDS, MODELS_TURN, SETTINGS_TURN
from halfserve.serve.fleet.member.handover import GONE, ConnectionCounts
from halfserve.serve.fleet.member.member_socket import MemberSocket, Siblings
from halfserve.serve.fleet.member.process_service import Journal, JournalEntry, ProcessService
from halfserve.serve.fleet.member.supervisor_link import Membership, SupervisorLink
from halfserve.serve.protocol.rpc import RpcCall
from halfserve.serve.protocol.service import Service
from halfserve.serve.transports.listener import ConnectionLimit

logger = logging.getLogger(__name__)

LOOK_S = 0.02  # interval of checks for the other members while the server starts
STATM = Path("/proc/self/statm")  # sizes in pages: total, resident, shared
SLACK_PART = 16  # a member may have up to 1/16 more connections than another, so that bursts are accepted fast


class ProcessMember(Membership):
    """One of several servers that answer as one. Lives on the event loop."""

    def __init__(self, link: SupervisorLink, core: InferenceCore) -> None:
        """Create a member that the others do not know yet; `link` connects it to its supervisor."""
        given = link.given
        self._folder = Path(given.folder)
        self._link = link
        self._counts = ConnectionCounts(self._folder)
        self._given = given
        self._core = core
        name = f"{given.place}-{given.restarts}"
        self._socket = MemberSocket(self._folder, name)
        self._siblings = Siblings(self._folder, name)
        self._service = ProcessService(self._siblings, Journal(self._folder / "commands"))
        self._connections: SharedConnectionLimit | None = None
        # Summed over the members.
        core.figures.gauge("halfserve_processes", "Server processes that serve together now", lambda: 1)

    def connections(self, most: float, reason: str) -> SharedConnectionLimit:
        """Limit of this member's connections, which distributes them over all members."""
        self._connections = SharedConnectionLimit(most, reason, self._counts, self._given.place)
        return self._connections

    async def join(self, service: Service) -> None:
        """Carry out earlier commands, and start to answer for all members; see `Membership.join`."""
        if self._speaks:
            check_room_for_models(self._given.places)
        own = Service(self._core, server_version=service.server_version, beside=service)
        journal, done = self._service.journal, set[str]()
        await self._repeat(own, journal, done)  # without the locks, as this may take long and nothing depends on it
        async with journal.turn(MODELS_TURN), journal.turn(SETTINGS_TURN):
            await self._repeat(own, journal, done)
            await self._complete(own, journal)
            await self._socket.listen(own)
        service.spread(self._service.layer)

    async def all_here(self) -> None:
        """Start accepting connections; in the member that reports for all, wait until all members accept."""
        if self._connections is not None:
            self._connections.begin()
        while self._speaks and not self._counts.all_accept():  # noqa: ASYNC110  (they are other processes)
            await asyncio.sleep(LOOK_S)

    def retire(self) -> None:
        """Leave further connections to the other members."""
        if self._connections is not None:
            self._connections.close()

    async def leave(self) -> None:
        """Leave the members."""
        await self._siblings.close()
        await self._socket.close()
        if self._link.has_ended:  # otherwise the supervisor removes the folder
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _speaks(self) -> bool:
        return self._given.place == 1 and not self._given.restarts

    async def _repeat(self, own: Service, journal: Journal, done: set[str]) -> None:
        for entry in journal.entries(done):
            done.add(entry.name)
            try:
                await own.rpcs[entry.path].method(_request(own, entry), RpcCall(server=own))
            except InferenceError as error:
                logger.warning("%s, which the other processes have carried out, fails here: %s", entry.path, error)

    async def _complete(self, own: Service, journal: Journal) -> None:
        """Have the other members carry out commands that a member left half done when it ended."""
        for entry in journal.entries():
            if entry.is_begun:
                command, request = COMMANDS[entry.path], _request(own, entry)
                await self._siblings.ask(entry.path, request, command.answer, timeout_s=command.timeout_s)
                journal.done(entry)


class SharedConnectionLimit(ConnectionLimit):
    """Limit of one member, which leaves new connections to members with fewer.

    Connections are long-lived: a gRPC client opens one and sends all its calls over it.
    """

    def __init__(self, most: float, reason: str, counts: ConnectionCounts, place: int) -> None:
        super().__init__(most, reason)
        self._counts = counts
        self._place = place
        self._accepts = False

    def begin(self) -> None:
        """Start accepting: other members may now leave connections to this one."""
        self._accepts = True
        self._tell()

    def take(self) -> None:
        super().take()
        self._tell()

    def release(self) -> None:
        super().release()
        self._tell()

    def gives_way(self) -> bool:
        return self.open - self.open // SLACK_PART > self._counts.fewest()

    def close(self) -> None:
        """Leave all further connections to other members."""
        self._accepts = False
        self._tell()

    def _tell(self) -> None:
        self._counts.set(self._place, self.open if self._accepts else GONE)


def _request(own: Service, entry: JournalEntry) -> Message:
    request = own.rpcs[entry.path].request()
    request.ParseFromString(entry.request)
    return request


def check_room_for_models(count: int) -> None:
    """Check, in the first of `count` processes, that there is memory for the same models in the others.

    Raises:
        FailedPreconditionError: there is too little memory.
    """
    room, own = available_bytes(), _own_bytes()
    if room is None or own is None or (count - 1) * own <= room:
        return
    raise FailedPreconditionError(
        f"--processes {count}: with these models a server process takes {own >> 20} MiB, and {room >> 20} MiB are available "
        f"for {count - 1} more; ask for {1 + room // own} or fewer"
    )


def _own_bytes() -> int | None:
    """Memory of this process that is not shared with others, in bytes; None if the system does not report it."""
    try:
        _, resident, shared = STATM.read_text(encoding="ascii").split()[:3]
    except OSError:
        return None
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
