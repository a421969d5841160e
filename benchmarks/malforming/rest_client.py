"""An invalid REST request, and a client that sends it and judges the answer."""

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
    """An invalid request.

    Attributes:
        kind: kind under which it is counted.
        statuses: right HTTP statuses.
        body: body of the request.
        path: path of the request.
        method: HTTP method.
        headers: additional headers.
        raw: bytes to send on a separate connection instead of the request.
    """

    kind: str
    statuses: frozenset[int]
    body: bytes = b""
    path: str = ""
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    raw: bytes = b""


class RestClient:
    """Sends requests over one persistent connection, which is reopened if the server closes it.

    Args:
        address: HOST:PORT.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._connection = http.client.HTTPConnection(address, timeout=WAIT_S)

    def complaint(self, fault: RestFault) -> str:
        """Send a request; returns the fault of the answer, "" if it is right."""
        if fault.raw:
            status, text = self._say(fault.raw), ""
        else:
            status, text = self._ask(fault)
        if status not in fault.statuses:
            return f"HTTP {status} {text[:200]}, expected one of {sorted(fault.statuses)}; sent {fault.body[:100]!r}"
        return "" if fault.raw or status == 200 or _has_reason(text) else f"HTTP {status} without a reason: {text[:200]}"

    def close(self) -> None:
        """Close the connection."""
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
