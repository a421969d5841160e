"""One REST request that is wrong, and a client that sends it and judges what comes back."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.soaking.broken_clients import connected

WAIT_S = 30.0
CLOSED = 0  # the connection ended without an answer


@dataclass(frozen=True)
class RestFault:
    """A request.

    Attributes:
        kind: under which it is counted.
        statuses: that are right.
        body: as sent.
        path: of POST, or of `method`.
        method: HTTP's.
        headers: more of them.
        raw: in place of all that: bytes to say on a connection of their own.
    """

    kind: str
    statuses: frozenset[int]
    body: bytes = b""
    path: str = ""
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    raw: bytes = b""


class RestClient:
    """Asks over one connection that is kept, and opened anew where the server closes it.

    Args:
        address: HOST:PORT.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._connection = http.client.HTTPConnection(address, timeout=WAIT_S)

    def complaint(self, fault: RestFault) -> str:
        """Send it; what is wrong with the answer, "" where that is right."""
        if fault.raw:
            status, text = self._say(fault.raw), ""
        else:
            status, text = self._ask(fault)
        if status not in fault.statuses:
            return f"HTTP {status} {text[:200]}, expected one of {sorted(fault.statuses)}; sent {fault.body[:100]!r}"
        return "" if fault.raw or status == 200 or _has_reason(text) else f"HTTP {status} without a reason: {text[:200]}"

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def _ask(self, fault: RestFault) -> tuple[int, str]:
        try:
            self._connection.request(fault.method, fault.path, fault.body or None, dict(fault.headers))
            response = self._connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        except (http.client.HTTPException, ConnectionError) as error:
            self._connection.close()
            return CLOSED, repr(error)

    def _say(self, data: bytes) -> int:
        with connected(self._address) as connection:
            try:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                answer = b"".join(iter(lambda: connection.recv(65_536), b""))
            except ConnectionError:
                return CLOSED
        return int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else CLOSED


def _has_reason(text: str) -> bool:
    try:
        content = json.loads(text)
    except ValueError:
        return False
    return isinstance(content, dict) and bool(content.get("error"))
