"""Connections that are opened, say little or nothing, and stay: on both ports, and in the middle of TLS."""

from __future__ import annotations

import contextlib
import socket
import time

from benchmarks.harness.http2_frames import PREFACE, SETTINGS, connected, frame

CONNECTIONS = 4000
HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # the first bytes of a handshake
PAUSE_S = 0.05  # once all are open, or there is no room for more


def idle(grpc_address: str, http_address: str, seconds: float) -> str:
    """Open connections that have greeted, or say nothing, and open others for those that the server ends."""
    return _hold([(grpc_address, b""), (grpc_address, PREFACE + frame(SETTINGS, 0, 0, b"")), (http_address, b"")], seconds)


def half_open(grpc_address: str, http_address: str, seconds: float) -> str:
    """Return the same, with handshakes of TLS that stop at their beginning."""
    return _hold([(grpc_address, b""), (grpc_address, HELLO), (http_address, HELLO)], seconds)


def _hold(kinds: list[tuple[str, bytes]], seconds: float) -> str:
    opened, held, end = 0, list[socket.socket](), time.monotonic() + seconds
    while time.monotonic() < end:
        still = [one for one in held if not _has_ended(one)]
        for number in range(min(CONNECTIONS - len(still), 200)):
            address, words = kinds[number % len(kinds)]
            with contextlib.suppress(OSError):
                connection = connected(address)
                still.append(connection)
                opened += 1
                connection.setblocking(False)
                connection.send(words)
        if len(still) == len(held):
            time.sleep(PAUSE_S)
        held = still
    for one in held:
        one.close()
    return f"{opened} connections opened, {len(held)} of them open at the end"


def _has_ended(connection: socket.socket) -> bool:
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    connection.close()
    return True
