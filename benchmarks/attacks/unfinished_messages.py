"""Connections that begin messages and never end them."""

from __future__ import annotations

import struct
import time

from benchmarks.attacks.http2_client import Http2Client, told

CONNECTIONS = 60
STREAMS = 64  # streams per connection
PAUSE_S = 0.01


def run(grpc_address: str, http_address: str, seconds: float, *, path: bytes, message_bytes: int) -> str:
    """Send all but the last byte of such messages, as far as the server takes them, on calls of the method `path`."""
    del http_address
    body = memoryview(struct.pack(">BI", 0, message_bytes) + bytes(message_bytes - 1))
    clients = [Http2Client(grpc_address) for _ in range(CONNECTIONS)]
    for client in clients:
        for _ in range(STREAMS):
            client.call(path, body, end=False)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not sum([client.go_on() for client in clients if client.is_open]):
            time.sleep(PAUSE_S)
    for client in clients:
        client.close()
    return told(clients)
