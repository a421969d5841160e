"""The ASGI guards before the routes.

The route guard finds a request's route; the browser guard refuses other sites' scripts, and the token guard requests without a
valid token, by that route and never by the text of the path. `RouteAnswers` answers from the same route.

A page of another origin may make a browser send requests here; browsers name that origin in Origin. And a name of that page's
own may be made to resolve to this machine (DNS rebinding), so that its requests look same-origin; browsers name it in Host.

If the server listens on this machine alone, or was given its names, every request must be for a known name. Otherwise a proxy
or a cluster may use any name for it, so that only requests with an Origin must: programs send none. Over TLS the certificate
proves the name.

Pages of allowed origins may ask what the role `infer` permits (cross-origin resource sharing, CORS), but not with credentials
that the browser adds by itself.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from halfserve.serve.engine.errors import InferenceError, InvalidArgumentError, UnauthenticatedError
from halfserve.serve.http.responses import error_response, http_status
from halfserve.serve.http.routing.error_forms import FORM
from halfserve.serve.http.routing.route_table import GuardedRoute, RouteTable, ServedPath
from halfserve.serve.protocol.rpc import UNKNOWN_ROUTE, Access, Role
from halfserve.serve.protocol.service import Service
from halfserve.serve.security.gate import AccessGrant, Gate, client_name

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
SAFE = {"GET", "HEAD", "OPTIONS"}
HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
# Headers of an answer that pages of other origins may read.
EXPOSED = ("retry-after", "inference-header-content-length", "server-timing")
GRANT = "halfserve.grant"  # the key of the gate's AccessGrant in a request's scope
SERVED = "halfserve.served_path"  # the key of the route guard's ServedPath, or None, in a request's scope
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # control characters, and separators of lines and paragraphs
# For Basic, browsers ask their user for a name and a password; the password is the token. Each has a line of its own, as
# Chromium reads only the first scheme of a line. The page asks its user itself: a request with FROM_SCRIPT gets no Basic.
FROM_SCRIPT = b"x-requested-with"
CHALLENGES = ('Bearer realm="halfserve"', 'Basic realm="halfserve", charset="UTF-8"')


class RouteGuard:
    """Finds the route of each request, which the other guards and the answer are about; the outermost guard."""

    def __init__(self, app: App, table: RouteTable) -> None:
        self._app = app
        self._table = table

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *HEADERS]
            await send(message)

        path = scope["path"]
        control = None if path.isprintable() else CONTROL.search(path)
        if control is None:
            served, scope["path_params"] = self._table.find(path)
            scope[SERVED] = served
            if served is not None:
                scope[FORM] = served.form
            await self._app(scope, receive, send_guarded)
            return
        refusal = f"the path has the control character U+{ord(control[0]):04X}, expected none; send the path without it"
        await error_response(400, refusal, {"connection": "close"}, scope=scope)(scope, receive, send_guarded)


class RouteAnswers:
    """Answers a request from the route that the route guard has found."""

    def __init__(self, routes: Iterable[GuardedRoute]) -> None:
        self._routes = {(route.path, method): route.app for route in routes for method in route.served_methods}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        served = served_path(scope)
        if served is None:
            raise HTTPException(404)
        answer = self._routes.get((served.path, scope["method"]))
        if answer is None:
            raise HTTPException(405, headers={"Allow": ", ".join(served.routes)})
        await answer(scope, receive, send)


def served_path(scope: Message) -> ServedPath | None:
    """Return what is served at a request's path. Raises KeyError: the request has not passed the route guard."""
    served: ServedPath | None = scope[SERVED]
    return served


def required_access(scope: Message) -> Access:
    """Return what a request's route requires. Raises KeyError: the request has not passed the route guard."""
    served = served_path(scope)
    return UNKNOWN_ROUTE if served is None else served.access


