"""The RPCs of GRPCInferenceService as functions from message to message, independent of the transport.

A transport looks methods up in `Service.unary` and `Service.streams`, hands inference to `Service.inference` as bytes, and maps
an InferenceError to a status with protocol/status.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from google.protobuf.message import Message

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.engine.errors import NotFoundError, PermissionDeniedError
from halfserve.serve.engine.hidden_steps import without_steps
from halfserve.serve.engine.inference_core import InferenceCore, RestrictedCore
from halfserve.serve.engine.model_statistics import Reading
from halfserve.serve.observability.observability import Observability
from halfserve.serve.observability.observe_options import ObserveOptions
from halfserve.serve.protocol.forwarded_headers import ForwardedHeaders, HeaderPattern
from halfserve.serve.protocol.inference import Inference, WatchableInference
from halfserve.serve.protocol.rpcs import (
    Health,
    RepositoryRpcs,
    SettingsRpcs,
    SharedMemoryRpcs,
    model_metadata,
    model_statistics,
    reflection_methods,
)
from halfserve.serve.protocol.shared_memory import SharedMemory
from halfserve.serve.protocol.shared_memory_regions import SharedMemoryMode, has_cuda
from halfserve.serve.protocol.status import status_name

SERVICE = "inference.GRPCInferenceService"
INFER_PATH = f"/{SERVICE}/ModelInfer"
INFER_STREAM_PATH = f"/{SERVICE}/ModelStreamInfer"
LOAD = "RepositoryModelLoad"
SERVER_NAME = "halfserve"
# Names of the protocol extensions, as Triton spells them.
EXTENSIONS = (
    *("binary_tensor_data", "classification", "logging", "model_configuration", "model_repository"),
    *("model_repository(unload_dependents)", "parameters", "schedule_policy", "sequence", "statistics", "trace"),
)
SYSTEM_MEMORY, DEVICE_MEMORY = "system_shared_memory", "cuda_shared_memory"
Exposition = Callable[[], Awaitable[tuple[bytes, str]]]
Headers = Mapping[bytes, bytes]  # headers of a call, names in lower case
FOR_ALL = "the token is for some models only, and this setting holds for all of them; ask who runs the server to change it"


@dataclass(frozen=True)
class UnaryMethod:
    """A method with one message each way, answered at once."""

    request: type[Message]
    answer: Callable[[Any], Message]


@dataclass(frozen=True)
class StreamMethod:
    """A method with any number of messages each way.

    Attributes:
        request: class of the requests.
        answer: takes the requests and yields the responses.
        is_large: a request may carry a model's files.
        with_headers: returns the method for calls with these headers; None if headers do not matter.
    """

    request: type[Message]
    answer: Callable[[AsyncIterator[Any]], AsyncIterator[Message]]
    is_large: bool = False
    with_headers: Callable[[Headers], StreamMethod] | None = None


class Service:
    """The RPCs that one server answers, by path.

    Attributes:
        spread: makes a service answer for several servers that serve together; None for a server that serves alone.
        exposition: answers scrapes of the metrics; None for the service's own metrics.
        forwarded: selects the headers that become parameters of inference requests.
    """

    def __init__(
        self,
        core: InferenceCore,
        *,
        server_version: str,
        shared_memory: bool = False,
        shared_memory_mode: SharedMemoryMode = SharedMemoryMode.SAFE,
        observe: ObserveOptions | None = None,
        forwarded: ForwardedHeaders | None = None,
        beside: Service | None = None,
    ) -> None:
        """Make a service with its own shared memory and observability, or with those of `beside`, a service of the same server.

        Raises:
            FailedPreconditionError: traces are requested but cannot be recorded.
        """
        self.core = core
        self.server_version = server_version
        self.spread: Callable[[Service], None] | None = None
        self.exposition: Exposition | None = None
        self.forwarded = forwarded or ForwardedHeaders()
        if beside is None:
            self.observability = Observability(observe or ObserveOptions(), core, status_name)
            self.memory = SharedMemory(enabled=shared_memory, mode=shared_memory_mode)
            self.memory.on_lost_device = core.on_lost_device
        else:
            self.observability, self.memory = beside.observability, beside.memory
        self.inference = Inference(core, self.memory)
        settings, shared = SettingsRpcs(core, self.observability, shows_file=beside is None), SharedMemoryRpcs(self.memory)
        health = Health(core, SERVICE)
        # Methods with one message each way.
        self.unary: dict[str, UnaryMethod] = {
            f"/{SERVICE}/{name}": UnaryMethod(request, answer)
            for name, request, answer in (
                ("ServerLive", pb.ServerLiveRequest, self.server_live),
                ("ServerReady", pb.ServerReadyRequest, self.server_ready),
                ("ModelReady", pb.ModelReadyRequest, self.model_ready),
                ("ServerMetadata", pb.ServerMetadataRequest, self.server_metadata),
                ("ModelMetadata", pb.ModelMetadataRequest, self.model_metadata),
                ("ModelConfig", pb.ModelConfigRequest, self.model_config),
                ("ModelStatistics", pb.ModelStatisticsRequest, self.model_statistics),
                ("TraceSetting", pb.TraceSettingRequest, settings.trace_setting),
                ("LogSettings", pb.LogSettingsRequest, settings.log_settings),
                ("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest, shared.system_status),
                ("SystemSharedMemoryRegister", pb.SystemSharedMemoryRegisterRequest, shared.system_register),
                ("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest, shared.system_unregister),
                ("CudaSharedMemoryStatus", pb.CudaSharedMemoryStatusRequest, shared.cuda_status),
                ("CudaSharedMemoryRegister", pb.CudaSharedMemoryRegisterRequest, shared.cuda_register),
                ("CudaSharedMemoryUnregister", pb.CudaSharedMemoryUnregisterRequest, shared.cuda_unregister),
            )
        }
        self.unary[health.CHECK_PATH] = UnaryMethod(health.request, health.check)
        # The other methods.
        self.streams: dict[str, StreamMethod] = {health.WATCH_PATH: StreamMethod(health.request, health.watch)}
        for name, (request, answer) in RepositoryRpcs(core).methods().items():
            self.streams[f"/{SERVICE}/{name}"] = StreamMethod(request, answer, is_large=name == LOAD)
        for path, (request, answer) in reflection_methods((SERVICE, health.SERVICE)).items():
            self.streams[path] = StreamMethod(request, answer)

    def inference_of(self, headers: Headers, forwarded: HeaderPattern | None, client: Callable[[], str]) -> WatchableInference:
        """Return the entry for inference requests with these headers, of the client that `client` names.

        Headers that `forwarded` selects become parameters.
        """
        inference = self.inference.for_client(client)
        return inference if forwarded is None else forwarded.forwarding(inference, headers)

    def may_see(self, model: str) -> bool:  # noqa: ARG002  (see LimitedService)
        """Return whether the models of this name are visible to the callers of this service."""
        return True

    def count_connections(self, connections: Callable[[], int], calls: Callable[[], int]) -> None:
        """Register functions that return the transport's open connections and calls in flight, for the metrics."""
        self.core.figures.readings |= {Reading.CONNECTIONS: connections, Reading.CALLS: calls}

    def server_live(self, _: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    def server_ready(self, _: pb.ServerReadyRequest) -> pb.ServerReadyResponse:
        """Answer whether requests are accepted; false while the server drains."""
        return pb.ServerReadyResponse(ready=self.core.is_ready)

    def model_ready(self, request: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        """Answer whether the model takes requests: false while it loads for the first time, after a failed load, and for
        unknown models, as in Triton.
        """
        try:
            ready = self.core.is_model_ready(request.name, request.version)
        except NotFoundError:
            ready = False
        return pb.ModelReadyResponse(ready=ready)

    def server_metadata(self, _: pb.ServerMetadataRequest) -> pb.ServerMetadataResponse:
        """Answer the server's name, version and protocol extensions."""
        extensions = [*EXTENSIONS]
        if self.memory.enabled:
            extensions += [SYSTEM_MEMORY, DEVICE_MEMORY] if has_cuda() else [SYSTEM_MEMORY]
        return pb.ServerMetadataResponse(name=SERVER_NAME, version=self.server_version, extensions=extensions)

    def model_metadata(self, request: pb.ModelMetadataRequest) -> pb.ModelMetadataResponse:
        model = self.core.model(request.name, request.version)
        return model_metadata(model, self.core.versions(request.name))

    def model_config(self, request: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
        """Answer the completed configuration."""
        model = self.core.model(request.name, request.version)
        return pb.ModelConfigResponse(config=without_steps(model.config) if self.core.hides_steps(model) else model.config)

    def model_statistics(self, request: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
        """Answer the counters of one model version, of all versions of a model, or of all models."""
        if not request.name:
            models = self.core.models()
        elif request.version:
            models = [self.core.model(request.name, request.version)]
        else:
            models = self.core.versions(request.name)
        return pb.ModelStatisticsResponse(model_stats=[model_statistics(model) for model in models])


class LimitedService(Service):
    """View of a service that is restricted to permitted models; shared memory, logs and traces are those of the whole server.

    It has a request cache of its own, of at most some megabytes, because a cached request has passed the permission check.
    """

    def __init__(self, whole: Service, may_use: Callable[[str], bool]) -> None:
        """`may_use` returns whether a caller may see the model of this name."""
        self._may_use = may_use
        self._view = RestrictedCore(whole.core, may_use)
        super().__init__(self._view, server_version=whole.server_version, forwarded=whole.forwarded, beside=whole)
        for name in ("TraceSetting", "LogSettings"):  # before `spread` wraps the methods
            path = f"/{SERVICE}/{name}"
            method = self.unary[path]
            self.unary[path] = UnaryMethod(method.request, partial(_of_one_model, method.answer))
        if whole.spread is not None:
            whole.spread(self)

    def may_see(self, model: str) -> bool:
        return self._may_use(model)

    def close(self) -> None:
        """Hide all models. Accepted requests are still answered."""
        self._may_use = lambda _: False
        self._view.close()


def _of_one_model(answer: Callable[[Any], Message], request: pb.TraceSettingRequest | pb.LogSettingsRequest) -> Message:
    """Answer a settings request, unless it changes global settings."""
    if request.settings and not (isinstance(request, pb.TraceSettingRequest) and request.model_name):
        raise PermissionDeniedError(FOR_ALL)
    return answer(request)
