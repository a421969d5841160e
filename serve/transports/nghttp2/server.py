"""The fast transport: gRPC over libnghttp2 on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket as sockets
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, cast

from ngh2.exceptions import NGH2Error

from halfserve.serve.protocol.service import Service
from halfserve.serve.security.gate import Gate
from halfserve.serve.security.memory_budget import DEFAULT_BYTES, MemoryBudget
from halfserve.serve.transports.listener import ConnectionLimit, Listener, LogThrottle
from halfserve.serve.transports.listening import Address, listen
from halfserve.serve.transports.nghttp2.calls import Calls
from halfserve.serve.transports.nghttp2.connection import GrpcConnection
from halfserve.serve.transports.nghttp2.fairness import TransportLimits
from halfserve.serve.transports.read_scheduler import read_scheduler

logger = logging.getLogger(__name__)

RECEIVE_BYTES = 2**18  # per read of a socket
NOTICE_S = 1.0  # for clients to read GOAWAY
FLUSH_S = 1.0  # for the last bytes of a closed connection to leave
STOOD_STILL_S = 1.0  # a timer as late as this: the process was suspended
BUSY_POLL_S = 250e-6
MAX_WORTH: Final = 8  # upper bound of the score, so that a few failures in a row stop polling
FAILURE: Final = 2  # successes that one failure cancels
TRY_EVERY: Final = 64  # responses between trials while polling does not pay


class Nghttp2Server:
    def __init__(
        self,
        service: Service,
        host: str,
        port: int,
        *,
        limits: TransportLimits | None = None,
        tls: ssl.SSLContext | None = None,  # with certificate and key loaded; HTTP/2 is announced by ALPN
        gate: Gate | None = None,  # checks permissions; None admits every client
        budget: MemoryBudget | None = None,  # memory for all clients; None makes a default one
        socket: Path | None = None,  # Unix socket for this user, in place of host and port
        option: str = "--grpc-port",  # the port's option in the text of a BindError
        listening: Sequence[sockets.socket] = (),  # shared with other processes, used in place of host, port and socket
        connections: ConnectionLimit | None = None,  # over all servers of this process
    ) -> None:
        self._calls = Calls(service, gate)
        self._shared = connections
        if gate is not None:
            gate.on_change(self._reroute)
        self._socket, self._option = socket, option
        self._listening = listening
        self._host, self._port = host, port
        self._limits = limits or TransportLimits()
        self._tls = tls
        if tls is not None:
            tls.set_alpn_protocols(["h2"])
        self.budget = budget or MemoryBudget(DEFAULT_BYTES)
        self.received = bytearray(RECEIVE_BYTES)
        self.read_scheduler = read_scheduler()
        self._connections: set[GrpcConnection] = set()
        self._unflushed: set[GrpcConnection] = set()
        self._changed = asyncio.Event()
        self._listener: Listener | None = None  # once it listens
        self._closing = False
        self._leave_by_s = 0.0  # on the loop's clock: when the last answer must have been read, once it is closing
        self._time_limits = TimeLimits(self._limits, self._connections, self.budget)
        self._busy_poll: BusyPoll | None = None  # once it listens
        self._broken_log, self._unread_log = LogThrottle(logger.info), LogThrottle(logger.warning)
        figures = service.core.figures
        figures.gauge("halfserve_connections", "Open gRPC connections", lambda: len(self._connections))
        figures.gauge("halfserve_calls", "gRPC calls in flight, streams included", self._calls_in_flight)

    def _calls_in_flight(self) -> int:
        return sum(connection.session.calls for connection in self._connections)

    async def start(self) -> int:
        """Listen, and return the port.

        Raises:
            BindError: the address is in use, not this machine's, or not allowed.
        """
        loop = asyncio.get_running_loop()
        self._busy_poll = BusyPoll(loop.call_soon)
        bound = self._listening or listen(Address(self._host, self._port, self._option, self._socket))
        self._listener = Listener(
            # One of asyncio's protocols in all but its base class, below which a class is not compiled.
            cast("Callable[[], asyncio.BaseProtocol]", self.connection),
            most=self._limits.max_connections,
            shared=self._shared,
            tls=None if self._socket is not None else self._tls,
            handshake_s=self._limits.handshake_s,
        )
        self._listener.begin(bound)
        self._time_limits.look_later(loop)
        return 0 if self._socket is not None else self._listener.port

    async def give_notice(self) -> None:
        """Stop accepting connections, and ask clients to send further calls elsewhere; calls on their way are still served."""
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._connections):
            connection.give_notice()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(NOTICE_S):
                await self._until(lambda: all(connection.goes for connection in self._connections))

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, wait up to `grace_s` seconds for calls in flight and their responses to be read, then close.

        Of several calls the first deadline ends calls in flight, and the last one ends unread responses.
        """
        if self._listener is None:
            return
        self._closing = True
        self._leave_by_s = max(self._leave_by_s, asyncio.get_running_loop().time() + grace_s)
        self._listener.close()
        if self._socket is not None and not self._listening:
            self._socket.unlink(missing_ok=True)
        self._time_limits.stop()
        for connection in list(self._connections):
            connection.go_away()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._until(lambda: not any(connection.session.calls for connection in self._connections))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._leave_by_s):
                await self._until(lambda: not any(connection.has_unsent for connection in self._connections))
        self._listener.abort()
        for connection in list(self._connections):
            connection.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await self._until(lambda: not self._connections)
        for connection in list(self._connections):
            connection.abort()

    def connection(self) -> GrpcConnection:
        """Return the server's side of a new connection."""
        return GrpcConnection(self, self._calls.route, self._limits)

    def connected(self, connection: GrpcConnection) -> None:
        self._connections.add(connection)

    def disconnected(self, connection: GrpcConnection) -> None:
        self._connections.discard(connection)
        self._unflushed.discard(connection)
        if self._listener is not None:
            self._listener.left(connection)
        self._changed.set()

    def broken(self, error: NGH2Error) -> None:
        self._broken_log.say("a connection broke HTTP/2: %s", error)

    def unread(self, size: int) -> None:
        self._unread_log.say("a connection was closed: its client left %d bytes of answers unread", size)

    def flush_soon(self, connection: GrpcConnection) -> None:
        """Flush at the end of this loop iteration, once for all responses."""
        if not self._unflushed:
            connection.loop.call_soon(self._flush)
        self._unflushed.add(connection)

    def flush_last(self, connection: GrpcConnection) -> None:
        """Flush a connection whose last call in flight is answered: no other response will join this one."""
        connection.flush()
        self.flush_soon(connection)  # for the counts of this loop iteration

    def sent(self, connection: GrpcConnection) -> None:  # noqa: ARG002  (waiters check all connections)
        self._changed.set()

    def _reroute(self) -> None:
        """Drop cached routes: permissions have changed."""
        for connection in self._connections:
            connection.session.reroute()

    async def _until(self, reached: Callable[[], bool]) -> None:
        """Wait until `reached()`, evaluated whenever a connection has written or ended."""
        while not reached():
            self._changed.clear()
            await self._changed.wait()

    def _flush(self) -> None:
        connections, self._unflushed = self._unflushed, set()
        responses = sum([connection.unflushed for connection in connections])
        for connection in connections:
            if connection.unflushed:
                connection.flush()
        self._changed.set()
        if self._busy_poll is not None:
            self._busy_poll.answered(alone=responses <= 1 == len(connections))


