"""Clients over REST: attackers that ask again and again, and the well-behaved client beside them."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from threading import Event

from benchmarks.attacks.bystander import TIMEOUT_S, Account, at_a_pace

# Addresses of their own: the attacker stands for other machines, 127.0.0.1 over gRPC and one over REST.
ATTACKER, CLIENT = ("127.0.0.2", 0), ("127.0.0.3", 0)
EVERY_S = 0.05  # the shortest pause of a client that sends texts and pictures


def connected(address: str) -> socket.socket:
    """Connect to a server from the attacker's address."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=5, source_address=ATTACKER)


def post(path: str, body: bytes) -> bytes:
    """Return a request that closes its connection."""
    lines = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    return lines.encode() + body


def repeated(ways: Sequence[Callable[[float], str]], seconds: float) -> str:
    """Run each way in a thread of its own, again and again, with the time of the end; return how they were answered."""
    end, statuses = time.monotonic() + seconds, Counter[str]()

    def again(once: Callable[[float], str]) -> None:
        while time.monotonic() < end:
            statuses[once(end)] += 1

    threads = [threading.Thread(target=again, args=(way,)) for way in ways]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ", ".join(f"{count} with {status}" for status, count in sorted(statuses.items()))


def ask_rest(
    http_address: str,
    path: str,
    body: bytes,
    headers: Mapping[str, str],
    *,
    token: str | None,
    is_right: Callable[[bytes], bool],
    every_s: float,
    stop: Event,
) -> Account:
    """Send the same request each `every_s` seconds, or EVERY_S if that is longer; see `bystander.ask`."""
    host, _, port = http_address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=TIMEOUT_S, source_address=CLIENT)
    own = {} if token is None else {"authorization": f"Bearer {token}"}

    def once() -> str | None:
        try:
            connection.request("POST", path, body, {**own, **headers})
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()  # the next request opens it again
            return str(error) or type(error).__name__
        if answer.status != 200:
            return f"{answer.status}: {content[:200]!r}"
        return None if is_right(content) else "a wrong answer"

    account = at_a_pace(once, max(every_s, EVERY_S), stop)
    connection.close()
    return account
