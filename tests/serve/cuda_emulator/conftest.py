"""The emulated device for each scene, in order before and after it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator

import pytest

from halfserve.serve.engine.cuda_driver import DRIVER_NAMES


@pytest.fixture(scope="module")
def device() -> ctypes.CDLL:
    """The emulated one's own functions."""
    library = ctypes.CDLL(DRIVER_NAMES[0])
    library.emulated_log.restype = ctypes.c_char_p
    library.emulated_limit.argtypes = (ctypes.c_size_t,)
    library.emulated_locked_bytes.restype = ctypes.c_size_t
    return library


@pytest.fixture(autouse=True)
def healthy(device: ctypes.CDLL) -> Iterator[None]:
    gc.collect()
    device.emulated_log()
    yield
    device.emulated_fail(0)
    device.emulated_refuse_locking(0)