class TimeLimits:
    """Ends the connections of a server that exceed a time limit. Lives on the event loop."""

    def __init__(self, limits: TransportLimits, connections: set[GrpcConnection], budget: MemoryBudget) -> None:
        """Watch the connections that are in `connections` at each look."""
        self._limits = limits
        self._connections = connections
        self._budget = budget
        self._timer: asyncio.TimerHandle | None = None

    def look_later(self, loop: asyncio.AbstractEventLoop) -> None:
        seconds = self._limits.sweep_s
        self._timer = loop.call_later(seconds, self._look, loop, loop.time() + seconds)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        """Check time limits, unless the process was suspended: clients may have sent data that is not read yet."""
        now = loop.time()
        if now - due_s < STOOD_STILL_S:
            for connection in list(self._connections):
                self._check(connection, now)
            self._budget.look_after(now)
        self.look_later(loop)

    def _check(self, connection: GrpcConnection, now: float) -> None:
        limits, session = self._limits, connection.session
        age_s, silent_s = now - connection.opened_s, now - session.heard_s
        unanswered_s = 0.0 if session.pinged_s is None else now - session.pinged_s
        strange = not session.greeted and age_s > limits.handshake_s
        outlived_s = 0.0 if limits.max_age_s is None else age_s - limits.max_age_s
        if strange or unanswered_s > limits.keepalive_timeout_s or outlived_s > limits.max_age_grace_s:
            connection.abort()
            return
        if outlived_s > NOTICE_S:
            connection.go_away()
        elif outlived_s > 0:
            connection.give_notice()
        if silent_s > limits.keepalive_s and session.pinged_s is None:
            connection.ping()
        session.give_up_stalled(now - limits.stall_s)
        connection.give_up_unread(now)


class BusyPoll:
    """Keeps the event loop polling for BUSY_POLL_S after a response, where that pays. Lives on the event loop.

    Waking a thread that sleeps in epoll takes longer on a virtual machine than answering a request. A pending callback makes
    the loop poll its sockets without sleeping. With many requests in flight it sleeps, and later arrivals share a batch.
    """

    __slots__ = ("_call_soon", "_clock", "_passed_by", "_polls", "_until", "_worth")

    def __init__(self, call_soon: Callable[[Callable[[], None]], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._call_soon = call_soon
        self._clock = clock
        self._until = 0.0
        self._polls = False
        self._worth = 0
        self._passed_by = 0

    def answered(self, *, alone: bool) -> None:
        """Count a response that was written `alone` or together with others."""
        if not alone:
            self._until = 0.0
            return
        if self._polls:
            self._until = self._clock() + BUSY_POLL_S
            self._worth = min(self._worth + 1, MAX_WORTH)
            return
        self._passed_by += 1
        if self._worth or self._passed_by >= TRY_EVERY:
            self._passed_by = 0
            self._polls = True
            self._until = self._clock() + BUSY_POLL_S
            self._call_soon(self._look)

    def _look(self) -> None:
        if self._clock() < self._until:
            self._call_soon(self._look)
        else:
            self._polls = False
            self._worth = max(0, self._worth - FAILURE)
