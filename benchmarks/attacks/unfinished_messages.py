"""Connections that begin messages and never end them."""

from __future__ import annotations

import contextlib
import struct
import time

from benchmarks.soaking.broken_clients import DATA, END_HEADERS, HEADERS, PREFACE, SETTINGS, call_block, connected, frame

CONNECTIONS = 60
STREAMS = range(1, 128, 2)  # of each connection
FRAME_BYTES = 16_384
MESSAGE_BYTES = 2**30


def run(grpc_address: str, http_address: str, seconds: float) -> str:
    """Send as much of such messages as the server takes."""
    del http_address
    sockets = [connected(grpc_address) for _ in range(CONNECTIONS)]
    prefix = b"\0" + struct.pack(">I", MESSAGE_BYTES)
    begun = b"".join(frame(HEADERS, END_HEADERS, stream, call_block()) + frame(DATA, 0, stream, prefix) for stream in STREAMS)
    filler = memoryview(b"".join(frame(DATA, 0, stream, bytes(FRAME_BYTES)) for stream in STREAMS))
    for connection in sockets:
        with contextlib.suppress(OSError):
            connection.sendall(PREFACE + frame(SETTINGS, 0, 0, b"") + begun)
        connection.setblocking(False)
    waiting, sent, end = dict.fromkeys(sockets, filler), 0, time.monotonic() + seconds
    while waiting and time.monotonic() < end:
        before = sent
        for connection, rest in list(waiting.items()):
            try:
                count = connection.send(rest)
            except BlockingIOError:
                continue
            except OSError:
                del waiting[connection]
                continue
            sent += count
            waiting[connection] = rest[count:] or filler
        if sent == before:
            time.sleep(0.01)
    for connection in sockets:
        connection.close()
    closed = CONNECTIONS - len(waiting)
    return f"{sent / 2**20:.0f} MiB sent over {CONNECTIONS} connections, {closed} of them closed by the server"
