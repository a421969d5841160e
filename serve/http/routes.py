"""The REST routes beside inference: health, metadata, statistics, repository, shared memory, settings, metrics, OpenAPI.

Each calls the RPC of the same purpose, so that REST and gRPC share all checks.
"""

from __future__ import annotations

import asyncio
import json
from functools import partial
from importlib import resources
from typing import Any

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.engine.errors import InvalidArgumentError, UnavailableError
from halfserve.serve.http import json_bodies as fields
from halfserve.serve.http.guards import GuardedRoute
from halfserve.serve.http.request_body import BodyReader, answered_or_gone
from halfserve.serve.http.responses import dump_list, empty_response, json_response, json_text_response, message_dict
from halfserve.serve.protocol.rpc import (
    DESCRIPTION,
    HEALTH,
    LOGGING,
    METADATA,
    METRICS,
    MODEL_CONFIG,
    MODEL_READY,
    REPOSITORY_CHANGE,
    REPOSITORY_INDEX,
    SHARED_MEMORY,
    STATISTICS,
    TRACE,
    RpcCall,
)
from halfserve.serve.protocol.service import SERVICE, Service

MODEL = "/v2/models/{model}"
VERSION = MODEL + "/versions/{version}"
REPOSITORY_MODEL = "/v2/repository/models/{model}"
FILE = "file:"
LEVELS = "trace_level"  # the only setting with several values

_post = partial(GuardedRoute, method="POST")


class ModelRoutes:
    """Routes of the server's and the models' health, metadata and statistics, and of the repository."""

    def __init__(self, service: Service, bodies: BodyReader) -> None:
        self._core = service.core
        self._bodies = bodies
        self._call, self._done = partial(rpc_response, service), partial(_done, service)

    def routes(self) -> list[GuardedRoute]:
        found = [
            GuardedRoute("/v2", self.server_metadata, METADATA),
            GuardedRoute("/v2/", self.server_metadata, METADATA),
            GuardedRoute("/v2/health/live", self.live, HEALTH),
            GuardedRoute("/v2/health/ready", self.ready, HEALTH),
            GuardedRoute("/v2/models/stats", self.statistics, STATISTICS),
            _post("/v2/repository/index", self.repository_index, REPOSITORY_INDEX),
            _post(f"{REPOSITORY_MODEL}/load", self.load, REPOSITORY_CHANGE),
            _post(f"{REPOSITORY_MODEL}/unload", self.unload, REPOSITORY_CHANGE),
        ]
        for path in (MODEL, VERSION):
            found += [
                GuardedRoute(path, self.model_metadata, METADATA),
                GuardedRoute(f"{path}/ready", self.model_ready, MODEL_READY),
                GuardedRoute(f"{path}/config", self.model_config, MODEL_CONFIG),
                GuardedRoute(f"{path}/stats", self.statistics, STATISTICS),
            ]
        return found

    async def server_metadata(self, _: Request) -> Response:
        return json_response(message_dict(await self._call("ServerMetadata", pb.ServerMetadataRequest())))

    async def live(self, _: Request) -> Response:
        """200 without a body, as in Triton: scripts print the status behind it, and compare that."""
        await self._call("ServerLive", pb.ServerLiveRequest())
        return empty_response()

    async def ready(self, _: Request) -> Response:
        """200 without a body if requests are accepted, 503 otherwise."""
        response = await self._call("ServerReady", pb.ServerReadyRequest())
        if not response.ready:
            raise UnavailableError("the server takes no requests now; send them to another replica")
        return empty_response()

    async def model_ready(self, request: Request) -> Response:
        """200 without a body if the model accepts requests, 503 if not, and 404, which the RPC cannot say, if it is unknown."""
        name, version = _named(request)
        self._core.is_model_ready(name, version)  # raises what the RPC cannot say
        if not (await self._call("ModelReady", pb.ModelReadyRequest(name=name, version=version))).ready:
            raise UnavailableError(f"model {name!r} takes no requests now; send them to another replica")
        return empty_response()

    async def model_metadata(self, request: Request) -> Response:
        name, version = _named(request)
        return json_response(
            message_dict(await self._call("ModelMetadata", pb.ModelMetadataRequest(name=name, version=version)))
        )

    async def model_config(self, request: Request) -> Response:
        name, version = _named(request)
        response = await self._call("ModelConfig", pb.ModelConfigRequest(name=name, version=version))
        return json_response(message_dict(response.config))

    async def statistics(self, request: Request) -> Response:
        """Counters of a model version, of all versions, or of all models."""
        name, version = _named(request)
        response = await self._call("ModelStatistics", pb.ModelStatisticsRequest(name=name, version=version))
        counters = await dump_list(message_dict(of_version) for of_version in response.model_stats)
        return json_text_response(f'{{"model_stats":{counters}}}')

    async def repository_index(self, request: Request) -> Response:
        """Every model version and its state; {"ready": true} asks for the ready ones alone."""
        content = fields.parse_object(await self._bodies.read_small(request), empty=True)
        ready = bool(fields.flag(content, "ready", "the request", default=False))
        response = await self._call("RepositoryIndex", pb.RepositoryIndexRequest(ready=ready))
        return json_response([message_dict(entry) for entry in response.models])

    async def load(self, request: Request) -> Response:
        """Load or reload a model; parameters "config" (JSON) and "file:<path>" (base64) override what is on disk."""
        name = request.path_params["model"]
        body = await self._bodies.read(request)
        message = await self._bodies.understand(body, lambda body: _load_request(name, body))
        loading = asyncio.ensure_future(self._done("RepositoryModelLoad", message))
        if not await answered_or_gone(request, loading, lambda: None):
            raise ClientDisconnect
        return loading.result()

    async def unload(self, request: Request) -> Response:
        """Unload a model after its accepted requests are answered."""
        message = pb.RepositoryModelUnloadRequest(model_name=request.path_params["model"])
        parameters = _parameters(await self._bodies.read_small(request))
        for name in parameters:
            message.parameters[name].bool_param = bool(fields.flag(parameters, name, "parameters"))
        return await self._done("RepositoryModelUnload", message)


