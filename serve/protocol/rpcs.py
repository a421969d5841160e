"""Methods of the RPCs other than inference: health, metadata, model repository, shared memory, settings, reflection.

A method must use the server of its call, which may be restricted to some models.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterable
from importlib import import_module
from typing import Any

from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection as reflection_service
from grpc_reflection.v1alpha import reflection_pb2

from halfserve.protos import inference_pb2, model_config_pb2
from halfserve.protos import inference_pb2 as pb
from halfserve.protos.triton_errors import TritonPhrase
from halfserve.serve.engine.errors import InvalidArgumentError, NotFoundError, PermissionDeniedError, UnsupportedError, worded
from halfserve.serve.engine.hidden_steps import without_steps
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model import Model, VersionState
from halfserve.serve.engine.model_statistics import Duration
from halfserve.serve.engine.tensors import TensorSpec
from halfserve.serve.observability.log_settings import Value
from halfserve.serve.observability.observe_options import file_of, is_tritons
from halfserve.serve.protocol.rpc import Method, RpcCall, ServerView
from halfserve.serve.protocol.shared_memory_regions import CudaRegion, SystemRegion, has_cuda

HealthResponse = health_pb2.HealthCheckResponse
ReflectionRequest = reflection_pb2.ServerReflectionRequest
RECHECK_S = 1.0
# Names of the protocol extensions, as Triton spells them.
EXTENSIONS = (
    *("binary_tensor_data", "classification", "logging", "model_configuration", "model_repository"),
    *("model_repository(unload_dependents)", "parameters", "schedule_policy", "sequence", "statistics", "trace"),
)
SYSTEM_MEMORY, DEVICE_MEMORY = "system_shared_memory", "cuda_shared_memory"
FOR_ALL = "the token is for some models only, and this setting holds for all of them; ask who runs the server to change it"
FILE_PREFIX = "file:"
MAX_SETTINGS = 64  # most settings of one request, more than exist
TensorMetadata = pb.ModelMetadataResponse.TensorMetadata


class Health:
    """grpc.health.v1.Health for the server (""), its inference service, and each model by name; stateless."""

    SERVICE = "grpc.health.v1.Health"
    CHECK_PATH = f"/{SERVICE}/Check"
    WATCH_PATH = f"/{SERVICE}/Watch"
    request = health_pb2.HealthCheckRequest

    def __init__(self, inference_service: str) -> None:
        self._overall = {"", inference_service}

    async def check(self, request: health_pb2.HealthCheckRequest, call: RpcCall) -> Message:
        """Return the current status.

        Raises:
            NotFoundError: neither a service nor a model has this name.
        """
        status = await self._status(request.service, call.server.core)
        if status == HealthResponse.SERVICE_UNKNOWN:
            raise NotFoundError(f"{request.service!r} is neither a service nor a model here; '' asks for the server as a whole")
        return HealthResponse(status=status)  # type: ignore[no-any-return]  # grpc_health ships no types

    async def watch(self, requests: AsyncIterator[health_pb2.HealthCheckRequest], call: RpcCall) -> None:
        """Send the current status, and then each change."""
        async for request in requests:
            sent: int | None = None
            while True:
                changed = call.server.core.changed
                status = await self._status(request.service, call.server.core)
                if status != sent:
                    sent = status
                    await call.send(HealthResponse(status=status))
                # Broken instances and the precision guard do not signal changes, so that watchers poll too. The jitter keeps
                # many watchers from delaying requests at once.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RECHECK_S * random.uniform(0.5, 1.5)):  # noqa: S311  (no secret)
                        await changed.wait()
        raise InvalidArgumentError("Watch got no request; expected one HealthCheckRequest")

    async def _status(self, service: str, core: InferenceCore) -> int:
        if service in self._overall:
            return int(HealthResponse.SERVING if core.is_ready_for_clients else HealthResponse.NOT_SERVING)
        if not core.knows(service):
            return int(HealthResponse.SERVICE_UNKNOWN)
        return int(HealthResponse.SERVING if await core.says_ready(service) else HealthResponse.NOT_SERVING)


async def server_live(_: pb.ServerLiveRequest, _call: RpcCall) -> pb.ServerLiveResponse:
    return pb.ServerLiveResponse(live=True)


async def server_ready(_: pb.ServerReadyRequest, call: RpcCall) -> pb.ServerReadyResponse:
    """Answer whether requests are accepted; false while the server drains."""
    return pb.ServerReadyResponse(ready=call.server.core.is_ready_for_clients)


async def model_ready(request: pb.ModelReadyRequest, call: RpcCall) -> pb.ModelReadyResponse:
    """Answer whether the model takes requests: false while it loads for the first time, after a failed load, and for unknown
    models, as in Triton, and if a Python model's is_ready says so.
    """
    try:
        ready = await call.server.core.says_ready(request.name, request.version)
    except NotFoundError:
        ready = False
    return pb.ModelReadyResponse(ready=ready)


async def server_metadata(_: pb.ServerMetadataRequest, call: RpcCall) -> pb.ServerMetadataResponse:
    """Answer the server's name, version and protocol extensions."""
    extensions = [*EXTENSIONS]
    if call.server.memory.enabled:
        extensions += [SYSTEM_MEMORY, DEVICE_MEMORY] if has_cuda() else [SYSTEM_MEMORY]
    server = call.server
    return pb.ServerMetadataResponse(name=server.server_name, version=server.server_version, extensions=extensions)


