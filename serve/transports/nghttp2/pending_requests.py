"""The interface of calls in flight, and requests of fast-path calls until they are complete."""

from __future__ import annotations

from typing import Final, Protocol

from halfserve.serve.engine.errors import InferenceError
from halfserve.serve.security.memory_budget import MemoryShare
from halfserve.serve.transports.grpc_framing import PREFIX_BYTES, PartialMessage
from halfserve.serve.transports.nghttp2.fairness import TransportLimits
from halfserve.serve.transports.nghttp2.frames import FRAME_BYTES, HEAD, HEAD_BYTES

COUNT_BYTES: Final = 2**17  # step of the memory count


class Call(Protocol):
    """A call in flight, as its connection sees it."""

    is_unary: bool  # it is a UnaryCall

    @property
    def held_bytes(self) -> int: ...  # size of the unfinished message
    def receive(self, data: bytes) -> int: ...  # take received bytes; returns how many of them to acknowledge at once
    def receive_last(self, data: bytes) -> int: ...  # take the last bytes of the client; returns as `receive`
    def end(self) -> None: ...  # the client ended the stream without further data
    def gone(self) -> None: ...  # the client has cancelled the call or disconnected
    def give_up(self, error: InferenceError) -> None: ...  # end with an error, even inside the request

    def give_up_stalled(self, before_s: float) -> None:
        """End with a status if an unfinished message has not grown since `before_s`, on the loop's clock."""


class UnaryCall(Call, Protocol):
    """A call with one message each way."""

    def take(self, message: bytes | memoryview) -> None: ...  # take the complete request, which ends the client's side
    def grew(self) -> None: ...  # a part of the request, buffered elsewhere, has arrived


class PendingRequests:
    """Requests of one connection's fast-path calls."""

    __slots__ = (
        "_max_growing", "_max_reserved", "_reserved", "_share", "_uncounted", "announced", "calls", "growing", "max_whole",
        "owed",
    )  # fmt: skip

    def __init__(self, limits: TransportLimits, share: MemoryShare) -> None:
        self._share = share
        self._uncounted = 0  # held bytes not yet reported to `share`
        # The fast path does not reopen stream windows, so that larger requests are libnghttp2's.
        self._max_growing = min(limits.stream_window_bytes // 2, limits.max_message_bytes, limits.max_small_message_bytes)
        self._max_reserved = limits.max_held_bytes
        self._reserved = 0  # bytes allocated for requests in pieces
        self.calls: dict[int, UnaryCall] = {}  # calls whose request is incomplete, by stream
        self.growing: dict[int, PartialMessage] = {}  # requests that arrive in pieces
        self.announced: dict[int, int] = {}  # bytes missing of requests with a content-length
        self.max_whole = min(self._max_growing + PREFIX_BYTES, FRAME_BYTES)  # bytes of a frame that may hold a whole request
        self.owed = 0  # received bytes that are not acknowledged

    def take(self, stream: int, piece: bytes | memoryview, *, is_last: bool) -> bool:
        """Take a part of a request; bytes of a finished call are only counted.

        Returns:
            False, with nothing taken, if it contradicts the content-length or is for libnghttp2 to assemble.
        """
        size, call = len(piece), self.calls.get(stream)
        if call is None:
            self.owed += size
            return True
        announced = self.announced.get(stream)
        if announced is not None and (size > announced or (is_last and size < announced)):
            return False
        if is_last and stream not in self.growing:  # compressed or malformed: the call decides
            self.owed += size
            self.forget(stream)
            call.receive_last(bytes(piece))
            return True
        growing = self._grown(stream, piece)
        if growing is None:
            return False
        self.owed += size
        if not is_last:
            if announced is not None:
                self.announced[stream] = announced - size
            call.grew()
        else:
            self.forget(stream)
            if growing.is_whole:
                call.take(growing.message)
            else:
                call.receive_last(growing.so_far())
        return True

    def take_run(self, stream: int, data: bytes | memoryview, at: int, head: bytes) -> int:
        """Take the DATA frames from `at` on that have this `head`, as far as they belong to a growing request.

        Returns:
            The end of the last one. What comes after it, such as a shorter frame, is for `take`.
        """
        growing, announced = self.growing[stream], self.announced.get(stream)
        length: int = HEAD.unpack(head)[0] >> 8
        room = growing.missing if announced is None else min(growing.missing, announced)
        size = growing.add_run(data, at, head, length, room)
        if not size:
            return at
        if announced is not None:
            self.announced[stream] = announced - size
        self.owed += size
        self._count(size)
        return at + size + size // length * HEAD_BYTES

    def forget(self, stream: int) -> None:
        self.calls.pop(stream, None)
        self.announced.pop(stream, None)
        growing = self.growing.pop(stream, None)
        if growing is not None:
            self._reserved -= growing.length
            self._count(-growing.came)

    def clear(self) -> None:
        self.calls.clear()
        self.announced.clear()
        for stream in list(self.growing):
            self.forget(stream)

    def _grown(self, stream: int, piece: bytes | memoryview) -> PartialMessage | None:
        """Return the request with `piece` appended; None if it does not fit."""
        growing = self.growing.get(stream)
        if growing is None:
            # While memory is short libnghttp2 assembles it, whose windows pace the client.
            room = 0 if self._share.is_short else self._max_reserved - self._reserved
            growing = PartialMessage.starting_with(piece, min(self._max_growing, room))
            if growing is None:
                return None
            self.growing[stream] = growing
            self._reserved += growing.length
        elif not growing.add(piece):
            return None
        self._count(len(piece))
        return growing

    def _count(self, more: int) -> None:
        """Count held bytes in steps: a request may arrive in many pieces."""
        self._uncounted += more
        if not -COUNT_BYTES < self._uncounted < COUNT_BYTES or not self.growing:
            self._share.add(self._uncounted)
            self._uncounted = 0
