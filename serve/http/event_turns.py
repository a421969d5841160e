"""What has arrived on a connection, looked at in turns: a body in a million chunks of a byte keeps nobody else waiting."""

from __future__ import annotations

import h11
from uvicorn.protocols.http.flow_control import FlowControl

# Events are read in Python, for 10 us and more each. What is read from a socket at once, 256 KiB, may be 43,000 chunks. Those
# of clients that have something to say are of 4 KiB and more: they all fit into one turn.
EVENTS = 64
LENGTHS = {b"content-length", b"transfer-encoding"}


class EventTurns(h11.Connection):
    """Hands out some events a turn, and then says that there are none. Refuses a request that gives its length in two ways.

    Attributes:
        has_more: there may be more, in the next turn.
    """

    has_more = False
    _left = EVENTS

    @property
    def buffered_bytes(self) -> int:
        """What has come and waits for its turn, or for the answer to an earlier request."""
        return len(self._receive_buffer)

    def begin_turn(self) -> None:
        """Hand out events again."""
        self.has_more, self._left = False, EVENTS

    def next_event(self) -> h11.Event | type[h11.NEED_DATA | h11.PAUSED]:
        """As h11's.

        Raises:
            h11.RemoteProtocolError: this is no HTTP/1.1, or has Content-Length and Transfer-Encoding: what a proxy takes for
                its body may be the next request here (RFC 9112, 6.3).
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
    """Reads no more while what was read waits for its turn, whoever asks for more."""

    _is_full = _is_held = False

    def pause_reading(self) -> None:
        """Called where more was received than is taken."""
        self._is_full = True
        super().pause_reading()

    def resume_reading(self) -> None:
        """Called where that has been taken."""
        self._is_full = False
        if not self._is_held:
            super().resume_reading()

    def hold(self) -> None:
        """Read no more."""
        self._is_held = True
        super().pause_reading()

    def release(self) -> None:
        """Read on, if there is room."""
        self._is_held = False
        if not self._is_full:
            super().resume_reading()
