"""The RPCs of GRPCInferenceService as functions from message to message, free of any transport.

A transport looks a method up in `Service.unary` or `Service.streams`, hands inference to `Service.inference` as bytes, and
turns an InferenceError into a status with protocol/status.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from protos import inference_pb2 as pb
from serve.engine.errors import NotFoundError
from serve.engine.inference_core import InferenceCore
from serve.observability.observability import Observability
from serve.observability.options import ObserveOptions
from serve.protocol.cuda_region import has_cuda
from serve.protocol.health import Health
from serve.protocol.inference import Inference
from serve.protocol.metadata import model_metadata, model_statistics
from serve.protocol.observed_inference import status_name
from serve.protocol.reflection import reflection_methods
from serve.protocol.repository_rpcs import RepositoryRpcs
from serve.protocol.settings_rpcs import SettingsRpcs
from serve.protocol.shared_memory import SharedMemory
from serve.protocol.shared_memory_rpcs import SharedMemoryRpcs

SERVICE = "inference.GRPCInferenceService"
INFER_PATH = f"/{SERVICE}/ModelInfer"
INFER_STREAM_PATH = f"/{SERVICE}/ModelStreamInfer"
LOAD = "RepositoryModelLoad"
SERVER_NAME = "halfserve"
# What clients look for before they use it. Each name is Triton's. Not there: "parameters", which are for the model to read.
EXTENSIONS = (
    *("binary_tensor_data", "classification", "logging", "model_configuration"),
    *("model_repository", "model_repository(unload_dependents)", "schedule_policy", "statistics", "trace"),
)
SYSTEM_MEMORY, DEVICE_MEMORY = "system_shared_memory", "cuda_shared_memory"


@dataclass(frozen=True)
class UnaryMethod:
    """One request message, one response message, answered at once."""

    request: type[Message]
    answer: Callable[[Any], Message]


@dataclass(frozen=True)
class StreamMethod:
    """Any number of messages each way; `is_large` tells that a request may carry a model's files."""

    request: type[Message]
    answer: Callable[[AsyncIterator[Any]], AsyncIterator[Message]]
    is_large: bool = False


class Service:
    """Everything that can be called, by method path.

    Attributes:
        core: the models.
        inference: answers ModelInfer.
        observability: what is logged and traced.
        memory: what clients on this machine share.
        server_version: told to clients.
        unary: the methods with one message each way.
        streams: the others.
    """

    def __init__(
        self,
        core: InferenceCore,
        *,
        server_version: str,
        shared_memory: bool = False,
        observe: ObserveOptions | None = None,
        beside: Service | None = None,
    ) -> None:
        """A service.

        Args:
            core: the models.
            server_version: told to clients.
            shared_memory: whether clients on this machine may leave tensors in shared memory.
            observe: what to log and trace from the start; None nothing.
            beside: another service of the same server, whose shared memory and observability this one uses; the two options
                above are that one's then.

        Raises:
            FailedPreconditionError: there are to be traces, and there cannot be any.
        """
        self.core = core
        self.server_version = server_version
        if beside is None:
            self.observability = Observability(observe or ObserveOptions(), core, status_name)
            self.memory = SharedMemory(enabled=shared_memory)
        else:
            self.observability, self.memory = beside.observability, beside.memory
        self.inference = Inference(core, self.memory)
        settings, shared = SettingsRpcs(core, self.observability), SharedMemoryRpcs(self.memory)
        health = Health(core, SERVICE)
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
        self.streams: dict[str, StreamMethod] = {health.WATCH_PATH: StreamMethod(health.request, health.watch)}
        for name, (request, answer) in RepositoryRpcs(core).methods().items():
            self.streams[f"/{SERVICE}/{name}"] = StreamMethod(request, answer, is_large=name == LOAD)
        for path, (request, answer) in reflection_methods((SERVICE, health.SERVICE)).items():
            self.streams[path] = StreamMethod(request, answer)

    def tell(self, name: str, read: Callable[[], float]) -> None:
        """Let metrics ask for a figure of the transport's, by a name that they know."""
        self.core.figures.readings[name] = read

    def server_live(self, _: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        """The process answers."""
        return pb.ServerLiveResponse(live=True)

    def server_ready(self, _: pb.ServerReadyRequest) -> pb.ServerReadyResponse:
        """Whether requests are taken; false while the server drains."""
        return pb.ServerReadyResponse(ready=self.core.is_ready)

    def model_ready(self, request: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        """Whether the model takes requests: not while it is loaded for the first time, was refused or is unloaded. One of which
        nothing is known does not, as Triton has it.
        """
        try:
            ready = self.core.is_model_ready(request.name, request.version)
        except NotFoundError:
            ready = False
        return pb.ModelReadyResponse(ready=ready)

    def server_metadata(self, _: pb.ServerMetadataRequest) -> pb.ServerMetadataResponse:
        """Name, version and the protocol extensions that are served."""
        extensions = [*EXTENSIONS]
        if self.memory.enabled:
            extensions += [SYSTEM_MEMORY, DEVICE_MEMORY] if has_cuda() else [SYSTEM_MEMORY]
        return pb.ServerMetadataResponse(name=SERVER_NAME, version=self.server_version, extensions=extensions)

    def model_metadata(self, request: pb.ModelMetadataRequest) -> pb.ModelMetadataResponse:
        """A model's inputs and outputs, the batch dimension included."""
        model = self.core.model(request.name, request.version)
        return model_metadata(model, self.core.versions(request.name))

    def model_config(self, request: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
        """A model's completed configuration."""
        return pb.ModelConfigResponse(config=self.core.model(request.name, request.version).config)

    def model_statistics(self, request: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
        """Counters of one model version, of all versions of a model, or, where no model is named, of everything."""
        if not request.name:
            models = self.core.models()
        elif request.version:
            models = [self.core.model(request.name, request.version)]
        else:
            models = self.core.versions(request.name)
        return pb.ModelStatisticsResponse(model_stats=[model_statistics(model) for model in models])
