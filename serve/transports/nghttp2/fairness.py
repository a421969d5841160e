"""Fair shares between clients: limits of a connection, and message quotas."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ngh2 import Configuration

from halfserve.serve.transports.grpc_framing import FIELD_BYTES
from halfserve.serve.transports.nghttp2.frames import (
    FRAME_BYTES,
    INITIAL_WINDOW_SIZE,
    MAX_CONCURRENT_STREAMS,
    MAX_FRAME_SIZE,
    MAX_HEADER_LIST_SIZE,
)

MIB: Final = 2**20
# A factor of `max_header_bytes`. Up to it the call alone is refused; a longer list ends the connection before it is decoded
# to its end. A field counts at least 32 bytes and costs the event loop about 0.3 us.
HOPELESS_HEADERS: Final = 2
MESSAGES_A_TURN: Final = 256  # limit per connection and loop iteration
COUNTS_AS_ONE_BYTES: Final = 2**16  # a larger message counts as several


@dataclass(frozen=True, kw_only=True)
class TransportLimits:
    """Limits of one client."""

    max_message_bytes: int = 2**31 - 1  # limit of a request with tensors or model files, decompressed
    max_inflated_bytes: int = 64 * MIB  # limit of such a request if it is compressed; inflating blocks the event loop
    max_small_message_bytes: int = 4 * MIB  # limit of a request of any other method, decompressed
    max_connections: int = 10_000  # open at the same time; `serve/engine/resource_limits.py` may allow fewer
    max_streams: int = 1024  # calls in flight on one connection
    # Of one call's headers, decompressed; a larger call is refused. Twice as many end the connection
    max_header_bytes: int = 16 * 1024
    # Calls with too large headers before a connection takes no new calls; calls refused for memory before a connection without
    # a token is closed.
    max_refused: int = 64
    stream_window_bytes: int = 4 * MIB  # receive window of a call
    # Receive window of a connection; less with many connections, and 64 KiB until a required token is shown.
    connection_window_bytes: int = 16 * MIB
    # Of unfinished messages on one connection. Beyond it only the oldest message continues; 16 stream windows beyond it, the
    # others are refused.
    max_held_bytes: int = 64 * MIB
    max_unsent_bytes: int = MIB  # unsent responses of a streaming call, from which on its requests wait
    # Resets that a client may send at once before its connection is closed. It is large because clients reset every call whose
    # deadline passes, and a reset costs no more than its request.
    reset_burst: int = 10_000
    resets_per_s: int = 2_000  # in the long run
    handshake_s: float = 10.0  # time limit for the HTTP/2 preface of a new connection
    stall_s: float = 60.0  # time limit for progress of a request message, and for a client to read its responses
    short_stall_s: float = 5.0  # time limit for reading responses while memory is short, for connections above their share
    keepalive_s: float = 600.0  # silence before a ping
    keepalive_timeout_s: float = 20.0  # time limit of the ping's answer
    max_age_s: float | None = None  # age at which a connection gets GOAWAY; None for no limit
    max_age_grace_s: float = 30.0  # time limit for its calls in flight
    sweep_s: float = 1.0  # period at which these times are checked


def most_header_bytes(limits: TransportLimits) -> int:
    """Bytes of one header list, encoded or decoded, beyond which the connection ends."""
    return HOPELESS_HEADERS * limits.max_header_bytes


def configuration(limits: TransportLimits) -> Configuration:
    """libnghttp2's limits."""
    most = most_header_bytes(limits)
    return Configuration(
        auto_window_update=False,
        max_inbound_header_list_size=most,
        max_inbound_header_count=most // FIELD_BYTES,
        stream_reset_rate_limit=(limits.reset_burst, limits.resets_per_s),
    )


def greeting(limits: TransportLimits) -> dict[int, int]:
    """Return the server's SETTINGS."""
    return {
        MAX_CONCURRENT_STREAMS: limits.max_streams,
        INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
        MAX_FRAME_SIZE: FRAME_BYTES,
        MAX_HEADER_LIST_SIZE: limits.max_header_bytes,
    }


class MessageQuota:
    """Messages that the streams of one connection may read per loop iteration.

    A message can be five bytes and costs as much as a request: one full socket buffer would delay other clients too long.
    """

    __slots__ = ("_left", "_waiting")

    def __init__(self) -> None:
        self._left = MESSAGES_A_TURN
        self._waiting: deque[Callable[[], None]] = deque()

    def may_read(self) -> bool:
        """Return whether a stream may read another message in this iteration; counts it."""
        if not self._left:
            return False
        if self._left == MESSAGES_A_TURN:
            asyncio.get_running_loop().call_soon(self._begin)
        self._left -= 1
        return True

    def spend(self, size: int) -> None:
        """Count a message of `size` bytes, decompressed, as one per COUNTS_AS_ONE_BYTES."""
        self._left = max(0, self._left - size // COUNTS_AS_ONE_BYTES)

    def when_next(self, then: Callable[[], None]) -> None:
        """Call `then` in a later iteration, after other waiting streams."""
        self._waiting.append(then)

    def _begin(self) -> None:
        self._left = MESSAGES_A_TURN
        while self._left and self._waiting:
            self._waiting.popleft()()