class BrowserGuard:
    def __init__(self, app: App, *, host: str, allowed_hosts: Iterable[str], allowed_origins: Iterable[str] = ()) -> None:
        """Guard `app`, which is served at the address `host`.

        Args:
            app: ASGI application to guard.
            host: the address that is listened on.
            allowed_hosts: names that requests may be for, besides localhost, addresses and this machine's own name.
            allowed_origins: origins of pages that may send inference requests; "*" allows all.
        """
        self._app = app
        self._origins = frozenset(allowed_origins)
        # Outside the token guard: a preflight request has no token.
        self._shared: App = CORSMiddleware(
            app, self._origins, allow_methods=("GET", "POST"), allow_headers=("*",), expose_headers=EXPOSED
        )
        self._names = {name.lower().rstrip(".") for name in allowed_hosts}
        self._checks_names = bool(self._names) or _is_loopback(host)
        self._names |= {host.lower(), socket.gethostname().lower()}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1").lower()
        refusal = self._refusal(scope, host, headers)
        if refusal is None:
            answering = self._shared if self._is_shared(scope) else self._app
            await answering(scope, receive, send)
        else:
            await error_response(403, refusal, scope=scope)(scope, receive, send)

    def _refusal(self, scope: Message, host: str, headers: dict[bytes, bytes]) -> str | None:
        if self._checks_names and not self._is_known(host):
            return f"requests for host {host[:100]!r} are refused here; start the server with --http-allowed-host for its name"
        origin = headers.get(b"origin")
        if origin is None or scope["method"] in SAFE:
            return None
        if self._is_shared(scope) and ("*" in self._origins or origin.decode("latin-1") in self._origins):
            return None
        _, _, own = origin.decode("latin-1").lower().partition("://")
        if own != host:
            return "a page of another origin may not send this request; use the server's own page, or no browser"
        if scope["scheme"] != "https" and not self._is_known(host):
            return f"pages at {host[:100]!r} may not send this request; start the server with --http-allowed-host for its name"
        return None

    def _is_shared(self, scope: Message) -> bool:
        """Return whether pages of other origins may send the request."""
        return bool(self._origins) and required_access(scope).role in (None, Role.INFER)

    def _is_known(self, host: str) -> bool:
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0].rstrip(".")
        if not name:  # a probe that speaks HTTP/1.0, such as a load balancer's; browsers always name one
            return True
        return name in self._names or name == "localhost" or name.endswith(".localhost") or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


class TokenGuard:
    """Admits requests by their headers; one application per set of permitted models answers them."""

    def __init__(self, app_of: Callable[[Service], App], service: Service, gate: Gate) -> None:
        self._app_of = app_of
        self._app = app_of(service)
        self._service = service
        self._gate = gate
        self._restricted: dict[Service, App] = {}
        gate.on_change(self._restricted.clear)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        try:
            count = sum(name == b"authorization" for name, _ in scope["headers"])
            if count > 1:  # a proxy may have checked another one than this server would
                raise InvalidArgumentError(f"the request has {count} authorization headers; expected one")
            grant = self._gate.admit_route(required_access(scope), scope["headers"])
            grant.charge(peer_of(scope))
        except InferenceError as error:
            status, text, headers = http_status(error)
            headers["connection"] = "close"  # the body is not read
            response = error_response(status, text, headers, scope=scope)
            asked = CHALLENGES[: 1 if any(name == FROM_SCRIPT for name, _ in scope["headers"]) else None]
            for challenge in asked if isinstance(error, UnauthenticatedError) else ():
                response.headers.append("www-authenticate", challenge)
            await response(scope, receive, send)
            return
        scope[GRANT] = grant
        app = self._app
        if not grant.sees_all:
            service = grant.service(self._service)
            if service not in self._restricted:
                self._restricted[service] = self._app_of(service)
            app = self._restricted[service]
        served = served_path(scope)
        route = None if served is None else served.routes.get(scope["method"])
        await app(scope, receive if route is not None and route.declared.checks_token else _checked(grant, receive), send)


def _checked(grant: AccessGrant, receive: Receive) -> Receive:
    """Return a `receive` that checks the token again at the end of the body."""

    async def received() -> Message:
        message = await receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            grant.check()
        return message

    return received


def client_of(scope: Any) -> str:
    """Return the client that a request counts as; see `AccessGrant.client`."""
    grant: AccessGrant | None = scope.get(GRANT)
    return client_name(grant, peer_of(scope))


def peer_of(scope: Any) -> str:
    """Return the client's address, with its port."""
    client = scope.get("client")
    return "" if client is None else f"{client[0]}:{client[1]}"
