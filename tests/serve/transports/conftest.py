from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.conftest import load_repository
from tests.serve.running_server import TRANSPORTS, MakeTransport, RunningServer, running_server


@pytest.fixture(scope="session", params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> MakeTransport:
    """Each transport in turn: one suite holds for all of them."""
    return TRANSPORTS[request.param]


@pytest.fixture(scope="session")
def server(repository: Path, transport: MakeTransport) -> Iterator[RunningServer]:
    """A real server on `repository`, at `server.address`, over each transport."""
    with running_server(lambda: load_repository(repository), transport) as running:
        yield running
