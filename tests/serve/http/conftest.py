from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from halfserve.serve.http.http_options import HttpOptions
from halfserve.serve.http.rest_server import RestServer
from tests.serve.http.running_http import running_http
from tests.serve.running_server import RunningServer


@pytest.fixture(scope="session")
def rest(server: RunningServer) -> Iterator[RestServer]:
    """HTTP on the models of `repository`, shared memory included."""
    with running_http(server, HttpOptions(port=0, metrics_port=0), shared_memory=True) as running:
        yield running


@pytest.fixture(scope="session")
def http(rest: RestServer) -> Iterator[httpx.Client]:
    """A client of `rest`."""
    with httpx.Client(base_url=f"http://127.0.0.1:{rest.port}", timeout=60) as client:
        yield client
