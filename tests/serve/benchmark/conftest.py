from __future__ import annotations

from collections.abc import Iterator

import pytest

from halfserve import Client
from tests.serve.running_server import RunningServer


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    with Client(server.address) as connected:
        yield connected
