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

HOPELESS_HEADERS = 8  # times what a call's may be: with more the connection ends, as they are not read


def configuration(limits: TransportLimits) -> Configuration:
    """What ends a connection, or its streams."""
    most = HOPELESS_HEADERS * limits.max_header_bytes
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
