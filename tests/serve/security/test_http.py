"""The same over HTTP: the REST interface, the page and the metrics."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.http.http_options import HttpOptions
from halfserve.serve.http.rest_server import RestServer
from halfserve.serve.http.routing.error_forms import ErrorForm
from halfserve.serve.http.routing.route_table import GuardedRoute, RestRoute, RouteTable
from halfserve.serve.protocol.rpc import INFERENCE, METADATA, Role
from halfserve.serve.protocol.service import SERVICE
from halfserve.serve.security.file_reload import DAY_S
from halfserve.serve.security.memory_budget import MemoryBudget
from halfserve.serve.security.security import Security
from halfserve.serve.security.security_options import ClientLimits, SecurityOptions
from halfserve.serve.security.tokens import new_token
from halfserve.serve.transports.transport import TransportName
from tests.serve.engine.fakes import HOLD_S, HeldBackend, held_model
from tests.serve.running_server import WAIT_S, RunningServer, running_server
from tests.serve.security.guarded import (
    WATCH_S,
    Certificates,
    Clock,
    bearer,
    call,
    guarded_server,
    tokens_in,
    write_tokens,
)
from tests.serve.security.tenants import NOBODYS, OURS, THEIRS, models, tenants_in

INFER = "/v2/models/held/infer"
REQUEST = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}
WRONG = {"inputs": [{"name": "no_such_input", "datatype": "FP16", "shape": [3], "data": [1]}]}
ASKED = [
    ("POST", "/v2/models/{}/infer", REQUEST),
    ("POST", "/v2/models/{}/infer", WRONG),
    ("POST", "/v2/models/{}/versions/7/infer", REQUEST),
    ("POST", "/v2/models/{}/versions/x/infer", REQUEST),
    *(
        ("GET", f"/v2/models/{{}}{path}", None)
        for path in ("", "/ready", "/config", "/stats", "/versions/1", "/versions/x/ready")
    ),
    ("GET", "/ui/certificates/{}/1", None),
]
CHANGED = [
    ("GET", "/v2/models/{}/trace/setting", None),
    ("POST", "/v2/models/{}/trace/setting", {"trace_rate": "7"}),
    ("POST", "/v2/repository/models/{}/load", {}),
    ("POST", "/v2/repository/models/{}/unload", {}),
]
HEALTH = "/grpc.health.v1.Health/Check"
VERBOSE = "log_verbose_level"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(lambda: [held_model(HeldBackend())]) as running:
        yield running


@contextmanager
def guarded_http(
    server: RunningServer, options: SecurityOptions, verify: Any = True
) -> Iterator[tuple[httpx.Client, RestServer]]:
    """HTTP on the core of a running server, behind a guard."""
    scheme = "http" if options.tls is None else "https"
    security = server.call(lambda: Security(options, server.core.figures.refuse))
    http = HttpOptions(port=0, metrics_port=0)
    rest = server.call(lambda: RestServer(server.core, server.service, "127.0.0.1", http, security.main))
    server.run(rest.start())
    server.call(security.start)
    try:
        with httpx.Client(base_url=f"{scheme}://127.0.0.1:{rest.port}", timeout=60, verify=verify) as client:
            yield client, rest
    finally:
        server.call(security.close)
        server.run(rest.stop(0.5))


def status(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]


def headers_with(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def test_of_two_tokens_none_counts(server: RunningServer, tmp_path: Path) -> None:
    tokens = tokens_in(tmp_path / "tokens", alice=Role.INFER, scraper=Role.METRICS)
    with guarded_http(server, SecurityOptions(token_file=tmp_path / "tokens")) as (client, _):
        good, other = (("authorization", f"Bearer {tokens[name]}") for name in ("alice", "scraper"))
        for shown in ([good, other], [other, good], [good, good]):
            answer = client.post(INFER, json=REQUEST, headers=shown)
            assert status(answer) == (400, "the request has 2 authorization headers; expected one")
        assert client.post(INFER, json=REQUEST, headers=[good]).status_code == 200


def test_tokens_are_asked_for_but_not_by_health(server: RunningServer, tmp_path: Path) -> None:
    tokens = tokens_in(tmp_path / "tokens", alice=Role.INFER, scraper=Role.METRICS, root=Role.ADMIN)
    alice, scraper, root = (headers_with(tokens[name]) for name in ("alice", "scraper", "root"))
    with guarded_http(server, SecurityOptions(token_file=tmp_path / "tokens")) as (http, rest):
        assert http.get("/v2/health/live").status_code == 200
        assert http.get("/v2/health/ready").status_code == 200
        assert http.get("/").headers["content-type"].startswith("text/html")  # the page, which asks for the token itself
        assert http.get("/ui/state", headers={"x-requested-with": "page"}).headers.get_list("www-authenticate") == [
            'Bearer realm="halfserve"'
        ]
        for path in ("/v2", "/v2/models/held", "/metrics", "/openapi.json", "/ui/state", "/no/such/path"):
            refused = http.get(path)
            assert status(refused) == (
                401,
                "this server asks for a token; send it in the header 'Authorization: Bearer TOKEN'",
            )
            # Chromium reads only the first scheme of a line.
            assert refused.headers.get_list("www-authenticate") == [
                'Bearer realm="halfserve"',
                'Basic realm="halfserve", charset="UTF-8"',
            ]
        assert http.post(INFER, json=REQUEST).status_code == 401
        assert http.post(INFER, json=REQUEST, headers=alice).json()["outputs"][0]["data"] == [2]
        assert http.get("/metrics", headers=scraper).status_code == 200
        assert status(http.get("/metrics", headers=alice))[0] == 403
        assert status(http.get("/v2/logging", headers=alice)) == (
            403,
            "the token may not do this: it requires the role 'admin'",
        )
        assert http.get("/v2/logging", headers=root).status_code == 200
        metrics = f"http://127.0.0.1:{rest.metrics_port}/metrics"
        assert httpx.get(metrics, timeout=60).status_code == 401
        assert httpx.get(metrics, headers=scraper, timeout=60).status_code == 200


def test_a_browsers_password_is_a_token_too(server: RunningServer, tmp_path: Path) -> None:
    tokens = tokens_in(tmp_path / "tokens", alice=Role.INFER)
    with guarded_http(server, SecurityOptions(token_file=tmp_path / "tokens")) as (http, _):
        assert http.get("/ui/state", auth=("anybody", tokens["alice"])).json()["holder"] == "alice"
        assert http.get("/ui/state", auth=("alice", "x")).status_code == 401


def test_a_revoked_token_is_refused_on_a_connection_that_it_has_used(server: RunningServer, tmp_path: Path) -> None:
    alice = headers_with(tokens_in(tmp_path / "tokens", alice=Role.INFER)["alice"])
    with guarded_http(server, SecurityOptions(token_file=tmp_path / "tokens", watch_s=WATCH_S)) as (http, _):
        assert http.get("/v2", headers=alice).status_code == 200
        tokens_in(tmp_path / "tokens", alice=Role.INFER)
        while (answer := http.get("/v2", headers=alice)).status_code == 200:
            pass
        assert status(answer)[0] == 401


def test_what_changes_the_server_is_refused_where_it_has_a_port_of_its_own(server: RunningServer) -> None:
    with guarded_http(server, SecurityOptions(admin_port=0)) as (http, _):
        for path in (
            "/v2/repository/models/held/load",
            "/v2/repository/models/held/unload",
            "/v2/logging",
            "/v2/trace/setting",
        ):
            code, text = status(http.post(path, json={}))
            assert (code, text.partition(";")[0]) == (403, "RPCs that change the server are not served on this port")
        assert http.post("/v2/repository/index").status_code == 200


def test_one_client_may_not_send_more_than_its_rate(server: RunningServer) -> None:
    limits = ClientLimits(requests_per_s=0.5, burst=2)
    with guarded_http(server, SecurityOptions(client_limits=limits)) as (http, _):
        assert http.post(INFER, json=REQUEST).status_code == 200
        assert http.get("/v2").status_code == 200
        for refused in (http.post(INFER, json=REQUEST), http.get("/v2")):
            assert status(refused)[0] == 429
            assert refused.headers["retry-after"] in {"1", "2"}
        assert http.get("/v2/health/live").status_code == 200


def test_what_is_no_inference_request_counts_as_one(server: RunningServer) -> None:
    """It costs the server as much to find that out."""
    limits = ClientLimits(requests_per_s=0.001, burst=3)
    with guarded_http(server, SecurityOptions(client_limits=limits)) as (http, _):
        assert http.post(INFER, content=b"[no JSON").status_code == 400
        assert http.post("/v2/models/none/infer", json=REQUEST).status_code == 404
        assert http.get(INFER).status_code == 405
        for refused in (http.post(INFER, content=b"[no JSON"), http.get(INFER), http.post(INFER, json=REQUEST)):
            assert status(refused)[0] == 429


def test_https_and_a_new_certificate(server: RunningServer, certificates: Certificates) -> None:
    trust = ssl.create_default_context(cadata=certificates.trusted.decode())
    options = SecurityOptions(tls=certificates.options, watch_s=WATCH_S)
    with guarded_http(server, options, trust) as (http, rest):
        assert http.get("/v2").status_code == 200
        address = ("127.0.0.1", rest.port)
        old = ssl.get_server_certificate(address, timeout=60)
        certificates.renew()
        while ssl.get_server_certificate(address, timeout=60) == old:
            pass
        assert http.get("/v2").status_code == 200
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(f"http://127.0.0.1:{rest.port}/v2", timeout=60)


def test_every_path_has_a_role_of_its_own(server: RunningServer) -> None:
    rest = server.call(lambda: RestServer(server.core, server.service, "127.0.0.1", HttpOptions(port=0, metrics_port=None)))
    roles: dict[str, set[str]] = {}
    for route in rest.routes:
        roles.setdefault(route.access.role or "open", set()).add(route.path)
    assert roles[Role.ADMIN] == {route.path for route in rest.routes if route.access.is_admin}
    assert roles[Role.ADMIN] == {
        "/v2/logging",
        "/v2/trace/setting",
        "/v2/models/{model}/trace/setting",
        "/v2/repository/models/{model}/load",
        "/v2/repository/models/{model}/unload",
    }
    assert roles["open"] == {"/", "/docs", "/ui/files/{file}", "/v2/health/live", "/v2/health/ready"}
    assert roles[Role.METRICS] == {"/metrics"}
    assert all("sharedmemory" in path for path in roles[Role.SHARED_MEMORY])


def test_a_route_says_what_it_requires_and_its_path_only_once() -> None:
    async def answer(_: Request) -> Response:
        return Response()

    def table_of(*routes: RestRoute) -> RouteTable:
        return RouteTable([GuardedRoute(route, answer) for route in routes])

    with pytest.raises(TypeError, match="access"):
        RestRoute("GET", "/new")  # type: ignore[call-arg]
    new = RestRoute("GET", "/new", METADATA)
    with pytest.raises(ValueError, match="the routes of /new require different things"):
        table_of(new, RestRoute("POST", "/new", INFERENCE))
    with pytest.raises(ValueError, match="the routes of /new have the error forms"):
        table_of(new, RestRoute("POST", "/new", METADATA, form=ErrorForm.TEI))
    table = table_of(new, RestRoute("GET", "/new/{model}", METADATA))
    assert [table.find(path)[1] for path in ("/new", "/new/a", "/new/a\n")] == [{}, {"model": "a"}, {"model": "a\n"}]
    assert [table.find(path)[0] for path in ("/new\n", "/new/", "/new/a/", "/NEW", "/new/a/b", "new", "")] == [None] * 7
    with pytest.raises(ValueError, match="GET /new has two routes, expected one"):
        table_of(new, new)


class Site:
    """HTTP on a running server, and its clients by the names of their tokens."""

    def __init__(self, server: RunningServer, path: Path, clock: Clock, budget: MemoryBudget | None = None) -> None:
        self.server, self.path, self.clock = server, path, clock
        options = SecurityOptions(token_file=path, watch_s=WATCH_S)
        self.security = server.call(lambda: Security(options, server.core.figures.refuse, clock=clock))
        http = HttpOptions(port=0, metrics_port=0)
        make = partial(RestServer, server.core, server.service, "127.0.0.1", http, self.security.main, budget=budget)
        self.rest = server.call(make)
        server.run(self.rest.start())
        server.call(self.security.start)
        self.clients: dict[str, httpx.Client] = {}

    def client(self, name: str, token: str) -> httpx.Client:
        headers = {"authorization": f"Bearer {token}"}
        self.clients[name] = httpx.Client(base_url=f"http://127.0.0.1:{self.rest.port}", timeout=60, headers=headers)
        return self.clients[name]

    def outcome(self, who: str, method: str, path: str, body: object) -> tuple[int, str, dict[str, str]]:
        """Status, body and headers, without those that tell the time or the body's length."""
        answer = self.clients[who].request(method, path, json=body)
        headers = {name: value for name, value in answer.headers.items() if name not in {"date", "content-length"}}
        return answer.status_code, answer.text, headers

    def close(self) -> None:
        for client in self.clients.values():
            client.close()
        self.server.call(self.security.close)
        self.server.run(self.rest.stop(0.5))


