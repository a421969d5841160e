"""A region on a CUDA device, which a client has allocated and lets others open by its handle.

Bytes go by way of the host, where batches are put together: a client need not fetch its tensors from the device to send them.
"""

from __future__ import annotations

from dataclasses import dataclass

from serve.engine.cuda_driver import HANDLE_BYTES, CudaError, SharedDeviceMemory, cuda_driver
from serve.engine.errors import BackendError, InferenceError, InvalidArgumentError, UnsupportedError, is_device_lost


@dataclass(frozen=True, kw_only=True)
class CudaRegion:
    """Memory of a client on a device.

    Attributes:
        name: that requests use.
        device_id: of the device.
        byte_size: of the region.
        memory: that holds it.
    """

    name: str
    device_id: int
    byte_size: int
    memory: SharedDeviceMemory

    def read_into(self, offset: int, target: memoryview) -> None:
        """Put bytes of the region where they are wanted.

        Raises:
            InvalidArgumentError: the driver cannot read them.
            BackendError: the device is lost.
        """
        try:
            self.memory.read_into(offset, target)
        except CudaError as error:
            raise self._failure(error) from error

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Put bytes into the region.

        Raises:
            InvalidArgumentError: the driver cannot write them.
            BackendError: the device is lost.
        """
        try:
            self.memory.write(offset, bytes(data))
        except CudaError as error:
            raise self._failure(error) from error

    def _failure(self, error: CudaError) -> InferenceError:
        if is_device_lost(error):
            return BackendError(f"the CUDA device was lost: {error}")
        return InvalidArgumentError(
            f"CUDA shared memory region {self.name!r} cannot be reached: {error}; keep the memory until it is unregistered"
        )


def has_cuda() -> bool:
    """Whether there is a device that could hold regions."""
    driver = cuda_driver()
    return driver is not None and driver.device_count > 0


def open_cuda_region(name: str, raw_handle: bytes, device_id: int, byte_size: int) -> CudaRegion:
    """Open a region.

    Raises:
        UnsupportedError: there is no CUDA device.
        InvalidArgumentError: the handle is none, the memory cannot be opened, or it is smaller than the region.
    """
    driver = cuda_driver()
    if driver is None or not (devices := driver.device_count):
        raise UnsupportedError("this server has no CUDA device; use system shared memory, or send the bytes")
    if len(raw_handle) != HANDLE_BYTES or not byte_size or not 0 <= device_id < devices:
        raise InvalidArgumentError(
            f"region {name!r} has a raw_handle of {len(raw_handle)} bytes, device_id {device_id} and byte_size {byte_size}; "
            f"expected the {HANDLE_BYTES} bytes of a cudaIpcMemHandle_t, one of {devices} devices, and at least one byte"
        )
    try:
        memory = driver.open_shared(raw_handle, device_id)
    except CudaError as error:
        raise InvalidArgumentError(
            f"the CUDA memory of region {name!r} cannot be opened on device {device_id}: {error}; expected the handle of "
            "memory that another process on this machine holds"
        ) from None
    size = memory.byte_size
    if size is not None and byte_size > size:
        raise InvalidArgumentError(f"region {name!r} has {byte_size} bytes, its CUDA memory {size}; register less")
    return CudaRegion(name=name, device_id=device_id, byte_size=byte_size, memory=memory)
