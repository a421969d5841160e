"""Watches over health, which need no token and never end."""

from __future__ import annotations

import time

from benchmarks.attacks.http2_client import Http2Client

CONNECTIONS = 60
STREAMS = 1000  # streams per connection
PAUSE_S = 0.01
WATCH = b"/grpc.health.v1.Health/Watch"


def run(grpc_address: str, http_address: str, seconds: float) -> str:
    """Open watches on many connections and keep them."""
    del http_address
    end = time.monotonic() + seconds
    clients = [Http2Client(grpc_address) for _ in range(CONNECTIONS)]
    for client in clients:
        for _ in range(STREAMS):
            client.call(WATCH, bytes(5), end=True)
    while time.monotonic() < end:
        if not sum([client.go_on() for client in clients if client.is_open]):
            time.sleep(PAUSE_S)
    for client in clients:
        client.close()
    return f"{CONNECTIONS * STREAMS} watches asked for over {CONNECTIONS} connections"