class SharedMemoryRoutes:
    """Routes of shared-memory regions, of the system and of CUDA devices."""

    def __init__(self, service: Service, bodies: BodyReader) -> None:
        self._bodies = bodies
        self._call, self._done = partial(rpc_response, service), partial(_done, service)

    def routes(self) -> list[GuardedRoute]:
        found = []
        for kind, register in (("System", self.system_register), ("Cuda", self.cuda_register)):
            base = f"/v2/{kind.lower()}sharedmemory"
            region = base + "/region/{region}"
            for path in (base, region):  # all regions, or the one of a name
                status = partial(self._status, f"{kind}SharedMemoryStatus")
                unregister = partial(self._unregister, f"{kind}SharedMemoryUnregister")
                found.append(GuardedRoute(f"{path}/status", status, SHARED_MEMORY))
                found.append(_post(f"{path}/unregister", unregister, SHARED_MEMORY))
            found.append(_post(f"{region}/register", register, SHARED_MEMORY))
        return found

    async def system_register(self, request: Request) -> Response:
        content = fields.parse_object(await self._bodies.read_small(request))
        message = pb.SystemSharedMemoryRegisterRequest(
            name=_region(request),
            key=fields.text(content, "key", "the region"),
            offset=fields.whole(content, "offset", "the region", 0),
            byte_size=fields.whole(content, "byte_size", "the region"),
        )
        return await self._done("SystemSharedMemoryRegister", message)

    async def cuda_register(self, request: Request) -> Response:
        content = fields.parse_object(await self._bodies.read_small(request))
        handle = fields.members(content, "raw_handle", "the region")
        message = pb.CudaSharedMemoryRegisterRequest(
            name=_region(request),
            raw_handle=fields.base64_bytes(handle, "b64", "raw_handle"),
            device_id=fields.whole(content, "device_id", "the region", 0),
            byte_size=fields.whole(content, "byte_size", "the region"),
        )
        return await self._done("CudaSharedMemoryRegister", message)

    async def _status(self, rpc: str, request: Request) -> Response:
        response = await self._call(rpc, getattr(pb, f"{rpc}Request")(name=_region(request)))
        return json_response([message_dict(region) for _, region in sorted(response.regions.items())])

    async def _unregister(self, rpc: str, request: Request) -> Response:
        return await self._done(rpc, getattr(pb, f"{rpc}Request")(name=_region(request)))


