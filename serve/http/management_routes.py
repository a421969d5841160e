"""The REST routes of shared memory and of settings. Each calls the RPC of the same purpose, which does all checks."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.engine.errors import InvalidArgumentError
from halfserve.serve.http import json_bodies as fields
from halfserve.serve.http.request_body import BodyReader
from halfserve.serve.http.responses import json_response, message_dict
from halfserve.serve.http.routes import rpc_done, rpc_response
from halfserve.serve.http.routing.kserve_bodies import CudaRegionJson, LogSettingsJson, SystemRegionJson, TraceSettingsJson
from halfserve.serve.http.routing.operations import DONE, BodyContent, DescribedAnswer, RestOperation, Tag
from halfserve.serve.http.routing.route_table import MODEL, serves
from halfserve.serve.protocol.rpc import LOGGING, SHARED_MEMORY, TRACE
from halfserve.serve.protocol.service import Service

SYSTEM, CUDA = "/v2/systemsharedmemory", "/v2/cudasharedmemory"
REGION = "region/{region}"
ALL_OF = "All registered regions of {} shared memory"
SYSTEM_STATUS = list[pb.SystemSharedMemoryStatusResponse.RegionStatus]
CUDA_STATUS = list[pb.CudaSharedMemoryStatusResponse.RegionStatus]
LEVELS = "trace_level"  # the only setting with several values
TRACE_ERRORS = {400, 404, 501}


def _registration(name: str, region: Any) -> RestOperation:
    summary = "Register a region, so that requests may leave tensors in it"
    return RestOperation(name, Tag.SHARED_MEMORY, summary, DONE, takes=(BodyContent(region),), errors={409})


def _listing(name: str, summary: str, regions: Any) -> RestOperation:
    answer = DescribedAnswer("The regions.", BodyContent(regions))
    return RestOperation(name, Tag.SHARED_MEMORY, summary, answer, errors={404})


def _forgotten(name: str, which: str) -> RestOperation:
    return RestOperation(name, Tag.SHARED_MEMORY, f"Forget {which}", DONE)


def _settings(name: str, summary: str, kind: Any, errors: AbstractSet[int], *, is_change: bool = False) -> RestOperation:
    answer = DescribedAnswer("All settings, as they are now.", BodyContent(kind))
    return RestOperation(name, Tag.SETTINGS, summary, answer, takes=(BodyContent(kind),) if is_change else (), errors=errors)


def _trace(name: str) -> RestOperation:
    return _settings(name, "What is traced", TraceSettingsJson, TRACE_ERRORS)


def _trace_change(name: str) -> RestOperation:
    summary = "Change what is traced; null gives a setting its default back"
    return _settings(name, summary, TraceSettingsJson, TRACE_ERRORS | {409}, is_change=True)


class SharedMemoryRoutes:
    """Routes of shared-memory regions, of the system and of CUDA devices."""

    def __init__(self, service: Service, bodies: BodyReader) -> None:
        self._bodies = bodies
        self._call, self._done = partial(rpc_response, service), partial(rpc_done, service)

    @serves("POST", f"{SYSTEM}/{REGION}/register", SHARED_MEMORY, _registration("registerSystem", SystemRegionJson))
    async def system_register(self, request: Request) -> Response:
        content = fields.parse_object(await self._bodies.read_small(request))
        message = pb.SystemSharedMemoryRegisterRequest(
            name=_region(request),
            key=fields.text(content, "key", "the region"),
            offset=fields.whole(content, "offset", "the region", 0),
            byte_size=fields.whole(content, "byte_size", "the region"),
        )
        return await self._done(request, "SystemSharedMemoryRegister", message)

    @serves("POST", f"{CUDA}/{REGION}/register", SHARED_MEMORY, _registration("registerCuda", CudaRegionJson))
    async def cuda_register(self, request: Request) -> Response:
        content = fields.parse_object(await self._bodies.read_small(request))
        handle = fields.members(content, "raw_handle", "the region")
        message = pb.CudaSharedMemoryRegisterRequest(
            name=_region(request),
            raw_handle=fields.base64_bytes(handle, "b64", "raw_handle"),
            device_id=fields.whole(content, "device_id", "the region", 0),
            byte_size=fields.whole(content, "byte_size", "the region"),
        )
        return await self._done(request, "CudaSharedMemoryRegister", message)

    @serves("GET", f"{SYSTEM}/status", SHARED_MEMORY, _listing("systemRegions", ALL_OF.format("system"), SYSTEM_STATUS))
    @serves("GET", f"{SYSTEM}/{REGION}/status", SHARED_MEMORY, _listing("systemRegion", "One registered region", SYSTEM_STATUS))
    async def system_status(self, request: Request) -> Response:
        return await self._status("SystemSharedMemoryStatus", request)

    @serves("GET", f"{CUDA}/status", SHARED_MEMORY, _listing("cudaRegions", ALL_OF.format("cuda"), CUDA_STATUS))
    @serves("GET", f"{CUDA}/{REGION}/status", SHARED_MEMORY, _listing("cudaRegion", "One registered region", CUDA_STATUS))
    async def cuda_status(self, request: Request) -> Response:
        return await self._status("CudaSharedMemoryStatus", request)

    @serves("POST", f"{SYSTEM}/unregister", SHARED_MEMORY, _forgotten("unregisterSystemRegions", "all regions"))
    @serves("POST", f"{SYSTEM}/{REGION}/unregister", SHARED_MEMORY, _forgotten("unregisterSystem", "one region"))
    async def system_unregister(self, request: Request) -> Response:
        return await self._unregister("SystemSharedMemoryUnregister", request)

    @serves("POST", f"{CUDA}/unregister", SHARED_MEMORY, _forgotten("unregisterCudaRegions", "all regions"))
    @serves("POST", f"{CUDA}/{REGION}/unregister", SHARED_MEMORY, _forgotten("unregisterCuda", "one region"))
    async def cuda_unregister(self, request: Request) -> Response:
        return await self._unregister("CudaSharedMemoryUnregister", request)

    async def _status(self, rpc: str, request: Request) -> Response:
        response = await self._call(request, rpc, getattr(pb, f"{rpc}Request")(name=_region(request)))
        return json_response([message_dict(region) for _, region in sorted(response.regions.items())])

    async def _unregister(self, rpc: str, request: Request) -> Response:
        return await self._done(request, rpc, getattr(pb, f"{rpc}Request")(name=_region(request)))


class SettingRoutes:
    """Routes of the trace settings and the log settings."""

    def __init__(self, service: Service, bodies: BodyReader) -> None:
        self._bodies = bodies
        self._call = partial(rpc_response, service)

    @serves("GET", "/v2/trace/setting", TRACE, _trace("traceSettings"))
    @serves("GET", f"{MODEL}/trace/setting", TRACE, _trace("traceSettingsOfModel"))
    async def trace_settings(self, request: Request) -> Response:
        return await self._trace(request, pb.TraceSettingRequest(model_name=request.path_params.get("model", "")))

    @serves("POST", "/v2/trace/setting", TRACE, _trace_change("setTrace"))
    @serves("POST", f"{MODEL}/trace/setting", TRACE, _trace_change("setTraceOfModel"))
    async def set_trace_settings(self, request: Request) -> Response:
        """Change what is traced; null restores a setting's default."""
        message = pb.TraceSettingRequest(model_name=request.path_params.get("model", ""))
        for name, value in fields.parse_object(await self._bodies.read_small(request), empty=True).items():
            values = [] if value is None else value if isinstance(value, list) else [value]
            message.settings[name].value.extend([_setting_text(name, entry) for entry in values])
        return await self._trace(request, message)

    @serves("GET", "/v2/logging", LOGGING, _settings("logSettings", "What is logged", LogSettingsJson, {400, 501}))
    async def log_settings(self, request: Request) -> Response:
        return await self._log(request, pb.LogSettingsRequest())

    @serves(
        "POST", "/v2/logging", LOGGING, _settings("setLog", "Change what is logged", LogSettingsJson, set(), is_change=True)
    )
    async def set_log_settings(self, request: Request) -> Response:
        message = pb.LogSettingsRequest()
        for name, value in fields.parse_object(await self._bodies.read_small(request), empty=True).items():
            if isinstance(value, bool):
                message.settings[name].bool_param = value
            elif isinstance(value, int) and 0 <= value < 2**32:
                message.settings[name].uint32_param = value
            else:
                message.settings[name].string_param = _setting_text(name, value)
        return await self._log(request, message)

    async def _trace(self, request: Request, message: pb.TraceSettingRequest) -> Response:
        settings = (await self._call(request, "TraceSetting", message)).settings
        content: dict[str, Any] = {}
        for name, setting in sorted(settings.items()):
            values = list(setting.value)
            content[name] = values if name == LEVELS or len(values) > 1 else "".join(values)
        return json_response(content)

    async def _log(self, request: Request, message: pb.LogSettingsRequest) -> Response:
        settings = (await self._call(request, "LogSettings", message)).settings
        return json_response({name: getattr(s, s.WhichOneof("parameter_choice")) for name, s in sorted(settings.items())})


def _region(request: Request) -> str:
    return str(request.path_params.get("region", ""))


def _setting_text(name: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise InvalidArgumentError(f"setting {name!r} is not text or a whole number")
    return str(value)