async def model_metadata(request: pb.ModelMetadataRequest, call: RpcCall) -> pb.ModelMetadataResponse:
    """Describe inputs and outputs with the batch dimension, and name every served version."""
    core = call.server.core
    model = await core.arrival(request.name, request.version)
    return pb.ModelMetadataResponse(
        name=model.name,
        versions=[str(m.version) for m in core.versions(request.name)],
        platform=model.interface.kind.platform,
        inputs=[_tensor(spec) for spec in model.interface.inputs],
        outputs=[_tensor(spec) for spec in model.interface.outputs],
        properties=model.properties,
    )


async def model_config(request: pb.ModelConfigRequest, call: RpcCall) -> pb.ModelConfigResponse:
    """Answer the completed configuration."""
    core = call.server.core
    model = await core.arrival(request.name, request.version)
    return pb.ModelConfigResponse(config=without_steps(model.config) if core.hides_steps(model) else model.config)


async def statistics(request: pb.ModelStatisticsRequest, call: RpcCall) -> pb.ModelStatisticsResponse:
    """Answer the counters of one model version, of all versions of a model, or of all models."""
    core = call.server.core
    if not request.name or core.comes_on_demand(request.name):
        models = core.served(request.name) if request.name else core.models()
    elif request.version:
        models = [core.model(request.name, request.version)]
    else:
        models = core.versions(request.name)
    return pb.ModelStatisticsResponse(model_stats=[model_statistics(model) for model in models])


async def metrics(_: Message, call: RpcCall) -> tuple[bytes, str]:
    """Return the metrics for Prometheus, and their content type."""
    # Imported at the first scrape, so that no start waits for it, and on a thread, so that no request does.
    module: Any = await asyncio.to_thread(import_module, "halfserve.serve.observability.exposition")
    exposition: tuple[bytes, str] = await module.exposition(call.server.core)
    return exposition


async def repository_index(request: pb.RepositoryIndexRequest, call: RpcCall) -> pb.RepositoryIndexResponse:
    """List every model version with its state and reason; with `ready`, ready versions only."""
    _require_no_repository(request.repository_name)
    core = call.server.core
    await core.refresh()
    served = {(model.name, str(model.version)): model.properties for model in core.models()}
    entries = [
        pb.RepositoryIndexResponse.ModelIndex(
            name=s.name,
            version=s.version,
            state=s.state.value,
            reason=s.reason,
            properties=served.get((s.name, s.version)),
        )
        for s in core.index()
        if s.state is VersionState.READY or not request.ready
    ]
    return pb.RepositoryIndexResponse(models=entries)


async def load(request: pb.RepositoryModelLoadRequest, call: RpcCall) -> pb.RepositoryModelLoadResponse:
    """Load or reload a model; answers once it serves.

    The request's parameters: "config", a ModelConfig as JSON; "file:<path in the model folder>", the content of a file.
    """
    _require_no_repository(request.repository_name)
    config: str | None = None
    files: dict[str, bytes] = {}
    for name, parameter in request.parameters.items():
        if name == "config":
            config = _value(name, parameter, "string_param")
        elif name.startswith(FILE_PREFIX):
            files[name.removeprefix(FILE_PREFIX)] = _value(name, parameter, "bytes_param")
        else:
            raise InvalidArgumentError(f"parameter {name!r} is not known; expected 'config' or 'file:<path>'")
    await call.server.core.load(request.model_name, config, files)
    return pb.RepositoryModelLoadResponse()


