"""Accept connections while there is room for them, and refuse the others in a way that clients understand.

gRPC's clients understand a connection that ends before it has begun: the call is UNAVAILABLE, they try the server's other
addresses, and this one later and later. After SETTINGS and GOAWAY they would try again at once, 5 to 25 times a second, until
the call's deadline.

asyncio's own servers are not used: they do not tell of connections that have not finished TLS, nor of such as the system has no
file for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import ssl
from collections.abc import Callable, Sequence
from functools import partial

from serve.transports.seldom import Seldom

logger = logging.getLogger(__name__)

ACCEPTED_A_TURN = 4  # of the event loop; each takes 0.1 ms, with TLS 0.2
MAX_HANDSHAKES = 512  # of TLS, at a time; each takes 60 KB
MAX_LEAVING = 8  # refused, and still open to be read
LEAVE_S = 0.2  # for a refusal to be read: a socket that is closed with something unread resets its connection
REST_S = 1.0  # where the system has no file for a connection

Left = Callable[[asyncio.BaseProtocol], None]


class ConnectionLimit:
    """How many connections all listeners of a process may have.

    Attributes:
        most: of them.
        reason: why there can be no more, for the log.
        open: those that there are, those that have not finished TLS among them.
    """

    def __init__(self, most: float = math.inf, reason: str = "") -> None:
        self.most, self.reason, self.open = most, reason, 0
        self._handshakes: dict[asyncio.BaseProtocol, Callable[[], object]] = {}  # the oldest first

    def begin_handshake(self, connection: asyncio.BaseProtocol, drop: Callable[[], object]) -> None:
        """Count a handshake, which `drop` ends; where there are too many, the oldest one is ended: it is most likely stuck."""
        if len(self._handshakes) >= MAX_HANDSHAKES:
            self.drop_oldest()
        self._handshakes[connection] = drop

    def end_handshake(self, connection: asyncio.BaseProtocol) -> None:
        """It was finished, or has failed."""
        self._handshakes.pop(connection, None)

    def drop_oldest(self) -> bool:
        """Give a connection's place to another one; False where all have finished their handshake."""
        oldest = next(iter(self._handshakes), None)
        if oldest is None:
            return False
        self._handshakes.pop(oldest)()
        return True


class Listener:
    """Those of one server. Lives on the event loop."""

    def __init__(
        self,
        make: Callable[[], asyncio.BaseProtocol],
        *,
        most: int,
        shared: ConnectionLimit | None,
        refusal: bytes = b"",
        tls: ssl.SSLContext | None = None,
        handshake_s: float | None = None,
    ) -> None:
        """One that does not listen yet.

        Args:
            make: the server's side of a connection, which calls `left` when it is lost.
            most: connections at a time.
            shared: a bound on those of several listeners.
            refusal: what a connection is told for which there is no room, where there is no TLS.
            tls: for all of them.
            handshake_s: seconds that a client has for TLS.
        """
        self._make, self._most, self._refusal = make, most, refusal
        self._limit = shared or ConnectionLimit()
        self._tls = tls
        self._handshake_s = None if tls is None else handshake_s
        self._open: set[asyncio.BaseProtocol] = set()
        self._tasks: set[asyncio.Task[object]] = set()
        self._sockets: list[socket.socket] = []
        self._leaving: set[socket.socket] = set()
        self._told = Seldom(logger.warning)
        self._loop = asyncio.get_running_loop()

    @property
    def port(self) -> int:
        """Of the first socket."""
        return int(self._sockets[0].getsockname()[1])

    def begin(self, sockets: Sequence[socket.socket]) -> None:
        """Accept what comes on sockets that listen; they are this listener's from now on."""
        for one in sockets:
            one.setblocking(False)
            self._sockets.append(one)
            self._loop.add_reader(one, self._accept, one)

    def close(self) -> None:
        """Accept no more."""
        for one in self._sockets:
            if one.fileno() >= 0:
                self._loop.remove_reader(one)
                one.close()

    def abort(self) -> None:
        """Give up on those that have not finished TLS, and close those that were refused."""
        for task in list(self._tasks):
            task.cancel()
        for refused in list(self._leaving):
            self._let_go(refused)

    def left(self, connection: asyncio.BaseProtocol) -> None:
        """A connection is over."""
        if connection in self._open:
            self._open.remove(connection)
            self._limit.open -= 1

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTED_A_TURN):
            try:
                accepted, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:
                self._rest(listening, error)
                return
            if self._has_room():
                self._take(accepted)
            else:
                self._refuse(accepted)

    def _has_room(self) -> bool:
        if len(self._open) < self._most and self._limit.open < self._limit.most:
            return True
        return self._limit.drop_oldest() and self._has_room()

    def _take(self, accepted: socket.socket) -> None:
        connection = self._make()
        self._open.add(connection)
        self._limit.open += 1
        if accepted.family != getattr(socket, "AF_UNIX", None):
            with contextlib.suppress(OSError):  # some systems refuse that where the client has gone already
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        accepted.setblocking(False)
        connecting = self._loop.connect_accepted_socket(
            lambda: connection, accepted, ssl=self._tls, ssl_handshake_timeout=self._handshake_s
        )
        task: asyncio.Task[object] = self._loop.create_task(connecting)
        self._tasks.add(task)
        task.add_done_callback(partial(self._settled, connection, accepted))
        if self._tls is not None:
            self._limit.begin_handshake(connection, partial(self._drop, connection, task))

    def _drop(self, connection: asyncio.BaseProtocol, task: asyncio.Task[object]) -> None:
        self._told.say("a connection that has not finished TLS was closed for another one: %d are open", self._limit.open)
        task.cancel()
        self.left(connection)

    def _settled(self, connection: asyncio.BaseProtocol, accepted: socket.socket, task: asyncio.Task[object]) -> None:
        """A connection is there, or its client has failed at TLS, as strangers do."""
        self._tasks.discard(task)
        self._limit.end_handshake(connection)
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            accepted.close()  # which the loop may not have taken yet
            self.left(connection)
        if error is not None and not isinstance(error, OSError):
            logger.error("a connection could not be taken", exc_info=error)

    def _refuse(self, accepted: socket.socket) -> None:
        is_own = len(self._open) >= self._most
        reason = f"this port takes {self._most}" if is_own else self._limit.reason
        self._told.say("a connection was refused: %d are open, and %s", len(self._open) if is_own else self._limit.open, reason)
        if self._refusal and self._tls is None:
            with contextlib.suppress(OSError):
                accepted.setblocking(False)
                accepted.send(self._refusal)
                accepted.shutdown(socket.SHUT_WR)
                if len(self._leaving) < MAX_LEAVING:
                    self._leaving.add(accepted)
                    self._loop.call_later(LEAVE_S, self._let_go, accepted)
                    return
        accepted.close()

    def _let_go(self, refused: socket.socket) -> None:
        self._leaving.discard(refused)
        refused.close()

    def _rest(self, listening: socket.socket, error: OSError) -> None:
        """Let connections wait where the system has no file or memory for them: trying again at once would take all time."""
        self._told.say("connections cannot be accepted: %s; trying again in %g s", error.strerror, REST_S)
        self._loop.remove_reader(listening)
        self._loop.call_later(REST_S, self._resume, listening)

    def _resume(self, listening: socket.socket) -> None:
        if listening.fileno() >= 0:
            self._loop.add_reader(listening, self._accept, listening)
