"""Accept connections within limits.

gRPC clients understand a connection that ends before it begins: the call fails with UNAVAILABLE and the client retries other
addresses, then this one with growing delays. After SETTINGS and GOAWAY it would reconnect 5 to 25 times a second until the
call's deadline, so that excess connections are closed at once.

asyncio's own servers are not used: they report neither connections in the TLS handshake nor EMFILE.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

logger = logging.getLogger(__name__)

ACCEPTED_A_TURN = 4  # most per loop iteration; each takes 0.1 ms, 0.2 with TLS
TURN_S = 0.0005
MAX_HANDSHAKES = 512  # concurrent TLS handshakes, 60 KB each
MAX_LEAVING = 8  # refused connections kept open for the client to read the refusal
LEAVE_S = 0.2  # before closing: a socket closed with unread input sends RST and destroys the refusal
REST_S = 1.0  # before the next accept after EMFILE
GIVE_WAY_S = 0.004  # for another process to accept; a busy event loop turns in less

MAX_LOG_LINES = 10
LOG_PERIOD_S = 60.0


class ConnectionLimit:
    """Connection limit shared by the listeners of a process."""

    def __init__(self, most: float = math.inf, reason: str = "") -> None:
        self.most, self.reason = most, reason  # connections, and why, for the log
        self.open = 0  # connections, TLS handshakes included
        self._handshakes: dict[asyncio.BaseProtocol, Callable[[], object]] = {}  # the oldest first

    def take(self) -> None:
        """Count a connection."""
        self.open += 1

    def release(self) -> None:
        """Count a connection no more."""
        self.open -= 1

    def gives_way(self) -> bool:
        """Return whether another process, which accepts from the same sockets, should have the next connection."""
        return False

    def begin_handshake(self, connection: asyncio.BaseProtocol, drop: Callable[[], object]) -> None:
        """Register a handshake that `drop` aborts. Beyond MAX_HANDSHAKES the oldest, most likely stuck, is aborted."""
        if len(self._handshakes) >= MAX_HANDSHAKES:
            self.drop_oldest()
        self._handshakes[connection] = drop

    def end_handshake(self, connection: asyncio.BaseProtocol) -> None:
        self._handshakes.pop(connection, None)

    def drop_oldest(self) -> bool:
        """Abort the oldest handshake to make room; False if there is none."""
        oldest = next(iter(self._handshakes), None)
        if oldest is None:
            return False
        self._handshakes.pop(oldest)()
        return True


class _Handshake(asyncio.Protocol):
    """Takes the place of a connection until TLS is established, so that a handshake that never ends costs little."""

    def __init__(self, established: Callable[[_Handshake], asyncio.BaseProtocol]) -> None:
        self._established = established

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        connection = self._established(self)
        cast("asyncio.Transport", transport).set_protocol(connection)
        connection.connection_made(transport)


class Listener:
    """Accepts the connections of one server. Lives on the event loop."""

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
        """`make` creates the server's side of a connection, which calls `left` when it is lost.

        `shared` limits the connections of several listeners; `refusal` is sent to a refused connection, unless there is TLS.
        """
        self._make, self._most, self._refusal = make, most, refusal
        self._limit = shared or ConnectionLimit()
        self._tls = tls
        self._handshake_s = None if tls is None else handshake_s
        self._open: set[object] = set()
        self._tasks: set[asyncio.Task[object]] = set()
        self._sockets: list[socket.socket] = []
        self._leaving: set[socket.socket] = set()
        self._log = LogThrottle(logger.warning)
        self._loop = asyncio.get_running_loop()

    @property
    def port(self) -> int:
        """Port of the first socket."""
        return int(self._sockets[0].getsockname()[1])

    def begin(self, sockets: Sequence[socket.socket]) -> None:
        """Take over listening sockets and accept their connections."""
        for one in sockets:
            one.setblocking(False)
            self._sockets.append(one)
            self._loop.add_reader(one, self._accept, one)

    def close(self) -> None:
        """Stop accepting."""
        for one in self._sockets:
            if one.fileno() >= 0:
                self._loop.remove_reader(one)
                one.close()

    def abort(self) -> None:
        """Abort TLS handshakes and close refused connections."""
        for task in list(self._tasks):
            task.cancel()
        for refused in list(self._leaving):
            self._let_go(refused)

    def left(self, connection: object) -> None:
        """Release the place of a closed connection."""
        if connection in self._open:
            self._open.remove(connection)
            self._limit.release()

    def _accept(self, listening: socket.socket) -> None:
        stop = time.monotonic() + TURN_S
        for _ in range(ACCEPTED_A_TURN):
            if self._limit.gives_way():
                self._loop.remove_reader(listening)
                self._loop.call_later(GIVE_WAY_S, self._accept_left, listening)
                return
            if not self._accept_one(listening) or time.monotonic() > stop:
                return

    def _accept_left(self, listening: socket.socket) -> None:
        """Take a connection that no other process has taken meanwhile."""
        if listening.fileno() >= 0:
            self._loop.add_reader(listening, self._accept, listening)
            self._accept_one(listening)

    def _accept_one(self, listening: socket.socket) -> bool:
        """Accept a connection; False if there is none, or that is impossible now."""
        try:
            accepted, _ = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return False
        except OSError as error:
            self._rest(listening, error)
            return False
        if self._has_room():
            self._take(accepted)
        else:
            self._refuse(accepted)
        return True

    def _has_room(self) -> bool:
        if len(self._open) < self._most and self._limit.open < self._limit.most:
            return True
        return self._limit.drop_oldest() and self._has_room()

    def _take(self, accepted: socket.socket) -> None:
        connection = self._make() if self._tls is None else _Handshake(self._established)
        self._open.add(connection)
        self._limit.take()
        if accepted.family != getattr(socket, "AF_UNIX", None):
            with contextlib.suppress(OSError):  # some systems refuse this after the client has gone
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

    def _established(self, handshake: _Handshake) -> asyncio.BaseProtocol:
        """Return the connection that has the place of its handshake from now on."""
        connection = self._make()
        self._open.remove(handshake)
        self._open.add(connection)
        return connection

    def _drop(self, connection: asyncio.BaseProtocol, task: asyncio.Task[object]) -> None:
        self._log.say("a connection that has not finished TLS was closed for another one: %d are open", self._limit.open)
        task.cancel()
        self.left(connection)

    def _settled(self, connection: asyncio.BaseProtocol, accepted: socket.socket, task: asyncio.Task[object]) -> None:
        """Handle the end of connection set-up; TLS handshakes of port scanners fail here."""
        self._tasks.discard(task)
        self._limit.end_handshake(connection)
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            accepted.close()  # the loop may not own it yet
            self.left(connection)
        if error is not None and not isinstance(error, OSError):
            logger.error("a connection could not be taken", exc_info=error)

    def _refuse(self, accepted: socket.socket) -> None:
        is_own = len(self._open) >= self._most
        reason = f"this port takes {self._most}" if is_own else self._limit.reason
        self._log.say("a connection was refused: %d are open, and %s", len(self._open) if is_own else self._limit.open, reason)
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
        """Pause accepting: without free files or memory an immediate retry would spin."""
        self._log.say("connections cannot be accepted: %s; trying again in %g s", error.strerror, REST_S)
        self._loop.remove_reader(listening)
        self._loop.call_later(REST_S, self._resume, listening)

    def _resume(self, listening: socket.socket) -> None:
        if listening.fileno() >= 0:
            self._loop.add_reader(listening, self._accept, listening)


class LogThrottle:
    """Logs the first few lines of each minute and counts the others, so that clients cannot fill the disk."""

    def __init__(self, log: Callable[..., None], clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._begun_s = -LOG_PERIOD_S
        self._count = 0

    def say(self, text: str, *values: object) -> None:
        """Log a line unless there were too many; arguments as for `logger.info`."""
        now_s = self._clock()
        if now_s - self._begun_s >= LOG_PERIOD_S:
            if self._count > MAX_LOG_LINES:
                self._log(
                    "%d lines like these were left out in the last %.0f s", self._count - MAX_LOG_LINES, now_s - self._begun_s
                )
            self._begun_s, self._count = now_s, 0
        self._count += 1
        if self._count <= MAX_LOG_LINES:
            self._log(text, *values)
