"""The emulated device for each scene, in order before and after it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator

import pytest

from halfserve.serve.engine.cuda_driver import DRIVER_NAMES

DEVICES = 2
MEMORY_BYTES = 1 << 32  # of a device, unless a scene says less


@pytest.fixture(scope="module")
def device() -> ctypes.CDLL:
    """The emulated one's own functions."""
    library = ctypes.CDLL(DRIVER_NAMES[0])
    library.emulated_log.restype = ctypes.c_char_p
    library.emulated_limit.argtypes = (ctypes.c_size_t,)
    library.emulated_locked_bytes.restype = ctypes.c_size_t
    library.emulated_memory.argtypes = (ctypes.c_int, ctypes.c_size_t)
    library.emulated_used.restype = ctypes.c_size_t
    library.emulated_copied_ns.restype = ctypes.c_int64
    library.emulated_copy_rate.argtypes = (ctypes.c_double,)
    return library


@pytest.fixture(autouse=True)
def healthy(device: ctypes.CDLL) -> Iterator[None]:
    gc.collect()
    device.emulated_log()
    yield
    device.emulated_fail(0)
    device.emulated_blas(0, 0)
    device.emulated_copy_rate(0.0)
    device.emulated_refuse_locking(0)
    device.emulated_refuse_peers(0)
    for number in range(DEVICES):
        device.emulated_memory(number, MEMORY_BYTES)
