"""One listening port that serves an ASGI application with uvicorn's protocol, on the running event loop.

uvicorn's own Server is not used: it takes over the process's signals, looks ten times a second whether it should end, and ends
the process where it cannot listen.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
from collections.abc import Sequence
from email.utils import formatdate
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState

from serve.http.connection import HttpConnection
from serve.http.options import HttpLimits
from serve.transports.transport import BindError, address_of

BACKLOG = 512
NOTICE_S = 1.0  # for connections in use to get an answer
CLOSE = (b"connection", b"close")


class HttpServer:
    """Serves an application on host:port."""

    def __init__(
        self,
        app: Any,
        host: str,
        port: int,
        *,
        limits: HttpLimits,
        option: str = "--http-port",
        tls: ssl.SSLContext | None = None,
        listening: Sequence[socket.socket] = (),
    ) -> None:
        """A server that does not listen yet.

        Args:
            app: an ASGI application.
            host: a name or address of this machine.
            port: 0 finds a free one.
            limits: what clients may take.
            option: names the port in the text of a BindError.
            tls: with certificate and key loaded; None leaves it plain.
            listening: sockets that another process listens on as well, in place of host and port.
        """
        self._listening = listening
        self._tls = tls
        self._host, self._port, self._option, self._limits = host, port, option, limits
        self._config = Config(
            app,
            http=HttpConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=logging.ERROR,  # what is no HTTP is answered, not logged: anybody could fill the log with it
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=limits.keep_alive_s,  # type: ignore[arg-type]  # (it is handed to call_later, which takes both)
            h11_max_incomplete_event_size=limits.max_header_bytes,
        )
        self._state = ServerState()
        self._servers: list[asyncio.Server] = []
        self._clock: asyncio.TimerHandle | None = None
        self._is_leaving = False
        self._leave_by_s = 0.0  # on the loop's clock: when the last answer must have been read, once it stops

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._state.connections)

    async def start(self) -> int:
        """Listen, and return the port.

        Raises:
            BindError: the address is in use, not this machine's, or not allowed.
        """
        self._config.load()
        try:
            await self._listen(asyncio.get_running_loop())
        except (OSError, OverflowError, UnicodeError) as error:
            number = getattr(error, "errno", None) or 0
            # asyncio wraps the system's reason in words of its own; names that cannot be resolved have negative numbers.
            reason = os.strerror(number) if number > 0 else str(getattr(error, "strerror", None) or error)
            raise BindError(
                f"cannot listen on {address_of(self._host, self._port)}: {reason}; "
                f"choose another {self._option} (0 finds a free one) or --host"
            ) from None
        self._tell_time()
        return int(self._servers[0].sockets[0].getsockname()[1])

    async def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        header_s = None if self._tls is None else self._limits.header_s
        given: list[dict[str, Any]] = [{"sock": one} for one in self._listening]
        for where in given or [{"host": self._host, "port": self._port}]:
            self._servers.append(
                await loop.create_server(
                    self._connection, **where, backlog=BACKLOG, ssl=self._tls, ssl_handshake_timeout=header_s
                )
            )

    async def give_notice(self) -> None:
        """Take no new connections, and end the others with their next answer, which says so.

        Where the next request of an idle one crosses its end, a proxy does not try it anew: it cannot know what became of it.
        """
        for server in self._servers:
            server.close()
        self._is_leaving = True
        self._state.default_headers.append(CLOSE)
        if self._state.connections:
            await asyncio.sleep(NOTICE_S)

    async def stop(self, grace_s: float) -> None:
        """Take no new connections, give requests in flight `grace_s` seconds to be answered, and to be read, then close.

        Called again, it gives requests the time that is over first, and answers the time that is over last.
        """
        if not self._servers:
            return
        loop = asyncio.get_running_loop()
        self._leave_by_s = max(self._leave_by_s, loop.time() + grace_s)
        for server in self._servers:
            server.close()
        if self._clock is not None:
            self._clock.cancel()
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._state.tasks:
            await asyncio.wait(set(self._state.tasks), timeout=grace_s)
        left = set(self._state.tasks)
        for task in left:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*left, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._leave_by_s):
                for connection in self._open():
                    connection.tell_when_read()
                for connection in self._open():
                    await connection.flow.drain()
        for connection in self._open():
            connection.transport.close()

    def _open(self) -> list[HttpConnection]:
        """The connections that have a transport."""
        return [one for one in self._state.connections if isinstance(one, HttpConnection) and one.transport is not None]

    def _connection(self) -> HttpConnection:
        return HttpConnection(self._config, self._state, self._limits)

    def _tell_time(self) -> None:
        """The Date header, written once a second rather than once an answer."""
        date = (b"date", formatdate(usegmt=True).encode())
        # In the same list, which those that are being answered have already.
        self._state.default_headers[:] = [date, CLOSE] if self._is_leaving else [date]
        self._clock = asyncio.get_running_loop().call_later(1.0, self._tell_time)
