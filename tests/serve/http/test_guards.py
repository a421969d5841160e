from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from halfserve.serve.http.guards import BrowserGuard
from halfserve.serve.http.options import HttpOptions
from tests.serve.http.running_http import running_http
from tests.serve.running_server import RunningServer

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
        assert httpx.get(url, headers={"host": "GPU-box.example.:8000"}).status_code == 200
        assert httpx.get(url, headers={"host": "other.example"}).status_code == 403


@pytest.fixture(scope="module")
def exposed(server: RunningServer) -> Iterator[httpx.Client]:
    """A server that listens on every address, as in a container or behind a proxy, and knows none of its names."""
    options = HttpOptions(port=0, metrics_port=None)
    with running_http(server, options, host=ALL) as rest, httpx.Client(base_url=f"http://127.0.0.1:{rest.port}") as client:
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
