"""RPCs other than inference: health, model repository, shared memory, settings, metadata, reflection."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from typing import Any, TypeVar

from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from halfserve.protos import inference_pb2, model_config_pb2
from halfserve.protos import inference_pb2 as pb
from halfserve.serve.engine.errors import InvalidArgumentError, NotFoundError, UnsupportedError
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model import Model, VersionState
from halfserve.serve.engine.model_statistics import Duration
from halfserve.serve.engine.tensors import TensorSpec
from halfserve.serve.observability.log_settings import Value
from halfserve.serve.observability.observability import Observability
from halfserve.serve.observability.observe_options import file_of, is_tritons
from halfserve.serve.protocol.shared_memory import SharedMemory
from halfserve.serve.protocol.shared_memory_regions import CudaRegion, SystemRegion

HealthResponse = health_pb2.HealthCheckResponse
RECHECK_S = 1.0
M = TypeVar("M", bound=Message)
Answer = Callable[[AsyncIterator[Any]], AsyncIterator[Message]]
FILE_PREFIX = "file:"
MAX_SETTINGS = 64  # most settings of one request, more than exist
TensorMetadata = pb.ModelMetadataResponse.TensorMetadata
# v1 has v1alpha's messages under another package name; newer tools ask for it first.
VERSIONS = ("v1", "v1alpha")


class Health:
    """grpc.health.v1.Health for the server (""), its inference service, and each model by name; stateless."""

    SERVICE = "grpc.health.v1.Health"
    CHECK_PATH = f"/{SERVICE}/Check"
    WATCH_PATH = f"/{SERVICE}/Watch"
    request = health_pb2.HealthCheckRequest

    def __init__(self, core: InferenceCore, inference_service: str) -> None:
        self._core = core
        self._overall = {"", inference_service}

    def check(self, request: health_pb2.HealthCheckRequest) -> Message:
        """Return the current status.

        Raises:
            NotFoundError: neither a service nor a model has this name.
        """
        status = self._status(request.service)
        if status == HealthResponse.SERVICE_UNKNOWN:
            raise NotFoundError(f"{request.service!r} is neither a service nor a model here; '' asks for the server as a whole")
        return HealthResponse(status=status)  # type: ignore[no-any-return]  # grpc_health ships no types

    async def watch(self, requests: AsyncIterator[health_pb2.HealthCheckRequest]) -> AsyncIterator[Message]:
        """Yield the current status, and then each change."""
        async for request in requests:
            sent: int | None = None
            while True:
                changed = self._core.changed
                status = self._status(request.service)
                if status != sent:
                    sent = status
                    yield HealthResponse(status=status)
                # Broken instances and the precision guard do not signal changes, so that watchers poll too. The jitter keeps
                # many watchers from delaying requests at once.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RECHECK_S * random.uniform(0.5, 1.5)):  # noqa: S311  (no secret)
                        await changed.wait()
        raise InvalidArgumentError("Watch got no request; expected one HealthCheckRequest")

    def _status(self, service: str) -> int:
        if service in self._overall:
            return int(HealthResponse.SERVING if self._core.is_ready else HealthResponse.NOT_SERVING)
        if not self._core.knows(service):
            return int(HealthResponse.SERVICE_UNKNOWN)
        return int(HealthResponse.SERVING if self._core.is_model_ready(service) else HealthResponse.NOT_SERVING)


class RepositoryRpcs:
    """RepositoryIndex, RepositoryModelLoad and RepositoryModelUnload.

    Loading takes long, so these unary methods are implemented as streams of one message each way, which is equal on the wire.
    """

    def __init__(self, core: InferenceCore) -> None:
        self._core = core

    def methods(self) -> dict[str, tuple[type[Message], Answer]]:
        """Return method name -> (request class, handler)."""
        return {
            "RepositoryIndex": (pb.RepositoryIndexRequest, one_message(self.index)),
            "RepositoryModelLoad": (pb.RepositoryModelLoadRequest, one_message(self.load)),
            "RepositoryModelUnload": (pb.RepositoryModelUnloadRequest, one_message(self.unload)),
        }

    async def index(self, request: pb.RepositoryIndexRequest) -> pb.RepositoryIndexResponse:
        """List every model version with its state and reason; with `ready`, ready versions only."""
        _require_no_repository(request.repository_name)
        await self._core.refresh()
        served = {(model.name, str(model.version)): model.properties for model in self._core.models()}
        entries = [
            pb.RepositoryIndexResponse.ModelIndex(
                name=s.name,
                version=s.version,
                state=s.state.value,
                reason=s.reason,
                properties=served.get((s.name, s.version)),
            )
            for s in self._core.index()
            if s.state is VersionState.READY or not request.ready
        ]
        return pb.RepositoryIndexResponse(models=entries)

    async def load(self, request: pb.RepositoryModelLoadRequest) -> pb.RepositoryModelLoadResponse:
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
        await self._core.load(request.model_name, config, files)
        return pb.RepositoryModelLoadResponse()

    async def unload(self, request: pb.RepositoryModelUnloadRequest) -> pb.RepositoryModelUnloadResponse:
        """Unload a model; answers once its accepted requests are answered.

        The request's parameter "unload_dependents": with an ensemble, also unload the models that were loaded for its steps
        only.
        """
        _require_no_repository(request.repository_name)
        dependents = False
        for name, parameter in request.parameters.items():
            if name != "unload_dependents":
                raise InvalidArgumentError(f"parameter {name!r} is not known; expected 'unload_dependents'")
            dependents = _value(name, parameter, "bool_param")
        await self._core.unload(request.model_name, dependents=dependents)
        return pb.RepositoryModelUnloadResponse()


def one_message(answer: Callable[[Any], Awaitable[M]]) -> Answer:
    """Implement a unary method as a stream."""

    async def stream(requests: AsyncIterator[Any]) -> AsyncIterator[Message]:
        received: list[Any] = []
        async for request in requests:  # until the client ends its side
            if received:
                raise InvalidArgumentError("a second message came, expected one; this method is no stream")
            received.append(request)
        if not received:
            raise InvalidArgumentError("the call ended without a message, expected one")
        yield await answer(received[0])

    return stream


def _value(name: str, parameter: pb.ModelRepositoryParameter, kind: str) -> Any:
    given = parameter.WhichOneof("parameter_choice")
    if given != kind:
        raise InvalidArgumentError(f"parameter {name!r} is a {given or 'parameter without a value'}, expected a {kind}")
    return getattr(parameter, kind)


def _require_no_repository(name: str) -> None:
    if name:
        raise UnsupportedError(f"repository_name is {name!r}, expected ''; one repository is served here")


class SharedMemoryRpcs:
    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory

    def system_status(self, request: pb.SystemSharedMemoryStatusRequest) -> pb.SystemSharedMemoryStatusResponse:
        response = pb.SystemSharedMemoryStatusResponse()
        for region in self._memory.regions(request.name, SystemRegion):
            status = response.regions[region.name]
            status.name, status.key = region.name, region.key
            status.offset, status.byte_size = region.offset, region.byte_size
        return response

    def system_register(self, request: pb.SystemSharedMemoryRegisterRequest) -> pb.SystemSharedMemoryRegisterResponse:
        self._memory.register_system(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    def system_unregister(self, request: pb.SystemSharedMemoryUnregisterRequest) -> pb.SystemSharedMemoryUnregisterResponse:
        self._memory.unregister(request.name, SystemRegion)
        return pb.SystemSharedMemoryUnregisterResponse()

    def cuda_status(self, request: pb.CudaSharedMemoryStatusRequest) -> pb.CudaSharedMemoryStatusResponse:
        response = pb.CudaSharedMemoryStatusResponse()
        for region in self._memory.regions(request.name, CudaRegion):
            status = response.regions[region.name]
            status.name, status.device_id, status.byte_size = region.name, region.device_id, region.byte_size
        return response

    def cuda_register(self, request: pb.CudaSharedMemoryRegisterRequest) -> pb.CudaSharedMemoryRegisterResponse:
        self._memory.register_cuda(request.name, request.raw_handle, request.device_id, request.byte_size)
        return pb.CudaSharedMemoryRegisterResponse()

    def cuda_unregister(self, request: pb.CudaSharedMemoryUnregisterRequest) -> pb.CudaSharedMemoryUnregisterResponse:
        self._memory.unregister(request.name, CudaRegion)
        return pb.CudaSharedMemoryUnregisterResponse()


class SettingsRpcs:
    """TraceSetting and LogSettings: without changes they return the current settings."""

    def __init__(self, core: InferenceCore, observability: Observability, *, shows_file: bool) -> None:
        """`shows_file`: the callers may change the settings of the whole server, so that a file in Triton's format is named to
        them, as scripts expect of Triton. All others read "file" in its place, as a path tells about the machine.
        """
        self._core = core
        self._observability = observability
        self._shows_file = shows_file

    def trace_setting(self, request: pb.TraceSettingRequest) -> pb.TraceSettingResponse:
        """Change settings if there are any, and return those of a model, or the global ones, which models without own settings
        follow.

        Raises:
            NotFoundError: there is no such model.
            InvalidArgumentError: there is no such setting or value; nothing has been changed.
            FailedPreconditionError: traces have no destination.
        """
        _check_count(len(request.settings))
        if request.model_name:
            self._core.versions(request.model_name)
        changes = {name: list(setting.value) for name, setting in request.settings.items()}
        self._observability.update_traces(request.model_name, changes)
        to = self._observability.trace_to
        values = self._observability.traces.of(request.model_name).as_values()
        file, mode = file_of(to), "triton" if is_tritons(to) else "opentelemetry"
        if file and not (is_tritons(to) and self._shows_file):
            file = "file"
        values |= {"trace_mode": [mode], "trace_file": [file or to]}
        response = pb.TraceSettingResponse()
        for name, value in values.items():
            response.settings[name].value.extend(value)
        return response

    def log_settings(self, request: pb.LogSettingsRequest) -> pb.LogSettingsResponse:
        """Return the log settings after the changes; see `LogSettings.shown`.

        Raises:
            InvalidArgumentError: there is no such setting or value; nothing has been changed.
        """
        _check_count(len(request.settings))
        changes = {name: _given(name, setting) for name, setting in request.settings.items()}
        self._observability.update_logs(changes)
        response = pb.LogSettingsResponse()
        for name, value in self._observability.logs.shown(changes).items():
            setting = response.settings[name]
            if isinstance(value, bool):
                setting.bool_param = value
            elif isinstance(value, int):
                setting.uint32_param = value
            else:
                setting.string_param = value
        return response


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


def model_metadata(model: Model, versions: Iterable[Model]) -> pb.ModelMetadataResponse:
    """Describe inputs and outputs with the batch dimension, and name every served version."""
    return pb.ModelMetadataResponse(
        name=model.name,
        versions=[str(m.version) for m in versions],
        platform=model.interface.kind.platform,
        inputs=[_tensor(spec) for spec in model.interface.inputs],
        outputs=[_tensor(spec) for spec in model.interface.outputs],
        properties=model.properties,
    )


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


def reflection_methods(services: Iterable[str]) -> dict[str, tuple[type[Message], Answer]]:
    """Return the methods of server reflection, for grpcurl and similar tools.

    Returns:
        Method path -> (request class, handler) for every version of the service.
    """
    pool = DescriptorPool()
    for file in (model_config_pb2, inference_pb2, health_pb2, reflection_pb2):
        pool.AddSerializedFile(file.DESCRIPTOR.serialized_pb)
    servicer = reflection.aio.ReflectionServicer([*services, reflection.SERVICE_NAME], pool=pool)
    answer: Any = partial(servicer.ServerReflectionInfo, unused_context=None)
    paths = [f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo" for version in VERSIONS]
    return dict.fromkeys(paths, (reflection_pb2.ServerReflectionRequest, answer))
