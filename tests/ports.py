"""Ports for servers that are told on which port to listen."""

from __future__ import annotations

import socket
from random import SystemRandom


def unused_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on, below those that Linux gives to other tests' sockets by itself."""
    while True:
        port = SystemRandom().randrange(20_000, 32_000)  # pytest-randomly gives `random` the same seed in every process
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
