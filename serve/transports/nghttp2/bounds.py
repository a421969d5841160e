"""What libnghttp2 holds a client to, and what the client is told of that."""

from __future__ import annotations

from ngh2 import Configuration

from serve.transports.grpc_headers import FIELD_BYTES
from serve.transports.limits import TransportLimits
from serve.transports.nghttp2.frames import (
    FRAME_BYTES,
    INITIAL_WINDOW_SIZE,
    MAX_CONCURRENT_STREAMS,
    MAX_FRAME_SIZE,
    MAX_HEADER_LIST_SIZE,
)

# Times what a call's headers may be. Up to that the call is refused with a status, and others of its connection go on; a longer
# list ends the connection before it is read to its end. A field counts 32 bytes at least and costs the event loop about 0.3 us.
HOPELESS_HEADERS = 2


def most_header_bytes(limits: TransportLimits) -> int:
    """Bytes of one list of headers, as sent and decompressed, beyond which the connection ends."""
    return HOPELESS_HEADERS * limits.max_header_bytes


def configuration(limits: TransportLimits) -> Configuration:
    """What ends a connection, or its streams."""
    most = most_header_bytes(limits)
    return Configuration(
        auto_window_update=False,
        max_inbound_header_list_size=most,
        max_inbound_header_count=most // FIELD_BYTES,
        stream_reset_rate_limit=(limits.reset_burst, limits.resets_per_s),
    )


def greeting(limits: TransportLimits) -> dict[int, int]:
    """The settings that a client is told first."""
    return {
        MAX_CONCURRENT_STREAMS: limits.max_streams,
        INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
        MAX_FRAME_SIZE: FRAME_BYTES,
        MAX_HEADER_LIST_SIZE: limits.max_header_bytes,
    }
