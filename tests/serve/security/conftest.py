from __future__ import annotations

from pathlib import Path

import pytest

from halfserve.serve.transports.transport import TransportName
from tests.serve.security.guarded import Certificates


@pytest.fixture(scope="session", params=list(TransportName))
def transport(request: pytest.FixtureRequest) -> TransportName:
    """Each transport in turn: one suite holds for both."""
    return TransportName(request.param)


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)
