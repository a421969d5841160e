"""The RPCs that register shared memory."""

from __future__ import annotations

from protos import inference_pb2 as pb
from serve.protocol.cuda_region import CudaRegion
from serve.protocol.shared_memory import SharedMemory
from serve.protocol.system_region import SystemRegion


class SharedMemoryRpcs:
    """Regions as asked for."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory

    def system_status(self, request: pb.SystemSharedMemoryStatusRequest) -> pb.SystemSharedMemoryStatusResponse:
        """The region of a name, or all."""
        response = pb.SystemSharedMemoryStatusResponse()
        for region in self._memory.regions(request.name, SystemRegion):
            status = response.regions[region.name]
            status.name, status.key = region.name, region.key
            status.offset, status.byte_size = region.offset, region.byte_size
        return response

    def system_register(self, request: pb.SystemSharedMemoryRegisterRequest) -> pb.SystemSharedMemoryRegisterResponse:
        """Open a region."""
        self._memory.register_system(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    def system_unregister(self, request: pb.SystemSharedMemoryUnregisterRequest) -> pb.SystemSharedMemoryUnregisterResponse:
        """Close a region, or all of the system's."""
        self._memory.unregister(request.name, SystemRegion)
        return pb.SystemSharedMemoryUnregisterResponse()

    def cuda_status(self, request: pb.CudaSharedMemoryStatusRequest) -> pb.CudaSharedMemoryStatusResponse:
        """The region of a name, or all."""
        response = pb.CudaSharedMemoryStatusResponse()
        for region in self._memory.regions(request.name, CudaRegion):
            status = response.regions[region.name]
            status.name, status.device_id, status.byte_size = region.name, region.device_id, region.byte_size
        return response

    def cuda_register(self, request: pb.CudaSharedMemoryRegisterRequest) -> pb.CudaSharedMemoryRegisterResponse:
        """Open a region."""
        self._memory.register_cuda(request.name, request.raw_handle, request.device_id, request.byte_size)
        return pb.CudaSharedMemoryRegisterResponse()

    def cuda_unregister(self, request: pb.CudaSharedMemoryUnregisterRequest) -> pb.CudaSharedMemoryUnregisterResponse:
        """Close a region, or all of CUDA's."""
        self._memory.unregister(request.name, CudaRegion)
        return pb.CudaSharedMemoryUnregisterResponse()
