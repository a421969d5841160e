from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

OUTSIDE = (torch.float32, torch.bfloat16, True)


def product() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


@pytest.fixture(autouse=True)
def outside_any_region(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test that leaves autocast in another state than it found; what torch's own regions leave is undone."""
    yield
    left = product(), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled("cpu", False)
    torch.set_autocast_dtype("cpu", torch.bfloat16)
    torch.clear_autocast_cache()
    assert left == OUTSIDE or "torch's" in request.node.name
