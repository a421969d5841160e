from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from halfserve.serve.http.guards import BrowserGuard
from halfserve.serve.http.http_options import HttpOptions, checked_origin
from halfserve.serve.http.rest_server import RestServer
from halfserve.serve.protocol.rpc import Role
from halfserve.serve.security.security import Security
from halfserve.serve.security.security_options import SecurityOptions
from tests.serve.http.running_http import running_http
from tests.serve.running_server import RunningServer
from tests.serve.security.guarded import tokens_in

ALL = "0.0.0.0"  # noqa: S104  (as an exposed server does)


def test_another_origins_page_may_not_post(http: httpx.Client) -> None:
    answer = http.post("/v2/repository/index", headers={"origin": "https://evil.example"})
    assert answer.status_code == 403
    assert answer.json() == {
        "error": "a page of another origin may not send this request; use the server's own page, or no browser"
    }
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("origin", ["null", "http://127.0.0.1:1", "http://127.0.0.1.evil.example", "http://["])
def test_nor_may_a_page_without_one_or_of_another_port(http: httpx.Client, origin: str) -> None:
    assert http.post("/v2/repository/index", headers={"origin": origin}).status_code == 403


def test_the_servers_own_page_may(http: httpx.Client) -> None:
    own = str(http.base_url).rstrip("/")
    assert http.post("/v2/repository/index", headers={"origin": own}).status_code == 200


def test_a_name_that_was_made_to_lead_here_is_refused(http: httpx.Client) -> None:
    answer = http.get("/ui/state", headers={"host": "rebound.example"})
    assert answer.status_code == 403
    assert answer.json()["error"].startswith("requests for host 'rebound.example' are refused here; start the server with")


@pytest.mark.parametrize("host", ["localhost:8000", "LOCALHOST", "127.0.0.1", "[::1]:80", "10.1.2.3:99", "a.localhost"])
def test_addresses_and_localhost_are_no_names(http: httpx.Client, host: str) -> None:
    assert http.get("/v2/health/live", headers={"host": host}).status_code == 200


def test_a_probe_of_http_1_0_names_no_host(http: httpx.Client) -> None:
    with socket.create_connection((http.base_url.host, http.base_url.port or 80)) as peer, peer.makefile("rb") as answer:
        peer.sendall(b"GET /v2/health/ready HTTP/1.0\r\n\r\n")  # HAProxy's `option httpchk GET /v2/health/ready`
        assert answer.readline() == b"HTTP/1.1 200 OK\r\n"


def test_a_page_of_another_origin_is_refused_without_a_host_too(http: httpx.Client) -> None:
    headers = {"host": "", "origin": "https://evil.example"}
    assert http.get("/v2/health/live", headers=headers).status_code == 200
    assert http.post("/v2/repository/index", headers=headers).status_code == 403


def test_names_may_be_allowed(server: RunningServer) -> None:
    options = HttpOptions(port=0, metrics_port=None, allowed_hosts=("gpu-box.example",))
    with running_http(server, options) as rest:
        url = f"http://127.0.0.1:{rest.port}/v2/health/live"
        assert httpx.get(url, headers={"host": "GPU-box.example.:8000"}, timeout=60).status_code == 200
        assert httpx.get(url, headers={"host": "other.example"}, timeout=60).status_code == 403


@pytest.fixture(scope="module")
def exposed(server: RunningServer) -> Iterator[httpx.Client]:
    """A server that listens on every address, as in a container or behind a proxy, and knows none of its names."""
    options = HttpOptions(port=0, metrics_port=None)
    with (
        running_http(server, options, host=ALL) as rest,
        httpx.Client(base_url=f"http://127.0.0.1:{rest.port}", timeout=60) as client,
    ):
        yield client


def test_a_page_under_an_unknown_name_changes_nothing(exposed: httpx.Client) -> None:
    headers = {"host": "evil.example:8000", "origin": "http://evil.example:8000"}
    answer = exposed.post("/v2/repository/models/mlp/unload", headers=headers)
    assert answer.status_code == 403
    assert "pages at 'evil.example:8000' may not send this request; start the server with --http-allowed-host" in answer.text


@pytest.mark.parametrize("host", [socket.gethostname(), "localhost:8000", "192.0.2.7:8000"])
def test_its_own_page_may_by_name_and_address(exposed: httpx.Client, host: str) -> None:
    headers = {"host": host, "origin": f"http://{host}"}
    assert exposed.post("/v2/repository/index", headers=headers).status_code == 200


def test_over_tls_the_certificate_has_proved_the_name() -> None:
    async def answer(_: Any, __: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b""})

    async def ask(scheme: str) -> int:
        transport = httpx.ASGITransport(BrowserGuard(answer, host=ALL, allowed_hosts=()))
        async with httpx.AsyncClient(transport=transport) as client:
            url = f"{scheme}://models.example"
            return (await client.post(url, headers={"origin": url})).status_code

    assert [asyncio.run(ask(scheme)) for scheme in ("https", "http")] == [200, 403]