@pytest.fixture(scope="module")
def running() -> Iterator[RunningServer]:
    with running_server(models) as server:
        yield server


@pytest.fixture(scope="module")
def site(running: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    path = tmp_path_factory.mktemp("tenants") / "tokens"
    tokens = tenants_in(path)
    made = Site(running, path, Clock())
    for name, token in tokens.items():
        made.client(name, token)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("who", "place"),
    [
        *(("tenant", place) for place in range(len(ASKED))),
        *(("manager", place) for place in range(len(ASKED), len(ASKED + CHANGED))),
    ],
)
def test_what_may_not_be_used_is_as_if_it_were_not_there(site: Site, who: str, place: int) -> None:
    method, path, body = (ASKED + CHANGED)[place]
    theirs = site.outcome(who, method, path.format(THEIRS), body)
    absent = site.outcome(who, method, path.format(NOBODYS), body)
    assert (theirs[0], theirs[1].replace(THEIRS, NOBODYS), theirs[2]) == absent
    assert theirs[0] in {400, 404}
    assert site.outcome(who, method, path.format(OURS), body) == site.outcome("root", method, path.format(OURS), body)
    if place < len(ASKED):
        assert absent == site.outcome("root", method, path.format(NOBODYS), body)


def test_lists_the_page_and_the_metrics_hold_what_may_be_used(site: Site) -> None:
    def index(who: str) -> list[str]:
        return [entry["name"] for entry in site.clients[who].post("/v2/repository/index").json()]

    def page(who: str) -> list[str]:
        return [entry["name"] for entry in site.clients[who].get("/ui/state").json()["models"]]

    def statistics(who: str) -> list[str]:
        return [entry["name"] for entry in site.clients[who].get("/v2/models/stats").json()["model_stats"]]

    for read in (index, page, statistics):
        assert read("tenant") == [OURS, "digits_v2"]
        assert read("root") == [OURS, "digits_v2", THEIRS]
    ours, everything = (site.clients[who].get("/metrics").text for who in ("scraper", "root"))
    assert 'model="digits_v2"' in ours
    assert THEIRS not in ours
    assert THEIRS in everything
    alone = f"http://127.0.0.1:{site.rest.metrics_port}/metrics"
    assert THEIRS not in httpx.get(alone, headers=site.clients["scraper"].headers, timeout=60).text


