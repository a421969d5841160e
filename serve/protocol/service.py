"""The service of one server: its RPCs by path, and the entry for inference requests, independent of the transport.

A transport looks RPCs up in `Service.rpcs`, hands inference to `Service.inference_of` as bytes, and maps an InferenceError to a
status with protocol/status.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from google.protobuf import empty_pb2

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.engine.inference_core import InferenceCore, RestrictedCore
from halfserve.serve.observability.inference_record import Caller
from halfserve.serve.observability.observability import Observability
from halfserve.serve.observability.observe_options import ObserveOptions
from halfserve.serve.protocol import rpc as access
from halfserve.serve.protocol import rpcs
from halfserve.serve.protocol.forwarded_headers import ForwardedHeaders
from halfserve.serve.protocol.inference import Inference
from halfserve.serve.protocol.rpc import SERVER_NAME, Headers, Layer, Rpc, ServerView, layered
from halfserve.serve.protocol.shared_memory import SharedMemory
from halfserve.serve.protocol.shared_memory_regions import SharedMemoryMode
from halfserve.serve.protocol.status import status_name
from halfserve.serve.protocol.timings import TIMED, TIMINGS_HEADER

SERVICE = "inference.GRPCInferenceService"
INFER_PATH = f"/{SERVICE}/ModelInfer"
INFER_STREAM_PATH = f"/{SERVICE}/ModelStreamInfer"
INFERENCE_PATHS = (INFER_PATH, INFER_STREAM_PATH)
# v1 has v1alpha's messages under another package name; newer tools ask for it first.
REFLECTION_VERSIONS = ("v1", "v1alpha")


@cache
def rpc_table() -> dict[str, Rpc]:
    """Return the RPCs other than inference, by path."""
    health, reflect = rpcs.Health(SERVICE), rpcs.reflection((SERVICE, rpcs.Health.SERVICE))
    found = [
        Rpc(f"/{SERVICE}/{name}", getattr(pb, f"{name}Request"), method, access, is_large=method is rpcs.load)
        for name, method, access in (
            ("ServerLive", rpcs.server_live, access.HEALTH),
            ("ServerReady", rpcs.server_ready, access.HEALTH),
            ("ModelReady", rpcs.model_ready, access.MODEL_READY),
            ("ServerMetadata", rpcs.server_metadata, access.METADATA),
            ("ModelMetadata", rpcs.model_metadata, access.METADATA),
            ("ModelConfig", rpcs.model_config, access.MODEL_CONFIG),
            ("ModelStatistics", rpcs.statistics, access.STATISTICS),
            ("RepositoryIndex", rpcs.repository_index, access.REPOSITORY_INDEX),
            ("RepositoryModelLoad", rpcs.load, access.REPOSITORY_CHANGE),
            ("RepositoryModelUnload", rpcs.unload, access.REPOSITORY_CHANGE),
            ("TraceSetting", rpcs.trace_setting, access.TRACE),
            ("LogSettings", rpcs.log_settings, access.LOGGING),
            ("SystemSharedMemoryStatus", rpcs.system_status, access.SHARED_MEMORY),
            ("SystemSharedMemoryRegister", rpcs.system_register, access.SHARED_MEMORY),
            ("SystemSharedMemoryUnregister", rpcs.system_unregister, access.SHARED_MEMORY),
            ("CudaSharedMemoryStatus", rpcs.cuda_status, access.SHARED_MEMORY),
            ("CudaSharedMemoryRegister", rpcs.cuda_register, access.SHARED_MEMORY),
            ("CudaSharedMemoryUnregister", rpcs.cuda_unregister, access.SHARED_MEMORY),
        )
    ]
    found.append(Rpc(health.CHECK_PATH, health.request, health.check, access.HEALTH))
    found.append(Rpc(health.WATCH_PATH, health.request, health.watch, access.HEALTH, is_stream=True))
    for version in REFLECTION_VERSIONS:
        path, request = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo", rpcs.ReflectionRequest
        found.append(Rpc(path, request, reflect, access.DESCRIPTION, is_stream=True))
    return {rpc.path: rpc for rpc in found}


METRICS = Rpc("/metrics", empty_pb2.Empty, rpcs.metrics, access.METRICS)  # HTTP alone serves it


class Service(ServerView):
    """The RPCs that one server answers, by path.

    Attributes:
        rpcs: the RPCs other than inference, by path.
        metrics: the RPC for scrapes of the metrics, which HTTP alone serves.
        forwarded: selects the headers that become parameters of inference requests.
    """

    def __init__(
        self,
        core: InferenceCore,
        *,
        server_version: str,
        server_name: str = SERVER_NAME,
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
        if beside is None:
            memory = SharedMemory(enabled=shared_memory, mode=shared_memory_mode)
            memory.on_lost_device = core.on_lost_device
            observability = Observability(observe or ObserveOptions(), core, status_name)
            super().__init__(core, memory, observability, server_version, server_name)
        else:
            super().__init__(core, beside.memory, beside.observability, server_version, beside.server_name)
        self.forwarded = forwarded or ForwardedHeaders()
        self.inference = Inference(core, self.memory, self.observability.observer)
        self.rpcs, self.metrics = dict(rpc_table()), METRICS

    def spread(self, layer: Layer) -> None:
        """Put a layer around every RPC, such as one that asks other servers too; must be called before a server listens."""
        self.rpcs = {path: layered(rpc, layer) for path, rpc in self.rpcs.items()}
        self.metrics = layered(self.metrics, layer)

    def inference_of(
        self, peer: str, headers: Headers, holder: str, client: Callable[[], str], *, is_rest: bool = False
    ) -> Inference:
        """Return the entry for the inference requests of one caller; headers that are to be forwarded become parameters.

        Args:
            peer: address of the client.
            headers: headers of the call.
            holder: name of the token's holder; "" without a token.
            client: names the client that shares threads with other clients.
            is_rest: the call came over REST, not over gRPC.
        """
        forwarded = self.forwarded.http if is_rest else self.forwarded.grpc
        added = b"" if forwarded is None else forwarded.parameters(headers)
        if is_rest and headers.get(TIMINGS_HEADER, b"").strip().lower() == b"true":
            added += TIMED
        return self.inference.for_caller(Caller(peer, headers, holder, client, is_rest=is_rest), added)


class LimitedService(Service):
    """View of a service that is restricted to permitted models; shared memory, logs and traces are those of the whole server.

    It has a request cache of its own, of at most some megabytes, because a cached request has passed the permission check.
    """

    def __init__(self, whole: Service, may_use: Callable[[str], bool]) -> None:
        """`may_use` returns whether a caller may see the model of this name."""
        self._may_use = may_use
        self._view = RestrictedCore(whole.core, may_use)
        super().__init__(self._view, server_version=whole.server_version, forwarded=whole.forwarded, beside=whole)
        self.rpcs, self.metrics, self.is_whole = whole.rpcs, whole.metrics, False

    def may_see(self, model: str) -> bool:
        return self._may_use(model)

    def close(self) -> None:
        """Hide all models. Accepted requests are still answered."""
        self._may_use = lambda _: False
        self._view.close()