class SettingRoutes:
    """Routes of the trace settings and the log settings."""

    def __init__(self, service: Service, bodies: BodyReader) -> None:
        self._bodies = bodies
        self._call = partial(rpc_response, service)

    def routes(self) -> list[GuardedRoute]:
        found = [
            GuardedRoute("/v2/logging", self.log_settings, LOGGING),
            _post("/v2/logging", self.set_log_settings, LOGGING),
        ]
        for path in ("/v2/trace/setting", f"{MODEL}/trace/setting"):
            found += [GuardedRoute(path, self.trace_settings, TRACE), _post(path, self.set_trace_settings, TRACE)]
        return found

    async def trace_settings(self, request: Request) -> Response:
        return await self._trace(pb.TraceSettingRequest(model_name=request.path_params.get("model", "")))

    async def set_trace_settings(self, request: Request) -> Response:
        """Change what is traced; null restores a setting's default."""
        message = pb.TraceSettingRequest(model_name=request.path_params.get("model", ""))
        for name, value in fields.parse_object(await self._bodies.read_small(request), empty=True).items():
            values = [] if value is None else value if isinstance(value, list) else [value]
            message.settings[name].value.extend([_setting_text(name, entry) for entry in values])
        return await self._trace(message)

    async def log_settings(self, _: Request) -> Response:
        return await self._log(pb.LogSettingsRequest())

    async def set_log_settings(self, request: Request) -> Response:
        message = pb.LogSettingsRequest()
        for name, value in fields.parse_object(await self._bodies.read_small(request), empty=True).items():
            if isinstance(value, bool):
                message.settings[name].bool_param = value
            elif isinstance(value, int) and 0 <= value < 2**32:
                message.settings[name].uint32_param = value
            else:
                message.settings[name].string_param = _setting_text(name, value)
        return await self._log(message)

    async def _trace(self, message: pb.TraceSettingRequest) -> Response:
        settings = (await self._call("TraceSetting", message)).settings
        content: dict[str, Any] = {}
        for name, setting in sorted(settings.items()):
            values = list(setting.value)
            content[name] = values if name == LEVELS or len(values) > 1 else "".join(values)
        return json_response(content)

    async def _log(self, message: pb.LogSettingsRequest) -> Response:
        settings = (await self._call("LogSettings", message)).settings
        return json_response({name: getattr(s, s.WhichOneof("parameter_choice")) for name, s in sorted(settings.items())})


async def rpc_response(service: Service, rpc: str, request: Message) -> Any:
    """The response message of an RPC. Raises InferenceError: the errors of the RPC."""
    return await service.rpcs[f"/{SERVICE}/{rpc}"].method(request, RpcCall(server=service))


async def _done(service: Service, rpc: str, message: Message) -> Response:
    await rpc_response(service, rpc, message)
    return json_response({})


def _named(request: Request) -> tuple[str, str]:
    return request.path_params.get("model", ""), request.path_params.get("version", "")


def _region(request: Request) -> str:
    return str(request.path_params.get("region", ""))


def _load_request(name: str, body: bytes) -> pb.RepositoryModelLoadRequest:
    message = pb.RepositoryModelLoadRequest(model_name=name)
    parameters = _parameters(body)
    for key in parameters:
        if key.startswith(FILE):
            message.parameters[key].bytes_param = fields.base64_bytes(parameters, key, "parameters")
        else:
            message.parameters[key].string_param = fields.text(parameters, key, "parameters")
    return message


def _parameters(body: bytes) -> dict[str, object]:
    return fields.members(fields.parse_object(body, empty=True), "parameters", "the request")


def _setting_text(name: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise InvalidArgumentError(f"setting {name!r} is not text or a whole number")
    return str(value)


def metrics_route(service: Service) -> GuardedRoute:
    """GET /metrics, for Prometheus."""

    async def answer(_: Request) -> Response:
        body, content_type = await service.metrics.method(Empty(), RpcCall(server=service))
        return Response(body, headers={"content-type": content_type, "cache-control": "no-store"})

    return GuardedRoute("/metrics", answer, METRICS)


def openapi_route(service: Service) -> GuardedRoute:
    """GET /openapi.json: the REST interface, described for tools."""

    async def answer(_: Request) -> Response:
        content = openapi_document()
        content["info"]["version"] = service.server_version
        return json_response(content)

    return GuardedRoute("/openapi.json", answer, DESCRIPTION)


def openapi_document() -> dict[str, Any]:
    """The document from its file, which is written by hand; the version in it is a placeholder."""
    content: dict[str, Any] = json.loads(resources.files("halfserve.serve.http").joinpath("openapi.json").read_bytes())
    return content
