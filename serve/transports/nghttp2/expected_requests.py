"""Requests of repeated calls, until they are whole."""

from __future__ import annotations

from serve.security.memory_budget import Share
from serve.transports.grpc_framing import PREFIX_BYTES
from serve.transports.limits import TransportLimits
from serve.transports.nghttp2.call import UnaryCall
from serve.transports.nghttp2.frames import FRAME_BYTES
from serve.transports.nghttp2.growing_message import GrowingMessage

COUNT_BYTES = 2**17  # at a time


class ExpectedRequests:
    """Those of one connection.

    Attributes:
        calls: that wait for theirs, by stream.
        growing: what has come of those that come in pieces.
        announced: bytes that are still to come of those whose client has told how many it sends.
        max_whole: bytes of a frame that may hold a whole request.
        owed: bytes that have come and that the client has not been told to send again.
    """

    __slots__ = (
        "_max_growing",
        "_max_reserved",
        "_reserved",
        "_share",
        "_uncounted",
        "announced",
        "calls",
        "growing",
        "max_whole",
        "owed",
    )

    def __init__(self, limits: TransportLimits, share: Share) -> None:
        """None yet.

        Args:
            limits: of the connection.
            share: of the memory that all connections may take; what has come of requests in pieces is counted there.
        """
        self._share = share
        self._uncounted = 0  # bytes held that `share` does not know of
        # A stream's window is not opened again here, so that a larger request is for libnghttp2.
        self._max_growing = min(limits.stream_window_bytes // 2, limits.max_message_bytes, limits.max_small_message_bytes)
        self._max_reserved = limits.max_held_bytes
        self._reserved = 0  # bytes of memory, for all that come in pieces
        self.calls: dict[int, UnaryCall] = {}
        self.growing: dict[int, GrowingMessage] = {}
        self.announced: dict[int, int] = {}
        self.max_whole = min(self._max_growing + PREFIX_BYTES, FRAME_BYTES)
        self.owed = 0

    def take(self, stream: int, piece: bytes | memoryview, *, is_last: bool) -> bool:
        """Take some of a request, or of what still comes for one that nobody expects.

        Returns:
            False, with nothing taken, where it is not what was announced, or is for libnghttp2 to put together.
        """
        size, call = len(piece), self.calls.get(stream)
        if call is None:
            self.owed += size
            return True
        announced = self.announced.get(stream)
        if announced is not None and (size > announced or (is_last and size < announced)):
            return False
        if is_last and stream not in self.growing:  # whole and no plain message: the call finds out what it is
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

    def forget(self, stream: int) -> None:
        """Expect no more of a request."""
        self.calls.pop(stream, None)
        self.announced.pop(stream, None)
        growing = self.growing.pop(stream, None)
        if growing is not None:
            self._reserved -= growing.length
            self._count(-growing.came)

    def clear(self) -> None:
        """Expect nothing."""
        self.calls.clear()
        self.announced.clear()
        for stream in list(self.growing):
            self.forget(stream)

    def _grown(self, stream: int, piece: bytes | memoryview) -> GrowingMessage | None:
        """A request with this piece added; None where it cannot be."""
        growing = self.growing.get(stream)
        if growing is None:
            # Where memory is short libnghttp2 puts it together, whose windows say when the client may go on.
            room = 0 if self._share.is_short else self._max_reserved - self._reserved
            growing = GrowingMessage.begun(piece, min(self._max_growing, room))
            if growing is None:
                return None
            self.growing[stream] = growing
            self._reserved += growing.length
        elif not growing.add(piece):
            return None
        self._count(len(piece))
        return growing

    def _count(self, more: int) -> None:
        """Count what is held in steps: a request may come in many pieces."""
        self._uncounted += more
        if not -COUNT_BYTES < self._uncounted < COUNT_BYTES or not self.growing:
            self._share.add(self._uncounted)
            self._uncounted = 0
