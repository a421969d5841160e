"""Register and unregister shared memory."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from protos import inference_pb2 as pb
from serve.http import json_fields as fields
from serve.http.answers import json_answer
from serve.http.message_json import to_json
from serve.http.request_body import BodyReader
from serve.http.rpcs import Rpcs

SYSTEM, CUDA = "/v2/systemsharedmemory", "/v2/cudasharedmemory"


class SharedMemoryRoutes:
    """System regions, and what is said about those of CUDA."""

    def __init__(self, rpcs: Rpcs, bodies: BodyReader) -> None:
        self._rpcs = rpcs
        self._bodies = bodies

    def routes(self) -> list[Route]:
        """All of them."""
        found = []
        for base, status, register, unregister in (
            (SYSTEM, self.system_status, self.system_register, self.system_unregister),
            (CUDA, self.cuda_status, self.cuda_register, self.cuda_unregister),
        ):
            region = base + "/region/{region}"
            found += [Route(f"{path}/status", status) for path in (base, region)]
            found += [Route(f"{path}/unregister", unregister, methods=["POST"]) for path in (base, region)]
            found.append(Route(f"{region}/register", register, methods=["POST"]))
        return found

    async def system_status(self, request: Request) -> Response:
        """The region of a name, or all."""
        return await self._status("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest(name=_region(request)))

    async def system_register(self, request: Request) -> Response:
        """Open a region."""
        content = fields.parse_object(await self._bodies.read_small(request))
        message = pb.SystemSharedMemoryRegisterRequest(
            name=_region(request),
            key=fields.text(content, "key", "the region"),
            offset=fields.whole(content, "offset", "the region", 0),
            byte_size=fields.whole(content, "byte_size", "the region"),
        )
        return await self._done("SystemSharedMemoryRegister", message)

    async def system_unregister(self, request: Request) -> Response:
        """Close a region, or all."""
        return await self._done("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest(name=_region(request)))

    async def cuda_status(self, request: Request) -> Response:
        """The region of a name, or all."""
        return await self._status("CudaSharedMemoryStatus", pb.CudaSharedMemoryStatusRequest(name=_region(request)))

    async def cuda_register(self, request: Request) -> Response:
        """Open a region."""
        content = fields.parse_object(await self._bodies.read_small(request))
        handle = fields.members(content, "raw_handle", "the region")
        message = pb.CudaSharedMemoryRegisterRequest(
            name=_region(request),
            raw_handle=fields.base64_bytes(handle, "b64", "raw_handle"),
            device_id=fields.whole(content, "device_id", "the region", 0),
            byte_size=fields.whole(content, "byte_size", "the region"),
        )
        return await self._done("CudaSharedMemoryRegister", message)

    async def cuda_unregister(self, request: Request) -> Response:
        """Close a region, or all."""
        return await self._done("CudaSharedMemoryUnregister", pb.CudaSharedMemoryUnregisterRequest(name=_region(request)))

    async def _status(self, rpc: str, message: Any) -> Response:
        response = await self._rpcs.call(rpc, message)
        return json_answer([to_json(region) for _, region in sorted(response.regions.items())])

    async def _done(self, rpc: str, message: Any) -> Response:
        await self._rpcs.call(rpc, message)
        return json_answer({})


def _region(request: Request) -> str:
    return str(request.path_params.get("region", ""))
