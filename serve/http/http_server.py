"""One listening port that serves an ASGI application on the running event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Sequence
from email.utils import formatdate

from halfserve.serve.engine.errors import UnavailableError
from halfserve.serve.http.guards import App
from halfserve.serve.http.http_connection import HttpConnection, PortState
from halfserve.serve.http.http_options import HttpLimits
from halfserve.serve.security.memory_budget import DEFAULT_BYTES, MemoryBudget
from halfserve.serve.transports.listener import ConnectionLimit, Listener
from halfserve.serve.transports.listening import Address, listen
from halfserve.serve.transports.read_scheduler import read_scheduler
from halfserve.serve.transports.task_turns import task_turns

logger = logging.getLogger(__name__)

REFUSED = b'{"error":"too many connections are open; try again later"}'
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(REFUSED), REFUSED)
)
NOTICE_S = 1.0  # for connections in use to get their next answer
CUT_OFF = UnavailableError("the server ended before it could answer; send the request again, to another server or later")
CLOSE = (b"connection", b"close")
RECEIVE_BYTES = 2**18  # read from a socket at a time, at most


class HttpServer:
    """Serves an application on host:port."""

    def __init__(
        self,
        app: App,
        host: str,
        port: int,
        *,
        limits: HttpLimits,
        budget: MemoryBudget | None = None,
        option: str = "--http-port",
        tls: ssl.SSLContext | None = None,
        listening: Sequence[socket.socket] = (),
        connections: ConnectionLimit | None = None,
    ) -> None:
        """Make a server that does not listen yet.

        Args:
            app: an ASGI application.
            host: a name or address of this machine.
            port: 0 finds a free one.
            limits: limits of each client.
            budget: the memory of all clients; None makes a default one for this port alone.
            option: names the port in the text of a BindError.
            tls: TLS context with certificate and key loaded; None leaves the port plain.
            listening: inherited sockets, in place of host and port.
            connections: a limit of all servers of this process together.
        """
        self._listening, self._shared = listening, connections
        self._tls = tls
        self._host, self._port, self._option, self._limits = host, port, option, limits
        self._state = PortState(
            app=app,
            limits=limits,
            budget=budget or MemoryBudget(DEFAULT_BYTES),
            scheduler=read_scheduler(),
            turns=task_turns(),
            received=memoryview(bytearray(RECEIVE_BYTES)),
            left=self._left,
        )
        self._listener: Listener | None = None  # once it listens
        self._clock: asyncio.TimerHandle | None = None
        self._is_leaving = False
        self._leave_by_s = 0.0  # on the loop's clock: the deadline for reading the last answer

    @property
    def connections(self) -> int:
        return len(self._state.connections)

    async def start(self) -> int:
        """Listen, and return the port. Raises BindError: the address is in use, not this machine's, or not allowed."""
        bound = self._listening or listen(Address(self._host, self._port, self._option))
        self._listener = Listener(
            lambda: HttpConnection(self._state),
            most=self._limits.max_connections,
            shared=self._shared,
            refusal=REFUSAL,
            tls=self._tls,
            handshake_s=self._limits.header_s,
        )
        self._listener.begin(bound)
        self._tell_time()
        return self._listener.port

    def _left(self, connection: asyncio.BaseProtocol) -> None:
        if self._listener is not None:
            self._listener.left(connection)

    async def give_notice(self) -> None:
        """Accept no new connections, and end the others with their next answer, which announces it.

        Idle connections stay open: a proxy does not retry a request that crosses the end of its connection.
        """
        if self._listener is not None:
            self._listener.close()
        self._is_leaving = True
        self._state.headers.append(CLOSE)
        if self._state.connections:
            await asyncio.sleep(NOTICE_S)

    async def stop(self, grace_s: float) -> None:
        """Accept no new connections, give those in flight `grace_s` seconds to be answered and read, then close.

        Of several calls, the earliest end applies to requests, and the latest to answers.
        """
        if self._listener is None:
            return
        loop = asyncio.get_running_loop()
        self._leave_by_s = max(self._leave_by_s, loop.time() + grace_s)
        self._listener.close()
        if self._clock is not None:
            self._clock.cancel()
        for connection in self._open():
            connection.shut_down()
        if self._state.tasks:
            await asyncio.wait(set(self._state.tasks), timeout=grace_s)
        left = set(self._state.tasks)
        if left and (cut := sum([connection.fail(CUT_OFF) for connection in self._open()])):
            logger.warning("HTTP requests that were not answered before the server ended: %d", cut)
        for task in left:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*left, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._leave_by_s):
                for connection in self._open():
                    connection.writer.wait_for_all()
                for connection in self._open():
                    await connection.writer.drain()
        self._listener.abort()
        for connection in self._open():
            connection.writer.close()

    def _open(self) -> list[HttpConnection]:
        return list(self._state.connections)

    def _tell_time(self) -> None:
        """Write the Date header, once a second rather than once an answer."""
        date = (b"date", formatdate(usegmt=True).encode())
        self._state.headers[:] = [date, CLOSE] if self._is_leaving else [date]
        self._clock = asyncio.get_running_loop().call_later(1.0, self._tell_time)
