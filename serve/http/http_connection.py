"""One HTTP/1.1 connection: uvicorn's, with limits of the time and memory that a client may take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from halfserve.serve.engine.errors import UnavailableError
from halfserve.serve.http.http_options import MOMENT_S, HttpLimits, memory_of
from halfserve.serve.http.responses import dump_json, http_status
from halfserve.serve.http.routing.error_forms import in_form
from halfserve.serve.http.routing.operations import JSON_TYPE
from halfserve.serve.http.unread_answer import LARGE_BYTES, PieceTransport, TimeLimit, UnreadAnswer
from halfserve.serve.security.memory_budget import MemoryBudget
from halfserve.serve.transports.read_scheduler import SMALL_BYTES, ReadScheduler
from halfserve.serve.transports.task_turns import task_turns

# h11 takes 10 us and more for each event, and 256 KiB read at once may be 43,000 chunks of a byte. Chunks of 4 KiB
# and more, as ordinary clients send them, all fit into one turn.
EVENTS = 64
TASK_BYTES = SMALL_BYTES + 1  # what input counts at least: it may begin a request, whose task costs more than a large read
LENGTHS = {b"content-length", b"transfer-encoding"}
NOT_HTTP = "the request is not HTTP/1.1 as this server reads it; check its line, headers and lengths"
CUT_OFF = UnavailableError("the server ended before it could answer; send the request again, to another server or later")


class HttpConnection(H11Protocol):
    """Closes on clients that send nothing, that send headers too slowly, or that never read their answer.

    If a client is refused while it sends a body, only this side is closed, and the rest of the body is dropped for `stall_s`: a
    closed socket would answer it with a reset, and many clients ignore the answer then.
    """

    conn: EventTurns
    flow: HeldFlow
    pieces: PieceTransport
    unread: UnreadAnswer

    def __init__(
        self, config: Config, state: ServerState, limits: HttpLimits, budget: MemoryBudget, scheduler: ReadScheduler
    ) -> None:
        super().__init__(config, state, {})
        self._scheduler = scheduler
        self.conn = EventTurns(h11.SERVER, limits.max_header_bytes)
        self._limits = limits
        self._waits = False  # whether it waits for its turn to read
        self._has_answered = False  # while an answer ends: the next request, if it has come, takes a turn of its own
        self._overdue = TimeLimit(self.loop)  # until the headers of a request are complete
        self._share = budget.share(is_known=True, press=self._press)
        self._leaving: asyncio.TimerHandle | None = None  # the client's end
        self._drops = False  # whether further input is dropped

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.pieces = PieceTransport(
            cast("asyncio.Transport", transport), task_turns(), self.pause_writing, self.resume_writing
        )
        super().connection_made(self.pieces)
        self.flow = HeldFlow(self.transport)
        self.unread = UnreadAnswer(self.transport, self.loop, self._limits, self._share, self._count)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._share.close()
        self._overdue.cancel()
        self.unread.close()
        self.pieces.drop()
        if self._leaving is not None:
            self._leaving.cancel()
        if self.cycle is not None:
            self.cycle.transport = self.transport  # instead of what leads back here
        super().connection_lost(exc)

    @property
    def window_bytes(self) -> int:
        """Bytes to read at once, such that time suffices, and memory if all connections bring as many."""
        return self._scheduler.receive_bytes(self, self._share.window_bytes)

    def data_received(self, data: bytes | memoryview) -> None:
        """Parse bytes, now or in a later turn, unless they belong to a refused body."""
        if self._drops:
            return
        if self._scheduler.must_wait(self, max(len(data), TASK_BYTES)):
            self.conn.receive_data(data)  # type: ignore[arg-type]  # (h11 takes both)
            self._wait_for_turn()
        else:
            super().data_received(data)  # type: ignore[arg-type]  # (uvicorn hands them to h11)
        self._count()

    def handle_events(self) -> None:
        """Handle events, and start or stop the time limits of incomplete headers and of an answered, incomplete request."""
        if self._has_answered and self.conn.buffered_bytes:
            self._wait_for_turn()
            return
        self.conn.begin_turn()
        super().handle_events()
        if self.conn.has_more:
            self._wait_for_turn()
        if self.cycle is not None and self.cycle.transport is self.transport:
            self.cycle.transport = cast("asyncio.Transport", _Answering(self))
        begun = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if not begun:
            self._overdue.cancel()
        elif not self._overdue.is_running:
            self._await_headers()
        if not begun and self._is_answered() and self.timeout_keep_alive_task is None:
            # uvicorn starts this timer only with an answer, and more of the request may follow the answer.
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def read_on(self) -> None:
        """Handle the received bytes that waited for their turn."""
        self._waits = False
        if self.transport.is_closing():
            return
        if not self._drops:
            self.handle_events()
            self._count()
        if not (self._waits or self.transport.is_closing()):
            self.flow.release()

    def _wait_for_turn(self) -> None:
        if not (self._waits or self.transport.is_closing()):
            self._waits = True
            self.flow.hold()
            self._scheduler.wait(self)

    def on_response_complete(self) -> None:
        """Start the time limit of reading the answer."""
        self._has_answered = True
        super().on_response_complete()
        self._has_answered = False
        self.unread.expect_reading()

    def pause_writing(self) -> None:
        """Start the time limit of reading what is written so far: an answer may be written in pieces."""
        super().pause_writing()
        self.unread.expect_reading()

    def resume_writing(self) -> None:
        if self.pieces.go_on():
            return
        super().resume_writing()
        self.unread.let_go()
        self._count()
        if not self._is_answered():
            self.unread.stop_waiting()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, after a moment to read what has arrived."""
        self.timeout_keep_alive_task = self.loop.call_later(MOMENT_S, super().timeout_keep_alive_handler)

    def leave(self) -> None:
        """Close; if the client is still sending, close only this side and drop the rest."""
        if self.conn.their_state is not h11.SEND_BODY:
            self.transport.close()
            return
        if self._leaving is None:
            self._drops = True
            self._leaving = self.loop.call_later(self._limits.stall_s, self.transport.close)
            if self.transport.can_write_eof():
                self.transport.write_eof()

    def tell_when_read(self) -> None:
        """Make `flow.drain` wait until the client has read everything, or has disconnected."""
        self.transport.set_write_buffer_limits(0)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002  (uvicorn hands its own text over)
        """Answer invalid HTTP with a JSON error, unless it follows a request that is still being answered."""
        if self.cycle is not None and not (self.cycle.more_body or self.cycle.response_complete):
            self._drops, self.cycle.keep_alive = True, False
            return
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            self._write_error(400, {"error": NOT_HTTP})
        self._drops = True
        self.transport.close()

    def cut_off(self) -> bool:
        """End the request in flight: answer it with an error, or break off its answer if that has begun.

        Returns whether there was one. Its application has to be cancelled; what it still sends is dropped.
        """
        cycle = self.cycle
        if cycle is None or cycle.disconnected or cycle.response_complete:
            return False
        if not cycle.response_started:
            status, text, _ = http_status(CUT_OFF)
            self._write_error(*in_form(cycle.scope, status, text, CUT_OFF))
        cycle.disconnected = True
        self.leave()
        return True

    def _write_error(self, status: int, content: dict[str, Any]) -> None:
        """Write a whole response of JSON, after which the connection has to be closed."""
        body = dump_json(content).encode()
        headers: list[Any] = [
            (b"content-type", JSON_TYPE.encode()),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        is_head = self.cycle is not None and self.cycle.scope["method"] == "HEAD"
        response = h11.Response(status_code=status, headers=headers)
        for event in (response, h11.Data(data=b"" if is_head else body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")

    def _is_answered(self) -> bool:
        return self.cycle is not None and self.cycle.response_complete and not self.transport.is_closing()

    def _await_headers(self) -> None:
        self._overdue.start(self._limits.header_s, self.transport.abort)

    def _press(self) -> None:
        """Free memory: abort a client that has sent much ahead, or that reads too slowly."""
        if self._share.excess and self.conn.buffered_bytes > LARGE_BYTES:
            self._share.close()
            self.transport.abort()
        else:
            self.unread.press()

    def _count(self) -> None:
        """Count what the client has sent ahead and has not read, if it is much."""
        ahead = self.conn.buffered_bytes
        unread = self.unread.size if self.flow.write_paused else 0
        self._share.resize(memory_of((ahead if ahead > LARGE_BYTES else 0) + unread))


class SocketReader(asyncio.BufferedProtocol):
    """Reads a connection's socket in pieces that fit into the memory budget.

    An asyncio.Protocol receives up to 256 KiB at once, before it can refuse them: 225 MiB from 900 connections.
    """

    def __init__(self, connection: HttpConnection, received: memoryview, left: Callable[[asyncio.BaseProtocol], None]) -> None:
        """Give received bytes to `connection`, and call `left` when it is lost.

        All readers share the buffer `received`: its bytes are consumed before the next socket is read.
        """
        self._connection, self._received, self._left = connection, received, left

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connection.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)
        self._left(self)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002  (the signature is asyncio's)
        return self._received[: self._connection.window_bytes]

    def buffer_updated(self, nbytes: int) -> None:
        self._connection.data_received(self._received[:nbytes])

    def eof_received(self) -> None:
        self._connection.pieces.write_all()  # the transport closes
        self._connection.eof_received()

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()


class _Answering:
    """Replaces uvicorn's transport while it answers a request, whose body may be incomplete."""

    def __init__(self, connection: HttpConnection) -> None:
        self._connection = connection
        self.write = connection.unread.write
        self.is_closing = connection.transport.is_closing

    def close(self) -> None:
        self._connection.leave()


class EventTurns(h11.Connection):
    """Returns a limited number of events per turn of the event loop, and refuses a request with two lengths.

    So a body in a million chunks of a byte does not block other requests.
    """

    has_more = False  # there may be more events, in the next turn
    _left = EVENTS

    @property
    def buffered_bytes(self) -> int:
        """Received bytes that wait for their turn, or for the answer to an earlier request."""
        return len(self._receive_buffer)

    def begin_turn(self) -> None:
        self.has_more, self._left = False, EVENTS

    def next_event(self) -> h11.Event | type[h11.NEED_DATA | h11.PAUSED]:
        """The next event, as in h11.

        Raises:
            h11.RemoteProtocolError: invalid HTTP/1.1, or both Content-Length and Transfer-Encoding, which allow request
                smuggling through a proxy (RFC 9112, 6.3).
        """
        if not self._left:
            self.has_more = True
            return h11.NEED_DATA
        self._left -= 1
        event = super().next_event()
        if isinstance(event, h11.Request) and {name for name, _ in event.headers} >= LENGTHS:
            raise h11.RemoteProtocolError("Content-Length beside Transfer-Encoding")
        return event


class HeldFlow(FlowControl):
    """Stops reading while received bytes wait for their turn."""

    _is_full = _is_held = False

    def pause_reading(self) -> None:
        """Called by uvicorn when its buffer is full."""
        self._is_full = True
        super().pause_reading()

    def resume_reading(self) -> None:
        """Called by uvicorn when its buffer has room."""
        self._is_full = False
        if not self._is_held:
            super().resume_reading()

    def hold(self) -> None:
        self._is_held = True
        super().pause_reading()

    def release(self) -> None:
        """Continue reading, unless uvicorn's buffer is full."""
        self._is_held = False
        if not self._is_full:
            super().resume_reading()
