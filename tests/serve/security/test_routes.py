"""Paths written in other ways, as attackers write them: no spelling of a path passes a guard that its route has."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from halfserve.serve.http.http_options import HttpOptions
from halfserve.serve.http.rest_server import RestServer
from halfserve.serve.http.routing.route_table import GuardedRoute
from halfserve.serve.protocol.rpc import Api, Role
from halfserve.serve.security.restricted_apis import restricted_group
from halfserve.serve.security.security import Security
from halfserve.serve.security.security_options import SecurityOptions
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.running_server import WAIT_S, RunningServer, running_server
from tests.serve.security.guarded import tokens_in

KEY = "restricted-key: let-me\r\n"
RESTRICTED = (restricted_group(f"{','.join(Api)}:restricted-key=let-me"),)
REFUSED = {400, 401, 403, 404, 405}
CONTROLS = ("%0a", "%0d", "%0d%0a", "%00", "%09", "%0b", "%0c", "%1c", "%1f", "%7f", "%c2%85", "%e2%80%a8", "%e2%80%a9")


def spellings(path: str) -> list[str]:
    """Targets of a request line that a careless server may take for the path."""
    middle = path.rindex("/")
    return [
        *(
            path + ending
            for ending in (*CONTROLS, "/", "//", "/.", "%20", "%2f", "%3f", "%23", "%ff", "%", ";x", "?x=1", "#x", "%250a")
        ),
        *(start + path for start in ("/", "//", "/.", "/x/..", "%2f", "%0a", "http://127.0.0.1", "//127.0.0.1")),
        *(path[:middle] + inside + path[middle:] for inside in ("/", "/.", "/x/..", "%0a", "/%2e", "/%2e%2e/x")),
        path[:middle] + "%2f" + path[middle + 1 :],
        path[:middle] + "%252f" + path[middle + 1 :],
        path[:middle] + "\\" + path[middle + 1 :],
        path.upper(),
        "".join(f"%{ord(character):02x}" if character != "/" else "/" for character in path),
        quote(quote("/" + path[1:].replace("v", "%76"), safe="/"), safe="/"),
    ]


class Port:
    """A listening HTTP port, and the routes behind it."""

    def __init__(self, port: int, routes: list[GuardedRoute]) -> None:
        self.port, self.routes = port, routes

    def ask(self, method: str, target: str, headers: str = "") -> tuple[int, str]:
        """Status and body of the answer to a request line that is sent as it is."""
        head = f"{method} {target} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}"
        body = "{}" if method == "POST" else ""
        with socket.create_connection(("127.0.0.1", self.port), WAIT_S) as peer, peer.makefile("rb") as answer:
            peer.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
            lines = answer.read().decode()
        return int(lines.split(" ", 2)[1]), lines.partition("\r\n\r\n")[2]

    def spelled(self) -> Iterator[tuple[GuardedRoute, str, str]]:
        """Every route with every method that may reach it, and every spelling of its path."""
        for route in self.routes:
            path = route.path.replace("{model}", "held").replace("{version}", "1").replace("{region}", "r")
            path = path.replace("{file}", "index.html")
            for target in [path, *spellings(path)]:
                yield route, route.served_methods[0], target
            for method in ("HEAD", "OPTIONS", "PUT", "get", "TRACE"):
                yield route, method, path


@contextmanager
def guarded_port(options: SecurityOptions) -> Iterator[tuple[Port, Port, RunningServer]]:
    """The ports of REST and of the metrics of a server with one model, and the server."""
    with running_server(lambda: [held_model(HeldBackend())]) as server:
        security = server.call(lambda: Security(options, server.core.figures.refuse))
        http = HttpOptions(port=0, metrics_port=0)
        rest = server.call(lambda: RestServer(server.core, server.service, "127.0.0.1", http, security.main))
        server.run(rest.start())
        try:
            yield Port(rest.port, rest.routes), Port(rest.metrics_port or 0, []), server
        finally:
            server.run(rest.stop(0.5))


def test_a_control_character_in_a_path_is_refused_on_every_port() -> None:
    with guarded_port(SecurityOptions(admin_port=0)) as (port, metrics, server):
        for control in CONTROLS:
            for path in (f"/v2/repository/models/held/unload{control}", f"/v2/models/he{control}ld", control):
                status, body = port.ask("POST", path)
                assert (status, body[:37]) == (400, '{"error":"the path has the control ch')
                assert "\n" not in body
            assert metrics.ask("GET", f"/metrics{control}")[0] == 400
        assert [model.name for model in server.core.models()] == ["held"]


def test_no_spelling_of_a_path_changes_a_server_with_an_admin_port() -> None:
    with guarded_port(SecurityOptions(admin_port=0)) as (port, _, server):
        changing = Port(port.port, [route for route in port.routes if route.access.is_admin])
        assert len(changing.routes) == 8
        reached = [
            (method, target, status)
            for _, method, target in changing.spelled()
            if (status := changing.ask(method, target)[0]) not in REFUSED
        ]
        assert reached == []
        assert [model.name for model in server.core.models()] == ["held"]


def test_no_spelling_of_a_path_reaches_a_restricted_api() -> None:
    with guarded_port(SecurityOptions(http_restricted=RESTRICTED)) as (port, *_):
        reached = [
            (method, target, status)
            for route, method, target in port.spelled()
            if route.access.api is not None and (status := port.ask(method, target)[0]) not in REFUSED
        ]
        assert reached == []
        assert port.ask("GET", "/v2/models/held/stats", KEY)[0] == 200


def test_no_spelling_of_a_path_does_without_a_token(tmp_path: Path) -> None:
    tokens_in(tmp_path / "tokens", alice=Role.INFER)
    with guarded_port(SecurityOptions(token_file=tmp_path / "tokens")) as (port, *_):
        reached = [
            (method, target, status)
            for route, method, target in port.spelled()
            if route.access.role is not None and (status := port.ask(method, target)[0]) not in {400, 401}
        ]
        assert reached == []
