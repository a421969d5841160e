"""The CUDA driver's own interface: the devices, memory shared with other processes, and page-locked memory.

ONNX Runtime lists its CUDA provider wherever that is compiled in, and does not share its device memory, so the driver is used:
https://docs.nvidia.com/cuda/cuda-driver-api/. cuda.h maps names without `_v2` to the functions with it.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)


DRIVER_NAMES = ("libcuda.so.1", "nvcuda.dll")
HANDLE_BYTES = 64
MAX_NAME_BYTES = 256
DEFAULT_STREAM = None
LAZY_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag
# Errors that the context survives: too little memory, and calls that a recording prohibits.
_OUT_OF_MEMORY = 2
_OF_RECORDINGS = range(900, 909)
# How threads wait for a device: as the driver chooses, or asleep, which leaves their core to other threads.
SCHEDULE_AUTO, SCHEDULE_BLOCKING = 0, 4  # CU_CTX_SCHED_AUTO, CU_CTX_SCHED_BLOCKING_SYNC
CAPTURE_MODE_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
_DEVICE_POINTER = ctypes.c_uint64


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


_ARGUMENTS = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGetCount": (ctypes.POINTER(ctypes.c_int),),
    "cuDriverGetVersion": (ctypes.POINTER(ctypes.c_int),),
    "cuDeviceGetName": (ctypes.c_char_p, ctypes.c_int, ctypes.c_int),
    "cuDeviceComputeCapability": (ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDeviceTotalMem_v2": (ctypes.POINTER(ctypes.c_size_t), ctypes.c_int),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int),
    "cuCtxSetCurrent": (ctypes.c_void_p,),
    "cuCtxPushCurrent_v2": (ctypes.c_void_p,),
    "cuCtxPopCurrent_v2": (ctypes.POINTER(ctypes.c_void_p),),
    "cuMemAlloc_v2": (ctypes.POINTER(_DEVICE_POINTER), ctypes.c_size_t),
    "cuMemFree_v2": (_DEVICE_POINTER,),
    "cuIpcGetMemHandle": (ctypes.POINTER(_IpcHandle), _DEVICE_POINTER),
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(_DEVICE_POINTER), _IpcHandle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (_DEVICE_POINTER,),
    "cuMemGetAddressRange_v2": (ctypes.POINTER(_DEVICE_POINTER), ctypes.POINTER(ctypes.c_size_t), _DEVICE_POINTER),
    "cuMemcpyDtoH_v2": (ctypes.c_void_p, _DEVICE_POINTER, ctypes.c_size_t),
    "cuMemcpyHtoD_v2": (_DEVICE_POINTER, ctypes.c_void_p, ctypes.c_size_t),
    "cuMemcpyDtoD_v2": (_DEVICE_POINTER, _DEVICE_POINTER, ctypes.c_size_t),
    "cuMemHostRegister_v2": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint),
    "cuMemHostUnregister": (ctypes.c_void_p,),
    "cuStreamSynchronize": (ctypes.c_void_p,),
    "cuThreadExchangeStreamCaptureMode": (ctypes.POINTER(ctypes.c_int),),
    "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}


class CudaError(Exception):
    """The driver refused a call; the text is its own, and `code` its number of the error (0 where it is unknown)."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


