from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from halfserve.serve.transports.nghttp2.fairness import TransportLimits
from halfserve.serve.transports.nghttp2.server import Nghttp2Server
from tests.serve.conftest import load_repository
from tests.serve.running_server import TRANSPORTS, MakeTransport, RunningServer, running_server
from tests.serve.transports.nghttp2.http2_peer import Limited


@pytest.fixture(scope="session", params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> MakeTransport:
    """Each transport in turn: one suite holds for all of them."""
    return TRANSPORTS[request.param]


@pytest.fixture(scope="session")
def server(repository: Path, transport: MakeTransport) -> Iterator[RunningServer]:
    """A real server on `repository`, at `server.address`, over each transport."""
    with running_server(lambda: load_repository(repository), transport) as running:
        yield running


@pytest.fixture(scope="session")
def nghttp2(repository: Path) -> Iterator[RunningServer]:
    """A real server on `repository` over nghttp2 alone."""
    with running_server(lambda: load_repository(repository), Nghttp2Server) as running:
        yield running


@pytest.fixture
def limited(repository: Path) -> Iterator[Limited]:
    """Starts a server with limits of its own."""
    contexts = []

    def start(**limits: Any) -> RunningServer:
        make = partial(Nghttp2Server, limits=TransportLimits(sweep_s=0.01, **limits))
        contexts.append(running_server(lambda: load_repository(repository), make))
        return contexts[-1].__enter__()

    yield start
    for context in contexts:
        context.__exit__(None, None, None)
