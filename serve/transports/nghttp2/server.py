"""The fast transport: gRPC over libnghttp2 on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket as sockets
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path

from ngh2.exceptions import NGH2Error

from serve.protocol.service import Service
from serve.security.gate import Gate
from serve.security.memory_budget import DEFAULT_BYTES, MemoryBudget
from serve.transports.limits import TransportLimits
from serve.transports.listener import ConnectionLimit, Listener
from serve.transports.listening import Address, listen
from serve.transports.nghttp2.calls import Calls
from serve.transports.nghttp2.connection import GrpcConnection
from serve.transports.nghttp2.linger import Linger
from serve.transports.nghttp2.reading_turns import ReadingTurns
from serve.transports.seldom import Seldom

logger = logging.getLogger(__name__)

RECEIVE_BYTES = 2**18  # taken from a socket at a time
NOTICE_S = 1.0  # for clients to read that they are to go elsewhere
FLUSH_S = 1.0  # for the last bytes of an ended connection to leave
STOOD_STILL_S = 1.0  # a timer that comes so late: the process was stopped, or its machine slept


class Nghttp2Server:
    """Serves a Service on host:port."""

    def __init__(
        self,
        service: Service,
        host: str,
        port: int,
        *,
        limits: TransportLimits | None = None,
        tls: ssl.SSLContext | None = None,
        gate: Gate | None = None,
        budget: MemoryBudget | None = None,
        socket: Path | None = None,
        option: str = "--grpc-port",
        listening: Sequence[sockets.socket] = (),
        connections: ConnectionLimit | None = None,
    ) -> None:
        """A server that does not listen yet.

        Args:
            service: what is served.
            host: a name or address of this machine.
            port: 0 finds a free one.
            limits: what one client may take.
            tls: with certificate and key loaded; HTTP/2 is announced in it (ALPN).
            gate: says who may call what; None lets everybody in.
            budget: the memory that all clients may take; None makes one of the usual size for this transport alone.
            socket: the path of a Unix socket to listen on, in place of host and port; only this user can open it.
            option: names the port in the text of a BindError.
            listening: sockets that another process listens on as well, in place of all that; they stay there when this server
                ends.
            connections: a bound on those of all servers of this process.
        """
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
        self.reading_turns = ReadingTurns(lambda read: asyncio.get_running_loop().call_soon(read))
        self._connections: set[GrpcConnection] = set()
        self._unflushed: set[GrpcConnection] = set()
        self._is_one = False  # what is to be flushed
        self._changed = asyncio.Event()
        self._listener: Listener | None = None  # once it listens
        self._closing = False
        self._leave_by_s = 0.0  # on the loop's clock: when the last answer must have been read, once it is closing
        self._sweeping: asyncio.TimerHandle | None = None
        self._linger: Linger | None = None  # once it listens
        self._told_broken, self._told_unread = Seldom(logger.info), Seldom(logger.warning)
        service.tell("connections", lambda: len(self._connections))
        service.tell("calls", lambda: sum(connection.calls for connection in self._connections))

    async def start(self) -> int:
        """Listen, and return the port.

        Raises:
            BindError: the address is in use, not this machine's, or not allowed.
        """
        loop = asyncio.get_running_loop()
        self._linger = Linger(loop.call_soon)
        bound = self._listening or listen(Address(self._host, self._port, self._option, self._socket))
        self._listener = Listener(
            self.connection,
            most=self._limits.max_connections,
            shared=self._shared,
            tls=None if self._socket is not None else self._tls,
            handshake_s=self._limits.handshake_s,
        )
        self._listener.begin(bound)
        self._sweep_later(loop)
        return 0 if self._socket is not None else self._listener.port

    async def give_notice(self) -> None:
        """Take no new connections, and have clients take their next calls elsewhere; those on their way are still served."""
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._connections):
            connection.give_notice()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(NOTICE_S):
                await self._until(lambda: all(connection.goes for connection in self._connections))

    async def stop(self, grace_s: float) -> None:
        """Take no new calls, give those in flight `grace_s` seconds to end and their answers to be read, then close.

        Called again, it gives calls the time that is over first, and answers the time that is over last.
        """
        if self._listener is None:
            return
        self._closing = True
        self._leave_by_s = max(self._leave_by_s, asyncio.get_running_loop().time() + grace_s)
        self._listener.close()
        if self._socket is not None and not self._listening:
            self._socket.unlink(missing_ok=True)
        if self._sweeping is not None:
            self._sweeping.cancel()
        for connection in list(self._connections):
            connection.go_away()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._until(lambda: not any(connection.calls for connection in self._connections))
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
        """The server's side of a new connection, for whatever carries its bytes."""
        return GrpcConnection(self, self._calls.route, self._limits)

    def connected(self, connection: GrpcConnection) -> None:
        """Take note of a new connection."""
        self._connections.add(connection)

    def disconnected(self, connection: GrpcConnection) -> None:
        """Forget a connection."""
        self._connections.discard(connection)
        self._unflushed.discard(connection)
        if self._listener is not None:
            self._listener.left(connection)
        self._changed.set()

    def broken(self, error: NGH2Error) -> None:
        """Take note that a client has broken HTTP/2."""
        self._told_broken.say("a connection broke HTTP/2: %s", error)

    def unread(self, size: int) -> None:
        """Take note of a connection that ends with `size` bytes of answers which its client has not read."""
        self._told_unread.say("a connection was closed: its client left %d bytes of answers unread", size)

    def flush_soon(self, connection: GrpcConnection) -> None:
        """Flush at the end of this turn of the loop, once for all that is answered until then."""
        self._is_one = not self._unflushed
        if self._is_one:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unflushed.add(connection)

    def sent(self, connection: GrpcConnection) -> None:  # noqa: ARG002  (all are looked at)
        """Whoever waits for answers to be read looks again."""
        self._changed.set()

    def _reroute(self) -> None:
        """Whoever was let in by its headers is asked for them again."""
        for connection in self._connections:
            connection.reroute()

    async def _until(self, reached: Callable[[], bool]) -> None:
        """Wait until what is asked for is true; it is asked whenever a connection has written something or ended."""
        while not reached():
            self._changed.clear()
            await self._changed.wait()

    def _flush(self) -> None:
        connections, self._unflushed = self._unflushed, set()
        for connection in connections:
            connection.flush()
        self._changed.set()
        if self._linger is not None:
            self._linger.answered(alone=self._is_one)

    def _sweep_later(self, loop: asyncio.AbstractEventLoop) -> None:
        seconds = self._limits.sweep_s
        self._sweeping = loop.call_later(seconds, self._sweep, loop.time() + seconds)

    def _sweep(self, due_s: float) -> None:
        """Look after time, unless it stood still: the clock comes before the sockets then, and clients may have sent since."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if now - due_s < STOOD_STILL_S:
            self._look_after_time(now)
        self._sweep_later(loop)

    def _look_after_time(self, now: float) -> None:
        """Give up strangers, the silent, the stalled and the old."""
        limits = self._limits
        for connection in list(self._connections):
            age_s, silent_s = now - connection.opened_s, now - connection.heard_s
            unanswered_s = 0.0 if connection.pinged_s is None else now - connection.pinged_s
            strange = not connection.greeted and age_s > limits.handshake_s
            outlived_s = 0.0 if limits.max_age_s is None else age_s - limits.max_age_s
            if strange or unanswered_s > limits.keepalive_timeout_s or outlived_s > limits.max_age_grace_s:
                connection.abort()
                continue
            if outlived_s > NOTICE_S:
                connection.go_away()
            elif outlived_s > 0:
                connection.give_notice()
            if silent_s > limits.keepalive_s and connection.pinged_s is None:
                connection.ping()
            connection.give_up_stalled(now - limits.stall_s)
            connection.give_up_unread(now)
        self.budget.look_after(now)
