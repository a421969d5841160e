"""What one connection has to send, until its socket has taken it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from ngh2 import Connection
from ngh2.exceptions import NGH2Error

WRITE_BYTES = 2**18  # given to the socket at a time, so that a slow reader's answers stay where they can still be dropped
NO_ERROR = 0x00


class Outlet:
    """Writes at the pace at which the client reads, and knows what has not left yet.

    Attributes:
        paused: the socket takes no more for now.
    """

    __slots__ = ("_ending", "_http2", "_last_words", "_max_unsent", "_waiting", "paused")

    def __init__(self, http2: Connection, max_unsent_bytes: int, last_words: Callable[[bytes], bytes]) -> None:
        """An outlet with nothing to send.

        Args:
            http2: has the answers.
            max_unsent_bytes: of one call; with more its client is behind.
            last_words: is asked for what to send in the place of bytes after which the connection is at its end.
        """
        self._http2 = http2
        self._max_unsent = max_unsent_bytes
        self._last_words = last_words
        self._ending: set[int] = set()  # answered before the client had ended: to be reset once the answer is out
        self._waiting: dict[int, Callable[[], None]] = {}  # streaming calls that wait for their answers to leave
        self.paused = False

    def write(self, transport: asyncio.Transport) -> bool:
        """Write what there is to send, as far as the socket takes it; whether there was anything.

        Raises:
            NGH2Error: the connection cannot go on.
        """
        wrote = False
        while True:
            while not self.paused and (data := self._http2.data_to_send(WRITE_BYTES)):
                transport.write(data if self._http2.want_read else self._last_words(data))
                wrote = True
            if self.paused or not self._ending or not self._reset_ended():
                break
        if self._waiting:
            self._wake()
        return wrote

    def is_behind(self, stream: int) -> bool:
        """Whether the client reads a call's answers more slowly than they come."""
        return self._http2.queued_body_size(stream) > self._max_unsent

    def when_read(self, stream: int, then: Callable[[], None]) -> None:
        """Call `then` once, when a client that is behind has caught up."""
        self._waiting[stream] = then

    def reset_when_out(self, stream: int) -> None:
        """End a stream on the client's side too, once its answer has left: the client was still sending."""
        self._ending.add(stream)

    def closed(self, stream: int) -> None:
        """A stream is over."""
        self._ending.discard(stream)
        if self._waiting:
            self._waiting.pop(stream, None)

    def clear(self) -> None:
        """The connection is over: nobody is called any more."""
        self._waiting.clear()

    def _reset_ended(self) -> bool:
        """Reset the streams whose answer is out; libnghttp2 would drop an answer that is still queued."""
        out = [stream for stream in self._ending if not self._http2.queued_body_size(stream)]
        for stream in out:
            self._ending.discard(stream)
            with contextlib.suppress(NGH2Error):
                self._http2.reset_stream(stream, NO_ERROR)
        return bool(out)

    def _wake(self) -> None:
        for stream in [s for s in self._waiting if self._http2.queued_body_size(s) <= self._max_unsent // 2]:
            self._waiting.pop(stream)()
