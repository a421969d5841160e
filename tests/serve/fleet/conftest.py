from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """For all members of a cluster. Its path is short: it has room for the name of a Unix socket."""
    with TemporaryDirectory() as name:
        yield Path(name)
