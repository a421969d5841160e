from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from serve.http.options import HttpOptions
from serve.http.rest_server import RestServer
from serve.security.options import ClientLimits, SecurityOptions
from serve.security.roles import Role, path_role
from serve.security.security import Security
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.running_server import RunningServer, running_server
from tests.serve.security.guarded import WATCH_S, Certificates, tokens_in

INFER = "/v2/models/held/infer"
REQUEST = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}


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
        with httpx.Client(base_url=f"{scheme}://127.0.0.1:{rest.port}", timeout=20, verify=verify) as client:
            yield client, rest
    finally:
        server.call(security.close)
        server.run(rest.stop(0.5))


def status(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]


def bearer(token: str) -> dict[str, str]:
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
    alice, scraper, root = (bearer(tokens[name]) for name in ("alice", "scraper", "root"))
    with guarded_http(server, SecurityOptions(token_file=tmp_path / "tokens")) as (http, rest):
        assert http.get("/v2/health/live").status_code == 200
        assert http.get("/v2/health/ready").status_code == 200
        for path in ("/", "/v2", "/v2/models/held", "/metrics", "/openapi.json", "/ui/state", "/no/such/path"):
            refused = http.get(path)
            assert status(refused) == (401, "this server asks for a token; send 'authorization: Bearer <token>'")
            assert refused.headers["www-authenticate"].startswith('Bearer realm="halfserve", Basic realm="halfserve"')
        assert http.post(INFER, json=REQUEST).status_code == 401
        assert http.post(INFER, json=REQUEST, headers=alice).json()["outputs"][0]["data"] == [2]
        assert http.get("/metrics", headers=scraper).status_code == 200
        assert status(http.get("/metrics", headers=alice))[0] == 403
        assert status(http.get("/v2/logging", headers=alice)) == (
            403,
            "the token may not do this: it takes the role 'admin', which it does not have",
        )
        assert http.get("/v2/logging", headers=root).status_code == 200
        metrics = f"http://127.0.0.1:{rest.metrics_port}/metrics"
        assert httpx.get(metrics).status_code == 401
        assert httpx.get(metrics, headers=scraper).status_code == 200


def test_a_browsers_password_is_a_token_too(server: RunningServer, tmp_path: Path) -> None:
    tokens = tokens_in(tmp_path / "tokens", alice=Role.INFER)
    with guarded_http(server, SecurityOptions(token_file=tmp_path / "tokens")) as (http, _):
        assert http.get("/", auth=("anybody", tokens["alice"])).status_code == 200
        assert http.get("/", auth=("alice", "x")).status_code == 401


def test_a_revoked_token_is_refused_on_a_connection_that_it_has_used(server: RunningServer, tmp_path: Path) -> None:
    alice = bearer(tokens_in(tmp_path / "tokens", alice=Role.INFER)["alice"])
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
            assert (code, text.partition(";")[0]) == (403, "what changes the server is not served on this port")
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
        old = ssl.get_server_certificate(address, timeout=20)
        certificates.renew()
        while ssl.get_server_certificate(address, timeout=20) == old:
            pass
        assert http.get("/v2").status_code == 200
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(f"http://127.0.0.1:{rest.port}/v2")


def test_every_path_has_a_role_of_its_own(server: RunningServer) -> None:
    rest = server.call(lambda: RestServer(server.core, server.service, "127.0.0.1", HttpOptions(port=0, metrics_port=None)))
    roles: dict[str, set[str]] = {}
    for route in rest.routes:
        assert isinstance(route, Route)
        roles.setdefault(path_role(route.path) or "open", set()).add(route.path)
    assert roles[Role.ADMIN] == {
        "/v2/logging",
        "/v2/trace/setting",
        "/v2/models/{model}/trace/setting",
        "/v2/repository/models/{model}/load",
        "/v2/repository/models/{model}/unload",
    }
    assert roles["open"] == {"/v2/health/live", "/v2/health/ready"}
    assert roles[Role.METRICS] == {"/metrics"}
    assert all("sharedmemory" in path for path in roles[Role.SHARED_MEMORY])
    assert path_role("/v2/anything/new") is Role.ADMIN
