"""Whether this machine has a CUDA device. The driver is asked: ONNX Runtime lists the provider wherever it is compiled in."""

from __future__ import annotations

import ctypes
from functools import cache

DRIVER_NAMES = ("libcuda.so.1", "nvcuda.dll")


@cache
def device_count() -> int:
    """How many CUDA devices the driver offers; 0 where there is no driver."""
    for name in DRIVER_NAMES:
        try:
            driver = ctypes.CDLL(name)
        except OSError:
            continue
        count = ctypes.c_int(0)
        if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0:
            return count.value
    return 0
