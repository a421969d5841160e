"""Sessions on a CUDA device beside one that records a CUDA graph there.

ONNX Runtime records with cudaStreamCaptureModeGlobal (cuda_graph.cc). Until that ends, threads that allocate or free memory of
the device are refused, unless their own mode is another; and whoever waits for the whole device, as opening a session does, is
refused in any case. Either breaks the recording. Where freeing a session with recordings is refused, its destructor throws, and
ends the process. See "Prohibited and Unhandled Operations" in https://docs.nvidia.com/cuda/cuda-c-programming-guide/, and
cudaThreadExchangeStreamCaptureMode in https://docs.nvidia.com/cuda/cuda-runtime-api/.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from serve.engine.cuda_driver import CudaError, cuda_driver
from serve.engine.execution.batch import lock_buffers


class Turns:
    """Who opens sessions and who records, so that nobody does both at a time. Any thread may ask."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._opening = 0
        self._recording = False

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Wait until nobody records, which takes milliseconds, and keep it so."""
        with self._changed:
            self._changed.wait_for(lambda: not self._recording)
            self._opening += 1
        try:
            yield
        finally:
            with self._changed:
                self._opening -= 1

    @contextmanager
    def recording(self) -> Iterator[bool]:
        """Whether it may be recorded now: opening a session can take minutes, for which no batch should wait."""
        with self._changed:
            may = not (self._recording or self._opening)
            self._recording |= may
        try:
            yield may
        finally:
            if may:
                with self._changed:
                    self._recording = False
                    self._changed.notify_all()


TURNS = Turns()


def settle_thread(device_id: int) -> None:
    """Let this thread use the device while another one records there."""
    driver = cuda_driver()
    if driver is not None:
        with suppress(CudaError):  # the device is lost: what the caller does next says so
            driver.settle_thread(device_id)


class Tenant:
    """A session on a device, for its time there."""

    def __init__(self, session: Any, device_id: int) -> None:
        """A session that is open.

        Args:
            session: the runtime's.
            device_id: of the device.
        """
        self._session = session
        self._device_id = device_id

    def enter(self) -> None:
        """Settle the thread that is about to run the session, and have its batches put together in locked memory."""
        settle_thread(self._device_id)
        lock_buffers(self._device_id)

    def __del__(self) -> None:
        settle_thread(self._device_id)
        driver = cuda_driver()
        if driver is not None and driver.is_lost(self._device_id):
            # Nothing can be freed on a lost device, and the destructor of a recording would end the process over it.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._session))