def test_proxies_may_have_any_name_for_an_exposed_server(exposed: httpx.Client) -> None:
    assert exposed.post("/v2/repository/index", headers={"host": "models"}).status_code == 200


def test_answers_are_not_taken_for_what_they_are_not(http: httpx.Client) -> None:
    headers = http.get("/v2").headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == "same-origin"


APP = "https://app.example"
PREFLIGHT = {"origin": APP, "access-control-request-method": "POST", "access-control-request-headers": "authorization,x-own"}
STATISTICS = "/v2/models/mlp/stats"


@pytest.fixture(scope="module")
def shared(server: RunningServer) -> Iterator[httpx.Client]:
    """A server that takes requests of one other origin's pages."""
    options = HttpOptions(port=0, metrics_port=None, allowed_origins=(APP,))
    with running_http(server, options) as rest, httpx.Client(base_url=f"http://127.0.0.1:{rest.port}", timeout=60) as client:
        yield client


def test_a_page_of_an_allowed_origin_may_ask_and_read(shared: httpx.Client) -> None:
    permission = shared.options("/v2/models/mlp/infer", headers=PREFLIGHT)
    assert permission.status_code == 200
    assert permission.headers["access-control-allow-origin"] == APP
    assert permission.headers["access-control-allow-headers"] == "authorization,x-own"
    assert "access-control-allow-credentials" not in permission.headers
    for answer in (
        shared.get(STATISTICS, headers={"origin": APP}),
        shared.post("/v2/repository/index", headers={"origin": APP}),
        shared.post("/v1/embeddings", headers={"origin": APP}),  # errors, too
    ):
        assert answer.headers["access-control-allow-origin"] == APP
        assert "Origin" in answer.headers["vary"]
        assert "access-control-allow-credentials" not in answer.headers


def test_pages_of_other_origins_may_not(shared: httpx.Client) -> None:
    for origin in (f"{APP}.evil.example", "http://app.example", "null", f"{APP}:8443"):
        permission = shared.options("/v2/models/mlp/infer", headers={**PREFLIGHT, "origin": origin})
        assert permission.status_code == 400
        assert "access-control-allow-origin" not in permission.headers
        assert "access-control-allow-origin" not in shared.get(STATISTICS, headers={"origin": origin}).headers
        assert shared.post("/v2/repository/index", headers={"origin": origin}).status_code == 403


@pytest.mark.parametrize(
    "path", ["/v2/repository/models/mlp/unload", "/v2/logging", "/metrics", "/v2/systemsharedmemory/unregister"]
)
def test_no_other_origin_changes_the_server(shared: httpx.Client, path: str) -> None:
    assert shared.post(path, headers={"origin": APP}).status_code == 403
    assert "access-control-allow-origin" not in shared.options(path, headers=PREFLIGHT).headers


def test_all_origins_may_be_allowed(server: RunningServer) -> None:
    options = HttpOptions(port=0, metrics_port=None, allowed_origins=("*",))
    with running_http(server, options) as rest:
        url = f"http://127.0.0.1:{rest.port}"
        answer = httpx.post(f"{url}/v2/repository/index", headers={"origin": "https://any.example"}, timeout=60)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")
        rebound = httpx.get(
            f"{url}{STATISTICS}", headers={"origin": "https://any.example", "host": "rebound.example"}, timeout=60
        )
        assert rebound.status_code == 403


def test_a_preflight_needs_no_token_and_its_request_does(server: RunningServer, tmp_path: Path) -> None:
    tokens_in(tmp_path / "tokens", alice=Role.INFER)
    security = server.call(lambda: Security(SecurityOptions(token_file=tmp_path / "tokens"), server.core.figures.refuse))
    options = HttpOptions(port=0, metrics_port=None, allowed_origins=(APP,))
    rest = server.call(lambda: RestServer(server.core, server.service, "127.0.0.1", options, security.main))
    server.run(rest.start())
    try:
        url = f"http://127.0.0.1:{rest.port}{STATISTICS}"
        assert httpx.options(url, headers=PREFLIGHT, timeout=60).status_code == 200
        refused = httpx.get(url, headers={"origin": APP}, timeout=60)
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, APP)
    finally:
        server.run(rest.stop(0.5))


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("https://App.example", "https://app.example"),
        ("https://app.example:443", "https://app.example"),
        ("http://app.example:8080", "http://app.example:8080"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("*", "*"),
    ],
)
def test_an_origin_is_read_as_browsers_write_it(text: str, origin: str) -> None:
    assert checked_origin(text) == origin


@pytest.mark.parametrize(
    "text",
    ["app.example", "null", "https://", "https://a.example/path", "https://u@a.example", "ftp://a", "https://a:x", "https://*"],
)
def test_what_is_no_origin_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no origin; expected 'https://NAME'"):
        checked_origin(text)