class CudaDriver:
    def __init__(self, library: ctypes.CDLL) -> None:
        """Initialize the driver for this process.

        Raises:
            CudaError: the driver cannot be used, for example because there is no device.
        """
        self._library = library
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._settled = threading.local()
        self.blocking: set[int] = set()  # devices for which threads wait asleep
        self._call("cuInit", 0)

    @property
    def device_count(self) -> int:
        """Number of devices; 0 if the driver no longer answers."""
        count = ctypes.c_int(0)
        with suppress(CudaError):
            self._call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    @property
    def version(self) -> str:
        """Newest CUDA version that the driver supports, such as "13.0"."""
        number = ctypes.c_int(0)
        self._call("cuDriverGetVersion", ctypes.byref(number))
        return f"{number.value // 1000}.{number.value % 1000 // 10}"

    def describe(self, device_id: int) -> dict[str, str | int]:
        """Return a device's "name", "compute_capability", such as "9.0", and "memory_bytes".

        Raises:
            CudaError: there is no such device, or it is lost.
        """
        device, name, size = ctypes.c_int(0), ctypes.create_string_buffer(MAX_NAME_BYTES), ctypes.c_size_t(0)
        major, minor = ctypes.c_int(0), ctypes.c_int(0)
        self._call("cuDeviceGet", ctypes.byref(device), device_id)
        self._call("cuDeviceGetName", name, MAX_NAME_BYTES, device)
        self._call("cuDeviceComputeCapability", ctypes.byref(major), ctypes.byref(minor), device)
        self._call("cuDeviceTotalMem_v2", ctypes.byref(size), device)
        capability = f"{major.value}.{minor.value}"
        return {"name": name.value.decode(errors="replace"), "compute_capability": capability, "memory_bytes": size.value}

    def open_shared(self, handle: bytes, device_id: int) -> SharedDeviceMemory:
        """Open memory of another process on a device, by the HANDLE_BYTES of a cudaIpcMemHandle_t.

        Raises:
            CudaError: the handle is unknown, or this process has made it itself.
        """
        context = self._context(device_id)
        pointer = _DEVICE_POINTER(0)
        given = _IpcHandle.from_buffer_copy(handle)
        self.call_within(context, "cuIpcOpenMemHandle_v2", ctypes.byref(pointer), given, LAZY_ENABLE_PEER_ACCESS)
        return SharedDeviceMemory(self, context, pointer.value, "cuIpcCloseMemHandle")

    def allocate_shared(self, byte_size: int, device_id: int) -> tuple[SharedDeviceMemory, bytes]:
        """Allocate memory on a device, and return it with the handle by which others open it: the HANDLE_BYTES of a
        cudaIpcMemHandle_t.

        Raises:
            CudaError: the device has too little memory left, or is lost.
        """
        context = self._context(device_id)
        pointer, handle = _DEVICE_POINTER(0), _IpcHandle()
        self.call_within(context, "cuMemAlloc_v2", ctypes.byref(pointer), byte_size)
        memory = SharedDeviceMemory(self, context, pointer.value, "cuMemFree_v2")
        self.call_within(context, "cuIpcGetMemHandle", ctypes.byref(handle), pointer)
        return memory, bytes(handle)

    def settle_thread(self, device_id: int) -> None:
        """Make a device current for this thread, also while another thread records a CUDA graph there.

        ONNX Runtime sets no device in runs of sessions with CUDA graphs. While a thread records, the driver refuses calls that
        allocate, free or copy in any other thread that does not say so, and the recording breaks.

        Raises:
            CudaError: the driver refuses, for example because the device is lost.
        """
        self._call("cuCtxSetCurrent", self._context(device_id))
        self._settle()

    def lock_memory(self, address: int, size: int, device_id: int) -> None:
        """Page-lock memory of this process, so that a device copies from it directly. It must be unlocked before it is freed.

        Raises:
            CudaError: no more memory may be locked, or part of the range is locked already.
        """
        self.call_within(self._context(device_id), "cuMemHostRegister_v2", address, size, 0)

    def unlock_memory(self, address: int, device_id: int) -> None:
        """Undo `lock_memory`. A lost device's memory is unlocked already."""
        with suppress(CudaError):
            self.call_within(self._context(device_id), "cuMemHostUnregister", address)

    def copy_to_device(self, target: int, source: int, size: int, device_id: int) -> None:
        """Copy bytes from the host to a device. Other Python threads run meanwhile.

        Raises:
            CudaError: an address is unknown, or the device is lost.
        """
        self.call_within(self._context(device_id), "cuMemcpyHtoD_v2", target, source, size)

    def copy_to_host(self, target: int, source: int, size: int, device_id: int) -> None:
        """Copy bytes from a device to the host; see `copy_to_device`."""
        self.call_within(self._context(device_id), "cuMemcpyDtoH_v2", target, source, size)

    def copy_on_device(self, target: int, pieces: Iterable[tuple[int, int]], device_id: int) -> None:
        """Copy pieces of a device's memory one after the other to `target`, and wait for the end.

        `pieces`: the address and the size in bytes of each.

        Raises:
            CudaError: see `copy_to_device`.
        """
        with self._within(self._context(device_id)):
            for address, size in pieces:
                self._call("cuMemcpyDtoD_v2", target, address, size)
                target += size
            self._call("cuStreamSynchronize", DEFAULT_STREAM)

    def set_blocking_waits(self, device_id: int, *, on: bool) -> None:
        """Set how all threads of this process wait for a device: asleep, or as the driver chooses, which may keep a core busy.

        Raises:
            CudaError: the driver is too old, or refuses.
        """
        device = ctypes.c_int(0)
        self._call("cuDeviceGet", ctypes.byref(device), device_id)
        try:
            code = self._library.cuDevicePrimaryCtxSetFlags_v2(device, SCHEDULE_BLOCKING if on else SCHEDULE_AUTO)
        except AttributeError:
            raise CudaError("the driver cannot change how threads wait") from None
        if code:
            raise self._error(code)
        if on:
            self.blocking.add(device_id)
        else:
            self.blocking.discard(device_id)

    def is_lost(self, device_id: int) -> bool:
        """Return whether the device is lost to this process: after an asynchronous fault every call fails."""
        try:
            self.call_within(self._context(device_id), "cuStreamSynchronize", DEFAULT_STREAM)
        except CudaError as error:
            return error.code != _OUT_OF_MEMORY and error.code not in _OF_RECORDINGS
        return False

    def _context(self, device_id: int) -> ctypes.c_void_p:
        """Return the primary context, which ONNX Runtime and torch use too; it is kept for the life of the process."""
        context = self._contexts.get(device_id)
        if context is None:
            device, context = ctypes.c_int(0), ctypes.c_void_p()
            self._call("cuDeviceGet", ctypes.byref(device), device_id)
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._contexts[device_id] = context
        return context

    def call_within(self, context: ctypes.c_void_p, name: str, *arguments: Any) -> None:
        """Call a function in a context; the thread's current context is restored afterwards.

        Raises:
            CudaError: the driver refuses.
        """
        with self._within(context):
            self._call(name, *arguments)

    @contextmanager
    def _within(self, context: ctypes.c_void_p) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", context)
        try:
            self._settle()
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _settle(self) -> None:
        """Say that this thread's calls do not concern the recordings of others, once."""
        if not hasattr(self._settled, "mode"):
            mode = ctypes.c_int(CAPTURE_MODE_THREAD_LOCAL)
            self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
            self._settled.mode = CAPTURE_MODE_THREAD_LOCAL

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise self._error(code)

    def _error(self, code: int) -> CudaError:
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(code, ctypes.byref(text))
        return CudaError(f"{(text.value or b'unknown error').decode()} (CUDA error {code})", code)


