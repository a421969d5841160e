"""The CUDA driver's own interface, as far as it is used here: which devices there are, and memory that is shared or locked.

ONNX Runtime lists its CUDA provider wherever that is compiled in, and keeps the device's memory to itself, so the driver is
asked: https://docs.nvidia.com/cuda/cuda-driver-api/. Functions with `_v2` are those that cuda.h means by the name without it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

from serve.engine.device_faults import is_device_lost

DRIVER_NAMES = ("libcuda.so.1", "nvcuda.dll")
HANDLE_BYTES = 64
DEFAULT_STREAM = None
LAZY_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag that there is
CAPTURE_MODE_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle, which goes by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


_DEVICE_POINTER = ctypes.c_uint64
_ARGUMENTS = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGetCount": (ctypes.POINTER(ctypes.c_int),),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int),
    "cuCtxPushCurrent_v2": (ctypes.c_void_p,),
    "cuCtxPopCurrent_v2": (ctypes.POINTER(ctypes.c_void_p),),
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(_DEVICE_POINTER), _IpcHandle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (_DEVICE_POINTER,),
    "cuMemGetAddressRange_v2": (ctypes.POINTER(_DEVICE_POINTER), ctypes.POINTER(ctypes.c_size_t), _DEVICE_POINTER),
    "cuMemcpyDtoH_v2": (ctypes.c_void_p, _DEVICE_POINTER, ctypes.c_size_t),
    "cuMemcpyHtoD_v2": (_DEVICE_POINTER, ctypes.c_void_p, ctypes.c_size_t),
    "cuMemHostRegister_v2": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint),
    "cuMemHostUnregister": (ctypes.c_void_p,),
    "cuStreamSynchronize": (ctypes.c_void_p,),
    "cuThreadExchangeStreamCaptureMode": (ctypes.POINTER(ctypes.c_int),),
    "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}


class CudaError(Exception):
    """The driver refused a call; the text is its own."""


class CudaDriver:
    """The driver of this machine."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Start it for this process.

        Args:
            library: the driver's.

        Raises:
            CudaError: it cannot be used, as there is no device, say.
        """
        self._library = library
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._settled = threading.local()
        self._call("cuInit", 0)

    @property
    def device_count(self) -> int:
        """How many devices it offers; 0 where it cannot tell any more."""
        count = ctypes.c_int(0)
        with suppress(CudaError):
            self._call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def open_shared(self, handle: bytes, device_id: int) -> SharedDeviceMemory:
        """Open memory of another process.

        Args:
            handle: the HANDLE_BYTES of a cudaIpcMemHandle_t.
            device_id: where the memory lies.

        Raises:
            CudaError: the driver does not know such a handle, or this process made it itself.
        """
        context = self._context(device_id)
        pointer = _DEVICE_POINTER(0)
        given = _IpcHandle.from_buffer_copy(handle)
        self.call_within(context, "cuIpcOpenMemHandle_v2", ctypes.byref(pointer), given, LAZY_ENABLE_PEER_ACCESS)
        return SharedDeviceMemory(self, context, pointer.value)

    def settle_thread(self, device_id: int) -> None:
        """Let this thread use a device while another one records a CUDA graph there.

        Otherwise calls that allocate, free or copy are refused meanwhile, whoever makes them, and the recording is broken.

        Raises:
            CudaError: the device is lost, say.
        """
        if not hasattr(self._settled, "mode"):
            with self._within(self._context(device_id)):
                pass

    def lock_memory(self, address: int, size: int, device_id: int) -> None:
        """Keep memory of this process where it is, so that a device copies from it by itself. Undo it before it is freed.

        Raises:
            CudaError: no more memory may be locked, or some of it is.
        """
        self.call_within(self._context(device_id), "cuMemHostRegister_v2", address, size, 0)

    def unlock_memory(self, address: int, device_id: int) -> None:
        """Undo `lock_memory`. A lost device's memory is not locked any more."""
        with suppress(CudaError):
            self.call_within(self._context(device_id), "cuMemHostUnregister", address)

    def is_lost(self, device_id: int) -> bool:
        """Whether the device does nothing for this process any more."""
        try:
            self.call_within(self._context(device_id), "cuStreamSynchronize", DEFAULT_STREAM)
        except CudaError as error:
            return is_device_lost(error)
        return False

    def _context(self, device_id: int) -> ctypes.c_void_p:
        """The context that ONNX Runtime and torch use too; it stays for as long as the process."""
        context = self._contexts.get(device_id)
        if context is None:
            device, context = ctypes.c_int(0), ctypes.c_void_p()
            self._call("cuDeviceGet", ctypes.byref(device), device_id)
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._contexts[device_id] = context
        return context

    def call_within(self, context: ctypes.c_void_p, name: str, *arguments: Any) -> None:
        """Call a function that means the current context; this thread's is what it was before afterwards.

        Raises:
            CudaError: the driver refuses.
        """
        with self._within(context):
            self._call(name, *arguments)

    @contextmanager
    def _within(self, context: ctypes.c_void_p) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", context)
        try:
            if not hasattr(self._settled, "mode"):
                mode = ctypes.c_int(CAPTURE_MODE_THREAD_LOCAL)
                self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
                self._settled.mode = CAPTURE_MODE_THREAD_LOCAL
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise CudaError(f"{(text.value or b'unknown error').decode()} (CUDA error {code})")


class SharedDeviceMemory:
    """Memory of another process, on a device. It is closed when nobody holds it any more.

    A worker thread may read from it while its region is unregistered, so nobody closes it by hand. Used on any thread.
    """

    __slots__ = ("_context", "_driver", "_pointer")

    def __init__(self, driver: CudaDriver, context: ctypes.c_void_p, pointer: int) -> None:
        self._driver = driver
        self._context = context
        self._pointer = pointer

    @property
    def byte_size(self) -> int | None:
        """Bytes from its beginning to the end of what its owner allocated; None where the driver does not tell."""
        base, size = _DEVICE_POINTER(0), ctypes.c_size_t(0)
        try:
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), self._pointer)
        except CudaError:
            return None
        return base.value + size.value - self._pointer

    def read_into(self, offset: int, target: memoryview) -> None:
        """Copy bytes from `offset` on to the host.

        Raises:
            CudaError: they are not all there.
        """
        if target.nbytes:
            buffer = (ctypes.c_char * target.nbytes).from_buffer(target)
            self._call("cuMemcpyDtoH_v2", buffer, self._pointer + offset, target.nbytes)

    def write(self, offset: int, data: bytes) -> None:
        """Copy bytes from the host to `offset`.

        Raises:
            CudaError: there is no place for all of them.
        """
        if data:
            self._call("cuMemcpyHtoD_v2", self._pointer + offset, data, len(data))
            # The copy may only have been staged; the client, which reads as soon as it is answered, is another process.
            self._call("cuStreamSynchronize", DEFAULT_STREAM)

    def __del__(self) -> None:
        with suppress(CudaError):  # the device is lost, and the memory with it
            self._call("cuIpcCloseMemHandle", self._pointer)

    def _call(self, name: str, *arguments: Any) -> None:
        self._driver.call_within(self._context, name, *arguments)


@cache
def cuda_driver() -> CudaDriver | None:
    """The driver; None where there is none that can be used."""
    for name in DRIVER_NAMES:
        try:
            return CudaDriver(ctypes.CDLL(name))
        except (OSError, AttributeError, CudaError):
            continue
    return None


def device_count() -> int:
    """How many CUDA devices there are; 0 where there is no driver."""
    driver = cuda_driver()
    return 0 if driver is None else driver.device_count
