"""What one connection has to send, until its socket has taken it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from ngh2 import Connection
from ngh2.exceptions import NGH2Error

from serve.security.memory_budget import Share

WRITE_BYTES = 2**18  # given to the socket at a time, so that a slow reader's answers stay where they can still be dropped
MIN_PROGRESS_BYTES = 16_384  # that a client must read in the time that it is given
NO_ERROR = 0x00


class Outlet:
    """Writes at the pace at which the client reads, and knows what has not left yet.

    Attributes:
        paused: the socket takes no more for now.
        unsent: bytes of answers that have not left; those of small ones are known once they have been counted.
    """

    __slots__ = (
        "_ending", "_http2", "_last_words", "_max_unsent", "_share", "_to_read", "_unread_since_s", "_waiting", "paused",
        "unsent",
    )  # fmt: skip

    def __init__(self, http2: Connection, max_unsent_bytes: int, last_words: Callable[[bytes], bytes], share: Share) -> None:
        """An outlet with nothing to send.

        Args:
            http2: has the answers.
            max_unsent_bytes: of one call; with more its client is behind.
            last_words: is asked for what to send in the place of bytes after which the connection is at its end.
            share: of the memory that all connections may take; what has not left is counted there.
        """
        self._http2 = http2
        self._max_unsent = max_unsent_bytes
        self._last_words = last_words
        self._share = share
        self.unsent = 0
        self._unread_since_s: float | None = None  # while there is something to read: since when too little of it was
        self._to_read = 0  # bytes that are to be read before that begins again
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
        queued = self._http2.queued_body_size(stream)
        return queued > self._max_unsent or (queued > 0 and self._share.is_short)

    def add(self, size: int) -> bool:
        """Count an answer that libnghttp2 is to send; False, and it is not counted, where memory does not hold it.

        It always holds the only answer of a connection.
        """
        self._share.add(size)
        if self.unsent and self._share.is_too_much:
            self._share.add(-size)
            return False
        self.unsent += size
        return True

    def count(self, buffered: int, now_s: float) -> None:
        """Find out how much has left.

        Args:
            buffered: bytes that the socket has not taken of what was written to it.
            now_s: on the loop's clock.
        """
        unsent = self._http2.queued_body_size() + buffered
        left = self.unsent - unsent
        self._share.add(-left)
        self.unsent = unsent
        if not unsent:
            self._unread_since_s = None
            return
        self._to_read -= max(0, left)
        if self._unread_since_s is None or self._to_read <= 0:
            self._unread_since_s, self._to_read = now_s, MIN_PROGRESS_BYTES

    def is_unread_since(self, before_s: float) -> bool:
        """Whether the client has read next to nothing of what there is for it since `before_s`, on the loop's clock."""
        return self._unread_since_s is not None and self._unread_since_s < before_s

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
