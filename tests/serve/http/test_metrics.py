from __future__ import annotations

import httpx

from serve.http.options import HttpOptions
from serve.http.rest_server import RestServer
from tests.serve.http.running_http import running_http
from tests.serve.running_server import RunningServer


def test_metrics_are_on_both_ports(rest: RestServer) -> None:
    for port in (rest.port, rest.metrics_port):
        answer = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=20)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain")
        assert "halfserve_http_connections " in answer.text
        assert 'nv_inference_request_success{model="mlp",version="1"}' in answer.text


def test_the_metrics_port_has_nothing_else(rest: RestServer) -> None:
    for path in ("/", "/v2", "/ui/state", "/openapi.json"):
        assert httpx.get(f"http://127.0.0.1:{rest.metrics_port}{path}").status_code == 404


def test_there_may_be_no_metrics_port_and_no_page(server: RunningServer) -> None:
    with running_http(server, HttpOptions(port=0, metrics_port=None, page=False)) as rest:
        assert rest.metrics_port is None
        assert httpx.get(f"http://127.0.0.1:{rest.port}/").status_code == 404
        assert httpx.get(f"http://127.0.0.1:{rest.port}/v2").status_code == 200
