"""Memory that a device copies from by itself: its pages cannot be moved, so no other copy is made of them on the way."""

from __future__ import annotations

import logging
import mmap
import weakref
from functools import cache

import numpy as np

from serve.engine.cuda_driver import CudaError, cuda_driver

logger = logging.getLogger(__name__)

Buffer = np.ndarray[tuple[int], np.dtype[np.uint8]]


def locked_buffer(size: int, device_id: int) -> Buffer | None:
    """Make a buffer of pages of its own, which are locked for as long as it lives; None where that cannot be.

    Args:
        size: in bytes, at least one.
        device_id: the CUDA device that copies from it.
    """
    driver = cuda_driver()
    if driver is None:
        return None
    # A map that is shared, as it is by default: where a process forks, pages of its own are copied when it next writes to them.
    buffer: Buffer = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    address = buffer.ctypes.data
    try:
        driver.lock_memory(address, size, device_id)
    except CudaError as error:
        _say_once(str(error))
        return None
    # An array calls back before it lets its memory go. At the process's end the system does that.
    weakref.finalize(buffer, driver.unlock_memory, address, device_id).atexit = False
    return buffer


@cache
def _say_once(reason: str) -> None:
    logger.warning("memory for batches cannot be locked (%s); copies to the device take a little longer", reason)
