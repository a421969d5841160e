"""One HTTP/1.1 connection: h11 parses requests, and an ASGI application answers them within limits of time and memory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from http import HTTPStatus
from typing import Any, cast

import h11

from halfserve.serve.http.answer_writer import LARGE_BYTES, AnswerWriter, TimeLimit
from halfserve.serve.http.guards import App, peer_of
from halfserve.serve.http.http_options import HttpLimits, memory_of
from halfserve.serve.http.request_parser import CLIENT_GONE, RequestParser, described
from halfserve.serve.http.responses import dump_json, http_status
from halfserve.serve.http.routing.error_forms import in_form
from halfserve.serve.security.client_limits import network_of
from halfserve.serve.security.memory_budget import MemoryBudget
from halfserve.serve.transports.read_scheduler import SMALL_BYTES, ReadScheduler
from halfserve.serve.transports.task_turns import TaskTurns

logger = logging.getLogger(__name__)

# h11 takes 10 us and more for each event, and 256 KiB read at once may be 43,000 chunks of a byte. Chunks of 4 KiB
# and more, as ordinary clients send them, all fit into one turn.
EVENTS = 64
TASK_BYTES = SMALL_BYTES + 1  # what input counts at least: it may begin a request, whose task costs more than a large read
BODY_BYTES = 65_536  # size of a body that waits for the application; reading pauses above it
NOT_HTTP = "the request is not HTTP/1.1 as this server reads it; check its line, headers and lengths"
REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}
ERROR_HEAD = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"


@dataclass(frozen=True, kw_only=True, eq=False)
class PortState:
    """State that the connections of one port share.

    Attributes:
        app: ASGI application that answers.
        received: buffer to receive into; its bytes are consumed before the next socket is read.
        left: called with a connection that is lost.
        headers: headers of every answer.
        connections: open connections.
        tasks: tasks of the requests in flight.
    """

    app: App
    limits: HttpLimits
    budget: MemoryBudget
    scheduler: ReadScheduler
    turns: TaskTurns
    received: memoryview
    left: Callable[[asyncio.BaseProtocol], None]
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    connections: set[HttpConnection] = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


class HttpConnection(asyncio.BufferedProtocol):
    """Closes on clients that send nothing, that send headers too slowly, or that never read their answer.

    An asyncio.Protocol would receive up to 256 KiB before it can refuse them: 225 MiB from 900 connections.

    If a client is refused while it sends a body, only this side is closed, and the rest of the body is dropped for `stall_s`: a
    closed socket would answer it with a reset, and many clients ignore the answer then.
    """

    writer: AnswerWriter
    _transport: asyncio.Transport

    def __init__(self, port: PortState) -> None:
        self.port = port
        self._limits = port.limits
        self._loop = asyncio.get_running_loop()
        self._parser = RequestParser(h11.SERVER, port.limits.max_header_bytes)
        self._exchange: Exchange | None = None  # the request in flight
        self._is_full = False  # reading pauses until the application takes the body, or has answered
        self._waits = False  # reading pauses until received bytes have had their turn
        self._is_paused = False  # whether reading is paused
        self._drops = False  # whether further input is dropped
        self._header_limit = TimeLimit(self._loop)  # until the headers of a request are complete
        self._idle_limit = TimeLimit(self._loop)  # between two requests, or until an answered request is complete
        self._leave_limit: asyncio.TimerHandle | None = None  # until the client's end, which `leave` awaits
        self._share = port.budget.share(is_known=True, press=self._press)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.writer = AnswerWriter(self._transport, self._limits, self._share, self.port.turns, self._count)
        self.port.connections.add(self)
        self._header_limit.start(self._limits.header_s, self._transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  (the signature is asyncio's)
        self._share.close()
        self._header_limit.cancel()
        self._idle_limit.cancel()
        if self._leave_limit is not None:
            self._leave_limit.cancel()
        self._end_exchange()
        self.writer.lose()
        self.port.connections.discard(self)
        self.port.left(self)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002  (the signature is asyncio's)
        """Return a buffer as large as the loop's turn and the memory budget allow for one read."""
        return self.port.received[: self.port.scheduler.receive_bytes(self, self._share.window_bytes)]

    def buffer_updated(self, nbytes: int) -> None:
        """Parse received bytes, now or in a later turn, unless they belong to a refused body."""
        if self._drops:
            return
        must_wait = self.port.scheduler.must_wait(self, max(nbytes, TASK_BYTES))
        self._parser.receive_data(self.port.received[:nbytes])  # type: ignore[arg-type]  # (h11 appends any buffer)
        self._idle_limit.cancel()
        if must_wait:
            self._wait_for_turn()
        else:
            self._parse()
        self._count()

    def eof_received(self) -> None:
        self.writer.flush()  # the transport closes

    def pause_writing(self) -> None:
        self.writer.pause()

    def resume_writing(self) -> None:
        self.writer.resume()

    def read_on(self) -> None:
        """Parse the received bytes that waited for their turn."""
        self._waits = False
        if self.writer.is_closing:
            return
        if not self._drops:
            self._parse()
            self._count()
        self._pause_or_resume()

    def take_body(self) -> None:
        """Receive more of the body, because the application waits for it."""
        self._is_full = False
        self._pause_or_resume()

    def send(self, event: h11.Event) -> None:
        """Write a part of an answer."""
        self.writer.write(self._parser.send(event) or b"")

    def complete(self, *, keep_alive: bool) -> None:
        """Await the next request after an answer, or close."""
        self._exchange = None
        if self._parser.our_state is h11.MUST_CLOSE or not keep_alive:
            self.leave()
        elif not self.writer.is_closing:
            self._idle_limit.start(self._limits.keep_alive_s, self.writer.close)
            if self._parser.our_state is h11.DONE and self._parser.their_state is h11.DONE:
                self._parser.start_next_cycle()
                if self._parser.buffered_bytes:  # the next request takes a turn of its own
                    self._wait_for_turn()
            self.take_body()
        self.writer.complete()

    def fail(self, error: Exception) -> bool:
        """End the request in flight: answer it with an error, or break off its answer if that has begun.

        Returns whether there was one. What its application still sends is dropped.
        """
        exchange = self._exchange
        if exchange is None:
            return False
        if exchange.answer is AnswerState.AWAITED:
            status, text, _ = http_status(error)
            self._write_error(*in_form(exchange.scope, status, text, error))
        self._end_exchange()
        self.leave()
        return True

    def shut_down(self) -> None:
        """Close, now or with the answer to the request in flight."""
        if self._exchange is None:
            self.writer.close()
        else:
            self._exchange.keep_alive = False

    def leave(self) -> None:
        """Close; if the client is still sending, close only this side and drop the rest."""
        if self._parser.their_state is not h11.SEND_BODY:
            self.writer.close()
        elif self._leave_limit is None:
            self._drops = True
            self._leave_limit = self._loop.call_later(self._limits.stall_s, self.writer.close)
            self.writer.write_eof()
            self.take_body()

    def _parse(self) -> None:
        """Handle some of h11's events: a body in a million chunks of a byte must not block other requests."""
        for _ in range(EVENTS):
            try:
                event = self._parser.next_event()
            except h11.RemoteProtocolError:
                self._refuse()
                break
            if event is h11.NEED_DATA:
                break
            if event is h11.PAUSED:  # the next request has come before the answer to this one
                self._is_full = True
                break
            if isinstance(event, h11.Request):
                self._begin(event)
            else:
                self._add(event)
        else:
            self._wait_for_turn()
        self._pause_or_resume()
        self._limit_time()

    def _add(self, event: object) -> None:
        """Take a part or the end of a request's body."""
        exchange = self._exchange
        if exchange is None:  # the rest of a request that is answered
            if isinstance(event, h11.EndOfMessage) and self._parser.our_state is h11.DONE:
                self._parser.start_next_cycle()
        elif isinstance(event, h11.Data):
            self._is_full |= exchange.add_body(event.data)
        else:
            exchange.end_body()

    def _limit_time(self) -> None:
        """Start or stop the time limits of incomplete headers and of an answered, incomplete request."""
        if self._parser.their_state is h11.IDLE and self._parser.buffered_bytes:
            if not self._header_limit.is_running:
                self._header_limit.start(self._limits.header_s, self._transport.abort)
            return
        self._header_limit.cancel()
        if self._exchange is None and not (self._idle_limit.is_running or self.writer.is_closing):
            self._idle_limit.start(self._limits.keep_alive_s, self.writer.close)

    def _begin(self, request: h11.Request) -> None:
        """Start the task that answers a request."""
        scope = described(request, self._transport)
        self._idle_limit.cancel()
        self._exchange = Exchange(self, scope, awaits_continue=self._parser.they_are_waiting_for_100_continue)
        task = self._loop.create_task(self._exchange.run())
        self.port.tasks.add(task)
        task.add_done_callback(self.port.tasks.discard)

    def _refuse(self) -> None:
        """Answer invalid HTTP with a JSON error, unless it follows a request that is still being answered."""
        self._drops = True
        if self._exchange is not None and not self._exchange.more_body:
            self._exchange.keep_alive = False
            return
        if self._parser.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            self._write_error(400, {"error": NOT_HTTP})
        self._end_exchange()
        self.writer.close()

    def _write_error(self, status: int, content: dict[str, Any]) -> None:
        """Write a whole response of JSON, after which the connection has to be closed."""
        body = dump_json(content).encode()
        head = ERROR_HEAD % (status, REASONS[status], len(body))
        has_body = self._exchange is None or self._exchange.scope["method"] != "HEAD"
        self.writer.write(head + body if has_body else head)

    def _end_exchange(self) -> None:
        if self._exchange is not None:
            self._exchange.end()
            self._exchange = None

    def _wait_for_turn(self) -> None:
        if not (self._waits or self.writer.is_closing):
            self._waits = True
            self._pause_or_resume()
            self.port.scheduler.wait(self)

    def _pause_or_resume(self) -> None:
        pauses = self._is_full or self._waits
        if pauses is not self._is_paused and not self.writer.is_closing:
            self._is_paused = pauses
            if pauses:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def _press(self) -> None:
        """Free memory: abort a client that has sent much ahead, or that reads too slowly."""
        if self._share.excess and self._parser.buffered_bytes > LARGE_BYTES:
            self._share.close()
            self._transport.abort()
        else:
            self.writer.press()

    def _count(self) -> None:
        """Count what the client has sent ahead and has not read, if it is much."""
        ahead = self._parser.buffered_bytes
        self._share.resize(memory_of((ahead if ahead > LARGE_BYTES else 0) + self.writer.held_bytes))


