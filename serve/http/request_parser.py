"""Parse the requests of one HTTP/1.1 connection, and describe each to an ASGI application."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import unquote

import h11

# The key, in a request's scope, of a future that is done when the client is gone or answered.
CLIENT_GONE = "halfserve.client_gone"
LENGTHS = {b"content-length", b"transfer-encoding"}


class RequestParser(h11.Connection):
    """h11's parser, which also refuses requests with two lengths."""

    @property
    def buffered_bytes(self) -> int:
        """Received bytes that wait for their turn, or for the answer to an earlier request."""
        return len(self._receive_buffer)  # h11 publishes only a copy of them

    def next_event(self) -> h11.Event | type[h11.NEED_DATA | h11.PAUSED]:
        """Return the next event, as h11 does.

        Raises:
            h11.RemoteProtocolError: invalid HTTP/1.1, or both Content-Length and Transfer-Encoding, which allow request
                smuggling through a proxy (RFC 9112, 6.3).
        """
        event = super().next_event()
        if isinstance(event, h11.Request) and {name for name, _ in event.headers} >= LENGTHS:
            raise h11.RemoteProtocolError("Content-Length beside Transfer-Encoding")
        return event


def described(request: h11.Request, transport: asyncio.BaseTransport) -> dict[str, Any]:
    """Return ASGI's description of a request, its scope, with a future for CLIENT_GONE."""
    raw_path, _, query_string = request.target.partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": request.http_version.decode("ascii"),
        "server": _address(transport.get_extra_info("sockname")),
        "client": _address(transport.get_extra_info("peername")),
        "scheme": "https" if transport.get_extra_info("sslcontext") else "http",
        "method": request.method.decode("ascii"),
        "root_path": "",
        "path": unquote(raw_path.decode("ascii")),
        "raw_path": raw_path,
        "query_string": query_string,
        "headers": list(request.headers),
        "state": {},
        CLIENT_GONE: asyncio.get_running_loop().create_future(),
    }


def _address(name: Any) -> tuple[str, int] | None:
    """Return the host and port of a socket's name; a UNIX domain socket has none."""
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None