def test_the_page_of_some_models_shows_their_past(site: Site) -> None:
    page = site.rest._page
    assert page is not None
    site.server.call(page._history.look)

    def samples(who: str) -> list[int]:
        state = site.clients[who].get("/ui/state").json()
        return [len(entry["samples"]) > 0 for entry in state["models"]]

    assert samples("tenant") == [True, True]


def test_what_holds_for_all_models_is_not_changed_by_who_administers_some(site: Site) -> None:
    for path, change in (("/v2/trace/setting", {"trace_rate": "7"}), ("/v2/logging", {"log_info": False})):
        assert site.clients["manager"].post(path, json=change).status_code == 403
        assert site.clients["manager"].get(path).json() == site.clients["root"].get(path).json()


def test_a_token_ends_and_changes_its_rights_on_a_connection_that_is_open(running: RunningServer, tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "tokens"
    token, line = new_token("alice", [Role.INFER], models=[OURS], expires_s=clock.now_s + DAY_S)
    write_tokens(path, (token, line))
    site = Site(running, path, clock)
    try:
        alice = site.client("alice", token)
        assert (alice.get(f"/v2/models/{OURS}").status_code, alice.get(f"/v2/models/{THEIRS}").status_code) == (200, 404)
        path.write_text(line.replace(f"model={OURS}", f"model={THEIRS}"))
        while alice.get(f"/v2/models/{THEIRS}").status_code != 200:
            pass
        assert alice.get(f"/v2/models/{OURS}").status_code == 404
        clock.now_s += DAY_S
        for refused in (alice.get("/v2"), alice.post(f"/v2/models/{THEIRS}/infer", json=REQUEST)):
            assert refused.status_code == 401
            assert refused.json() == {"error": "the token has expired; ask the server's administrator for another"}
    finally:
        site.close()


def test_what_is_held_for_one_tenant_counts_for_all(tmp_path: Path) -> None:
    backend = HeldBackend(held=True)
    large = json.dumps(REQUEST).ljust(20_000)
    with running_server(lambda: [held_model(backend, OURS), held_model(HeldBackend(), THEIRS)]) as server:
        tokens = tenants_in(tmp_path / "tokens")
        site = Site(server, tmp_path / "tokens", Clock(), MemoryBudget(30_000))
        try:
            tenant, other = (site.client(name, tokens[name]) for name in ("tenant", "other"))
            with ThreadPoolExecutor() as apart:
                first = apart.submit(tenant.post, f"/v2/models/{OURS}/infer", content=large)
                assert backend.entered.wait(HOLD_S)
                assert other.post(f"/v2/models/{THEIRS}/infer", content=large).status_code == 503
                assert other.post(f"/v2/models/{THEIRS}/infer", json=REQUEST).status_code == 200  # less than its part
                backend.release.set()
                assert first.result().status_code == 200
            assert other.post(f"/v2/models/{THEIRS}/infer", content=large).status_code == 200
        finally:
            backend.release.set()
            site.close()


def log_settings(level: int) -> bytes:
    message = pb.LogSettingsRequest()
    message.settings[VERBOSE].uint32_param = level
    return message.SerializeToString()


def level(server: RunningServer) -> object:
    return server.call(lambda: server.service.observability.logs.as_values()[VERBOSE])


UNLOAD = pb.RepositoryModelUnloadRequest(model_name="held").SerializeToString()


@pytest.mark.parametrize(
    ("method", "message", "is_sent_before"),
    [
        pytest.param("LogSettings", log_settings(1), False, id="unary"),
        pytest.param("RepositoryModelUnload", UNLOAD, False, id="stream"),
        pytest.param("RepositoryModelUnload", UNLOAD, True, id="the end of a stream"),
    ],
)
def test_a_token_revoked_before_the_end_of_a_call_ends_it_unanswered(
    tmp_path: Path, transport: TransportName, method: str, message: bytes, is_sent_before: bool
) -> None:
    path = tmp_path / "tokens"
    root = bearer(tokens_in(path, root=Role.ADMIN)["root"])
    with (
        guarded_server(SecurityOptions(token_file=path, watch_s=WATCH_S), transport) as (server, security),
        grpc.insecure_channel(server.address) as channel,
    ):
        parts: SimpleQueue[bytes | None] = SimpleQueue()
        begun = channel.stream_unary(f"/{SERVICE}/{method}").future(iter(parts.get, None), metadata=root, timeout=WAIT_S)
        if is_sent_before:
            parts.put(message)
        call(channel, HEALTH)  # by now the server knows of the one before it
        tokens_in(path, other=Role.ADMIN)
        server.call(security.reload)
        if not is_sent_before:
            parts.put(message)
        parts.put(None)
        assert begun.exception(WAIT_S).code() is grpc.StatusCode.UNAUTHENTICATED
        assert level(server) == 0


def test_the_same_over_http(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    token = tokens_in(path, root=Role.ADMIN)["root"]
    with guarded_server(SecurityOptions(token_file=path, watch_s=WATCH_S)) as (server, security):
        options = HttpOptions(port=0, metrics_port=None)
        rest = server.call(lambda: RestServer(server.core, server.service, "127.0.0.1", options, security.main))
        server.run(rest.start())
        try:
            with socket.create_connection(("127.0.0.1", rest.port)) as peer:
                body = b'{"log_verbose_level": 1}'
                head = f"POST /v2/logging HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\n"
                peer.settimeout(WAIT_S)
                peer.sendall(f"{head}expect: 100-continue\r\ncontent-length: {len(body)}\r\n\r\n".encode())
                assert peer.recv(65536).startswith(b"HTTP/1.1 100 ")
                tokens_in(path, other=Role.ADMIN)
                server.call(security.reload)
                peer.sendall(body)
                assert peer.recv(65536).startswith(b"HTTP/1.1 401 ")
            assert level(server) == 0
        finally:
            server.run(rest.stop(0.5))