class AnswerState(Enum):
    """Progress of an application's answer."""

    AWAITED = auto()
    BEGUN = auto()
    OVER = auto()  # complete, or no longer wanted: what is still sent is dropped


class Exchange:
    """One request and its answer, as the ASGI application receives and sends them.

    Attributes:
        scope: ASGI's description of the request.
        answer: how far the answer is.
        keep_alive: whether another request may follow on the connection.
        more_body: whether the rest of the request's body is still to come.
    """

    def __init__(self, connection: HttpConnection, scope: dict[str, Any], *, awaits_continue: bool) -> None:
        self.scope = scope
        self.answer = AnswerState.AWAITED
        self.keep_alive = self.more_body = True
        self._connection = connection
        self._awaits_continue = awaits_continue
        self._body = bytearray()  # bytes that the application has not received
        self._news = asyncio.Event()  # set when the application can receive something

    def add_body(self, data: bytes | bytearray) -> bool:
        """Keep a part of the body for the application; returns whether it has enough for now."""
        self._body += data
        self._news.set()
        return len(self._body) > BODY_BYTES

    def end_body(self) -> None:
        self.more_body = False
        self._news.set()

    def end(self) -> None:
        """Tell the application that the client is gone, and drop what it still sends."""
        self.answer = AnswerState.OVER
        self._news.set()
        self.scope[CLIENT_GONE].set_result(None)

    async def run(self) -> None:
        """Run the application, and answer with an error if it does not answer."""
        port = self._connection.port
        try:
            with contextlib.suppress(asyncio.CancelledError):  # the server ends, and has answered
                steps = port.app(self.scope, self.receive, self.send)
                await port.turns.run(cast("Any", steps), lambda: network_of(peer_of(self.scope)))
            if self.answer is AnswerState.OVER:
                return
            failure: Exception = RuntimeError("the application ended before its answer was complete")
        except Exception as error:  # noqa: BLE001  (it is the application's)
            failure = error
        logger.error("an HTTP request failed unexpectedly: %s", self.scope["path"], exc_info=failure)
        if self.answer is not AnswerState.OVER:
            self._connection.fail(failure)

    async def receive(self) -> dict[str, Any]:
        """ASGI's `receive`: the next part of the body, or that the client is gone."""
        if self.answer is not AnswerState.OVER:
            if self._awaits_continue:
                self._awaits_continue = False
                self._connection.send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue"))
            self._connection.take_body()
            await self._news.wait()
            self._news.clear()
        if self.answer is AnswerState.OVER:
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        if not self.more_body:
            self._connection.take_body()  # to notice when the client goes
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def send(self, message: Any) -> None:
        """ASGI's `send`. Raises RuntimeError: the message is not the one that must follow."""
        connection = self._connection
        if self.answer is not AnswerState.OVER and connection.writer.is_paused:
            await connection.writer.drain()
        if self.answer is AnswerState.OVER:
            return
        expected = "http.response.start" if self.answer is AnswerState.AWAITED else "http.response.body"
        if message["type"] != expected:
            raise RuntimeError(f"the application sent {message['type']!r}, expected {expected!r}")
        if self.answer is AnswerState.AWAITED:
            status, headers = message["status"], [*connection.port.headers, *message.get("headers", ())]
            connection.send(h11.Response(status_code=status, headers=headers, reason=REASONS.get(status, b"")))
            self._awaits_continue = False
            self.answer = AnswerState.BEGUN
            return
        body = message.get("body", b"")
        if body and self.scope["method"] != "HEAD":
            connection.send(h11.Data(data=body))
        if not message.get("more_body", False):
            connection.send(h11.EndOfMessage())
            self.end()
            connection.complete(keep_alive=self.keep_alive)