async def unload(request: pb.RepositoryModelUnloadRequest, call: RpcCall) -> pb.RepositoryModelUnloadResponse:
    """Unload a model; answers once its accepted requests are answered.

    The request's parameter "unload_dependents": with an ensemble, also unload the models that were loaded for its steps only.
    """
    _require_no_repository(request.repository_name)
    dependents = False
    for name, parameter in request.parameters.items():
        if name != "unload_dependents":
            raise InvalidArgumentError(f"parameter {name!r} is not known; expected 'unload_dependents'")
        dependents = _value(name, parameter, "bool_param")
    await call.server.core.unload(request.model_name, dependents=dependents)
    return pb.RepositoryModelUnloadResponse()


def _value(name: str, parameter: pb.ModelRepositoryParameter, kind: str) -> Any:
    given = parameter.WhichOneof("parameter_choice")
    if given != kind:
        raise InvalidArgumentError(f"parameter {name!r} is a {given or 'parameter without a value'}, expected a {kind}")
    return getattr(parameter, kind)


def _require_no_repository(name: str) -> None:
    if name:
        raise UnsupportedError(f"repository_name is {name!r}, expected ''; one repository is served here")


async def system_status(request: pb.SystemSharedMemoryStatusRequest, call: RpcCall) -> pb.SystemSharedMemoryStatusResponse:
    response = pb.SystemSharedMemoryStatusResponse()
    for region in call.server.memory.regions(request.name, SystemRegion):
        status = response.regions[region.name]
        status.name, status.key = region.name, region.key
        status.offset, status.byte_size = region.offset, region.byte_size
    return response


async def system_register(
    request: pb.SystemSharedMemoryRegisterRequest, call: RpcCall
) -> pb.SystemSharedMemoryRegisterResponse:
    call.server.memory.register_system(request.name, request.key, request.offset, request.byte_size)
    return pb.SystemSharedMemoryRegisterResponse()


async def system_unregister(
    request: pb.SystemSharedMemoryUnregisterRequest, call: RpcCall
) -> pb.SystemSharedMemoryUnregisterResponse:
    call.server.memory.unregister(request.name, SystemRegion)
    return pb.SystemSharedMemoryUnregisterResponse()


async def cuda_status(request: pb.CudaSharedMemoryStatusRequest, call: RpcCall) -> pb.CudaSharedMemoryStatusResponse:
    response = pb.CudaSharedMemoryStatusResponse()
    for region in call.server.memory.regions(request.name, CudaRegion):
        status = response.regions[region.name]
        status.name, status.device_id, status.byte_size = region.name, region.device_id, region.byte_size
    return response


async def cuda_register(request: pb.CudaSharedMemoryRegisterRequest, call: RpcCall) -> pb.CudaSharedMemoryRegisterResponse:
    call.server.memory.register_cuda(request.name, request.raw_handle, request.device_id, request.byte_size)
    return pb.CudaSharedMemoryRegisterResponse()


async def cuda_unregister(
    request: pb.CudaSharedMemoryUnregisterRequest, call: RpcCall
) -> pb.CudaSharedMemoryUnregisterResponse:
    call.server.memory.unregister(request.name, CudaRegion)
    return pb.CudaSharedMemoryUnregisterResponse()


async def trace_setting(request: pb.TraceSettingRequest, call: RpcCall) -> pb.TraceSettingResponse:
    """Change settings if there are any, and return those of a model, or the global ones, which models without own settings
    follow.

    A file in Triton's format is named only to callers that may change the settings of the whole server, as scripts expect of
    Triton. All others read "file" in its place, as a path tells about the machine.

    Raises:
        NotFoundError: there is no such model.
        PermissionDeniedError: the caller, who may use some models only, would change global settings.
        InvalidArgumentError: there is no such setting or value; nothing has been changed.
        FailedPreconditionError: traces have no destination.
    """
    server, observability = call.server, call.server.observability
    if not request.model_name:
        _check_may_change(server, len(request.settings))
    _check_count(len(request.settings))
    if request.model_name:
        with worded(TritonPhrase.UNKNOWN_TRACED_MODEL, model=request.model_name):
            server.core.versions(request.model_name)
    changes = {name: list(setting.value) for name, setting in request.settings.items()}
    observability.update_traces(request.model_name, changes)
    to = observability.trace_to
    values = observability.traces.of(request.model_name).as_values()
    file, mode = file_of(to), "triton" if is_tritons(to) else "opentelemetry"
    if file and not (is_tritons(to) and server.is_whole):
        file = "file"
    values |= {"trace_mode": [mode], "trace_file": [file or to]}
    response = pb.TraceSettingResponse()
    for name, value in values.items():
        response.settings[name].value.extend(value)
    return response