class SharedDeviceMemory:
    """Device memory that processes share. For any thread; released with its last reference, as worker threads may still read
    it.
    """

    __slots__ = ("_context", "_driver", "_pointer", "_release")

    def __init__(self, driver: CudaDriver, context: ctypes.c_void_p, pointer: int, release: str) -> None:
        self._driver = driver
        self._context = context
        self._pointer = pointer
        self._release = release  # name of the driver's function that releases the memory

    @property
    def byte_size(self) -> int | None:
        """Bytes to the end of the owner's allocation; None if the driver does not know."""
        base, size = _DEVICE_POINTER(0), ctypes.c_size_t(0)
        try:
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), self._pointer)
        except CudaError:
            return None
        return base.value + size.value - self._pointer

    def address(self, offset: int) -> int:
        """Return the device's address of the byte at `offset`."""
        return self._pointer + offset

    def read_into(self, offset: int, target: memoryview) -> None:
        """Copy bytes from `offset` on to the host.

        Raises:
            CudaError: the range exceeds the memory.
        """
        if target.nbytes:
            buffer = (ctypes.c_char * target.nbytes).from_buffer(target)
            self._call("cuMemcpyDtoH_v2", buffer, self._pointer + offset, target.nbytes)

    def write(self, offset: int, data: bytes) -> None:
        """Copy bytes from the host to `offset`.

        Raises:
            CudaError: the range exceeds the memory.
        """
        if data:
            self._call("cuMemcpyHtoD_v2", self._pointer + offset, data, len(data))
            # The copy may only have been staged, and the client in another process reads as soon as it is answered.
            self._call("cuStreamSynchronize", DEFAULT_STREAM)

    def __del__(self) -> None:
        with suppress(CudaError):  # the device is lost, and the memory with it
            self._call(self._release, self._pointer)

    def _call(self, name: str, *arguments: Any) -> None:
        self._driver.call_within(self._context, name, *arguments)


@cache
def cuda_driver() -> CudaDriver | None:
    """Return the driver; None if none can be used."""
    for name in DRIVER_NAMES:
        try:
            return CudaDriver(ctypes.CDLL(name))
        except (OSError, AttributeError, CudaError):
            continue
    return None


def device_count() -> int:
    """Return the number of CUDA devices; 0 without a driver."""
    driver = cuda_driver()
    return 0 if driver is None else driver.device_count


Buffer = np.ndarray[tuple[int], np.dtype[np.uint8]]


def locked_buffer(size: int, device_id: int) -> Buffer | None:
    """Return a buffer of `size` bytes in page-locked memory of its own; None if that is not possible.

    A device copies from locked pages directly: they cannot be moved, so that no staging copy is made.
    """
    driver = cuda_driver()
    if driver is None:
        return None
    # mmap's default is a shared mapping: after a fork, private pages would move at the next write.
    buffer: Buffer = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    address = buffer.ctypes.data
    try:
        driver.lock_memory(address, size, device_id)
    except CudaError as error:
        _say_once(str(error))
        return None
    # The finalizer runs before the array frees its memory. At exit the system does the rest.
    weakref.finalize(buffer, driver.unlock_memory, address, device_id).atexit = False
    return buffer


def batch_buffer(size: int, device_id: int) -> Buffer:
    """Return a buffer of `size` bytes for batches on a device, in locked memory if possible."""
    # It is in this module, which is not compiled: mypyc reads no types of numpy, and takes a returned `Buffer | None` for None
    # alone.
    locked = locked_buffer(size, device_id)
    return np.empty(size, np.uint8) if locked is None else locked


@cache
def _say_once(reason: str) -> None:
    logger.warning("memory for batches cannot be locked (%s); copies to the device take a little longer", reason)
