from __future__ import annotations

import numpy as np
import pytest

from halfserve.serve.engine.execution.output_backlog import LARGE_BYTES
from halfserve.serve.protocol.large_bytes import join_unlocked


@pytest.mark.parametrize("count", [LARGE_BYTES // 2, LARGE_BYTES // 2 + 1, 3 * LARGE_BYTES])
def test_large_and_small_parts_are_joined_as_bytes_join_does(count: int) -> None:
    view = (np.arange(count) % 251).astype(np.uint8).data
    parts: list[bytes | memoryview] = [b"head", view, b"", b"between", bytes(view[::-1]), b""]
    joined = join_unlocked(parts)
    assert type(joined) is bytes
    assert joined == b"".join(parts)