async def log_settings(request: pb.LogSettingsRequest, call: RpcCall) -> pb.LogSettingsResponse:
    """Return the log settings after the changes; see `LogSettings.shown`. Without changes they are the current settings.

    Raises:
        PermissionDeniedError: the caller, who may use some models only, would change them.
        InvalidArgumentError: there is no such setting or value; nothing has been changed.
    """
    observability = call.server.observability
    _check_may_change(call.server, len(request.settings))
    _check_count(len(request.settings))
    changes = {name: _given(name, setting) for name, setting in request.settings.items()}
    observability.update_logs(changes)
    response = pb.LogSettingsResponse()
    for name, value in observability.logs.shown(changes).items():
        setting = response.settings[name]
        if isinstance(value, bool):
            setting.bool_param = value
        elif isinstance(value, int):
            setting.uint32_param = value
        else:
            setting.string_param = value
    return response


def _check_may_change(server: ServerView, count: int) -> None:
    if count and not server.is_whole:
        raise PermissionDeniedError(FOR_ALL)


def _check_count(count: int) -> None:
    """Limit the number of settings before they are processed: a message has room for hundreds of thousands."""
    if count > MAX_SETTINGS:
        raise InvalidArgumentError(f"{count} settings are given, expected at most {MAX_SETTINGS}: there are not that many")


def _given(name: str, setting: pb.LogSettingsRequest.SettingValue) -> Value:
    kind = setting.WhichOneof("parameter_choice")
    if kind is None:
        raise InvalidArgumentError(f"{name} has no value, expected a bool, a number or a text")
    value: Value = getattr(setting, kind)
    return value


def model_statistics(model: Model) -> pb.ModelStatistics:
    """Return the counters in Triton's fields."""
    s = model.statistics.totals
    return pb.ModelStatistics(
        name=model.name,
        version=str(model.version),
        last_inference=s.last_inference_ms,
        inference_count=s.rows,
        execution_count=s.batches,
        inference_stats=pb.InferStatistics(
            success=_duration(s.success),
            fail=_duration(s.fail),
            queue=_duration(s.queue),
            compute_input=_duration(s.compute_input),
            compute_infer=_duration(s.compute_infer),
            compute_output=_duration(s.compute_output),
            cache_hit=_duration(s.cache_hit),
            cache_miss=_duration(s.cache_miss),
        ),
        batch_stats=[
            pb.InferBatchStatistics(
                batch_size=size,
                compute_input=_duration(per_size.compute_input),
                compute_infer=_duration(per_size.compute_infer),
                compute_output=_duration(per_size.compute_output),
            )
            for size, per_size in sorted(s.by_batch_size.items())
        ],
    )


def _tensor(spec: TensorSpec) -> TensorMetadata:
    return TensorMetadata(name=spec.name, datatype=spec.datatype.wire, shape=spec.shape)


def _duration(duration: Duration) -> pb.StatisticDuration:
    return pb.StatisticDuration(count=duration.count, ns=duration.ns)


def reflection(services: Iterable[str]) -> Method:
    """Return the method of server reflection, for grpcurl and similar tools, which describes these services and itself."""
    pool = DescriptorPool()
    for file in (model_config_pb2, inference_pb2, health_pb2, reflection_pb2):
        pool.AddSerializedFile(file.DESCRIPTOR.serialized_pb)
    servicer: Any = reflection_service.aio.ReflectionServicer([*services, reflection_service.SERVICE_NAME], pool=pool)

    async def reflect(requests: AsyncIterator[Any], call: RpcCall) -> None:
        async for answer in servicer.ServerReflectionInfo(requests, None):
            await call.send(answer)

    return reflect
