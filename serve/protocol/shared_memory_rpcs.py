"""The RPCs that register shared memory."""

from __future__ import annotations

from protos import inference_pb2 as pb
from serve.engine.errors import NotFoundError, UnsupportedError
from serve.protocol.shared_memory import SharedMemory


class SharedMemoryRpcs:
    """System regions as asked for; of CUDA regions there are none."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory

    def system_status(self, request: pb.SystemSharedMemoryStatusRequest) -> pb.SystemSharedMemoryStatusResponse:
        """The region of a name, or all."""
        response = pb.SystemSharedMemoryStatusResponse()
        for region in self._memory.regions(request.name):
            status = response.regions[region.name]
            status.name, status.key = region.name, region.key
            status.offset, status.byte_size = region.offset, region.byte_size
        return response

    def system_register(self, request: pb.SystemSharedMemoryRegisterRequest) -> pb.SystemSharedMemoryRegisterResponse:
        """Open a region."""
        self._memory.register(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    def system_unregister(self, request: pb.SystemSharedMemoryUnregisterRequest) -> pb.SystemSharedMemoryUnregisterResponse:
        """Close a region, or all."""
        self._memory.unregister(request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    def cuda_status(self, request: pb.CudaSharedMemoryStatusRequest) -> pb.CudaSharedMemoryStatusResponse:
        """None."""
        if request.name:
            raise NotFoundError(f"CUDA shared memory region {request.name!r} is not registered; this server takes none")
        return pb.CudaSharedMemoryStatusResponse()

    def cuda_register(self, _: pb.CudaSharedMemoryRegisterRequest) -> pb.CudaSharedMemoryRegisterResponse:
        """Refuse."""
        raise UnsupportedError("this server takes no CUDA shared memory; use system shared memory, or send the bytes")

    def cuda_unregister(self, _: pb.CudaSharedMemoryUnregisterRequest) -> pb.CudaSharedMemoryUnregisterResponse:
        """Nothing is registered, so nothing is left: clients unregister all before they begin."""
        return pb.CudaSharedMemoryUnregisterResponse()
