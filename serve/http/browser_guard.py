"""Keep other sites' scripts away: a browser that the user pointed elsewhere must not drive this server.

Two ways are closed. A page of another origin may send requests here; browsers name it in Origin. And a name of that page's own
may be made to resolve to this machine (DNS rebinding), which makes its requests look same-origin; the name is in Host.

Where the server listens on this machine alone, or was given its names, every request must be for a known name. Elsewhere a
proxy or a cluster may have any name for it, so only requests with an Origin must: programs send none. Over TLS the certificate
proves the name.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from serve.http.answers import error_answer

Message = MutableMapping[str, Any]
App = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]
SAFE = {"GET", "HEAD", "OPTIONS"}
HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


class BrowserGuard:
    """An ASGI application around another."""

    def __init__(self, app: App, *, host: str, allowed_hosts: Iterable[str]) -> None:
        """A guard.

        Args:
            app: what is guarded.
            host: the address that is listened on.
            allowed_hosts: names that requests may be for, besides localhost, addresses and this machine's own name.
        """
        self._app = app
        self._names = {name.lower().rstrip(".") for name in allowed_hosts}
        self._checks_names = bool(self._names) or _is_loopback(host)
        self._names |= {host.lower(), socket.gethostname().lower()}

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        """Answer a request, or refuse it."""
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1").lower()
        refusal = self._refusal(scope, host, headers)

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *HEADERS]
            await send(message)

        if refusal is None:
            await self._app(scope, receive, send_guarded)
        else:
            await error_answer(403, refusal)(scope, receive, send_guarded)

    def _refusal(self, scope: Message, host: str, headers: dict[bytes, bytes]) -> str | None:
        if self._checks_names and not self._known(host):
            return f"requests for host {host[:100]!r} are refused here; start the server with --http-allowed-host for its name"
        origin = headers.get(b"origin")
        if origin is None or scope["method"] in SAFE:
            return None
        _, _, own = origin.decode("latin-1").lower().partition("://")
        if own != host:
            return "a page of another origin may not send this request; use the server's own page, or no browser"
        if scope["scheme"] != "https" and not self._known(host):
            return f"pages at {host[:100]!r} may not send this request; start the server with --http-allowed-host for its name"
        return None

    def _known(self, host: str) -> bool:
        name = _name(host)
        if not name:  # a probe that speaks HTTP/1.0, such as a load balancer's; browsers always name one
            return True
        return name in self._names or name == "localhost" or name.endswith(".localhost") or _is_address(name)


def _name(host: str) -> str:
    """A Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)
