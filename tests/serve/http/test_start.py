from __future__ import annotations

import subprocess
import sys

import httpx
import pytest

from serve.http.options import HttpOptions
from serve.http.start import start_http
from serve.protocol.service import Service
from serve.transports.listening import BindError
from tests.serve.running_server import RunningServer


def test_without_options_there_is_none_and_nothing_is_imported() -> None:
    script = (
        "import asyncio, sys, serve.server\n"
        "from serve.http.start import start_http\n"
        "assert asyncio.run(start_http(None, None, 'localhost', None)) is None\n"
        "print([name for name in ('starlette', 'uvicorn', 'h11', 'anyio') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "[]"


def test_with_options_it_listens(server: RunningServer) -> None:
    service = server.call(lambda: Service(server.core, server_version="0"))
    rest = server.run(start_http(server.core, service, "localhost", HttpOptions(port=0, metrics_port=None)))
    assert rest is not None
    try:
        assert httpx.get(f"http://localhost:{rest.port}/v2").json()["version"] == "0"
        with pytest.raises(BindError, match="Address already in use; choose another --http-port"):
            server.run(start_http(server.core, service, "127.0.0.1", HttpOptions(port=rest.port, metrics_port=None)))
    finally:
        server.run(rest.stop(1))
