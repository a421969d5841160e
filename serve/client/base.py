"""Base of both clients: each unary operation, declared once.

`Client` returns an operation's answer; `AsyncClient` returns a coroutine that gives it (see `ClientMethod`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from halfserve.protos import inference_pb2 as pb
from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.client import management
from halfserve.serve.client.array_conversion import Array
from halfserve.serve.client.client_connection import ClientConnection, ClientMethod, ClientOperation
from halfserve.serve.client.exchange import Exchange
from halfserve.serve.client.infer_exchange import InferOptions, SendOptions, infer, infer_message, without_sending
from halfserve.serve.client.infer_messages import InferAnswer
from halfserve.serve.client.management import LogSetting, TraceSetting


class ClientBase(ClientConnection):
    """Operations that both clients share; arguments: see `ClientConnection`."""

    @ClientMethod
    def infer(
        self, model: str, inputs: Mapping[str, Any], **options: Unpack[InferOptions]
    ) -> ClientOperation[dict[str, Array]]:
        """Run a model.

        Args:
            model: name of the model.
            inputs: name -> array, with the batch dimension where the model has one. An array must have the model's dtype or one
                that casts to it without loss (or pass cast=True); lists and numbers are converted if they fit. Tensors of torch
                and everything that numpy reads as an array are accepted. BF16 is given as `ml_dtypes.bfloat16` or as uint16 bit
                patterns, BYTES as `bytes` or `str`.
            options: version, outputs, timeout_s and more; see `halfserve.serve.client.infer_exchange.InferOptions`.

        Returns:
            name -> array, in the server's order. The arrays are the caller's own, and writeable.

        Raises:
            InvalidRequest: an input is unknown, or its dtype, shape or values do not fit the model.
            ModelNotFound: the server has no such model.
            Overloaded: the server's queue is full.
            DeadlineExceeded: there was no answer in time.
            ServerUnavailable: no server answers at the address.
        """
        return self._inference(_outputs_of(infer(self._state, model, inputs, **without_sending(options))), options)

    @ClientMethod
    def infer_detailed(
        self, model: str, inputs: Mapping[str, Any], **options: Unpack[InferOptions]
    ) -> ClientOperation[InferAnswer]:
        """Run a model; return its outputs with the version that answered and the response's parameters."""
        return self._inference(infer(self._state, model, inputs, **without_sending(options)), options)

    @ClientMethod
    def infer_message(
        self, request: pb.ModelInferRequest, **options: Unpack[SendOptions]
    ) -> ClientOperation[pb.ModelInferResponse]:
        """Send a request that the caller has built, and return the response unchanged."""
        return self._operation(infer_message(request), self._sent_with(options))

    @ClientMethod
    def shared_regions(self) -> ClientOperation[dict[str, pb.SystemSharedMemoryStatusResponse.RegionStatus]]:
        """Shared memory regions that are registered at the server, by name."""
        return self._operation(management.regions())

    @ClientMethod
    def register_cuda_region(self, name: str, handle: bytes, byte_size: int, *, device_id: int = 0) -> ClientOperation[None]:
        """Give a server on this machine access to memory of this process on a CUDA device, for requests of `infer_message`.

        Args:
            name: name of the region, used as the parameter `shared_memory_region` of a tensor.
            handle: the 64 bytes of the memory's cudaIpcMemHandle_t.
            byte_size: size of the memory in bytes. Keep the memory allocated until `unregister_cuda_region`.
            device_id: number of the CUDA device.

        Raises:
            Unsupported: the server does not support shared memory, or has no CUDA device.
            InvalidRequest: an argument has the wrong type, or the server cannot open the memory.
        """
        return self._operation(management.register_cuda_region(name, handle, byte_size, device_id))

    @ClientMethod
    def unregister_cuda_region(self, name: str) -> ClientOperation[None]:
        """Undo `register_cuda_region`. Unknown names are ignored; an empty name means all regions, also other clients'."""
        return self._operation(management.unregister_cuda_region(name))

    @ClientMethod
    def models(self, *, only_ready: bool = False) -> ClientOperation[list[pb.RepositoryIndexResponse.ModelIndex]]:
        """Return the models of the repository, loaded or not: entries with name, version, state and reason."""
        return self._operation(management.models(only_ready=only_ready))

    @ClientMethod
    def model_metadata(self, name: str, version: str = "") -> ClientOperation[pb.ModelMetadataResponse]:
        """Versions, platform, and name, datatype and shape of each input and output (-1: any size)."""
        return self._operation(management.model_metadata(name, version))

    @ClientMethod
    def model_config(self, name: str, version: str = "") -> ClientOperation[ModelConfig]:
        """Return the configuration that the model is served with, completed by the server."""
        return self._operation(management.model_config(name, version))

    @ClientMethod
    def statistics(self, name: str = "", version: str = "") -> ClientOperation[list[pb.ModelStatistics]]:
        """Counters and times since each model was loaded, in nanoseconds; of all models when the name is empty."""
        return self._operation(management.statistics(name, version))

    @ClientMethod
    def load_model(
        self,
        name: str,
        *,
        config: Mapping[str, Any] | str | None = None,
        files: Mapping[str, bytes] | None = None,
        timeout_s: float | None = None,
    ) -> ClientOperation[None]:
        """Load or reload a model from the server's repository; returns once the model is ready.

        Args:
            name: name of the model.
            config: replaces the model's config.pbtxt: ModelConfig's JSON form, as text or as a mapping.
            files: replace the model's files: path in the model's folder, such as "1/model.onnx" -> content. They require
                `config`.
            timeout_s: time limit in seconds; None for the client's own.
        """
        return self._operation(management.load_model(name, config, files), self._call_settings(timeout_s))

    @ClientMethod
    def unload_model(self, name: str, *, dependents: bool = False, timeout_s: float | None = None) -> ClientOperation[None]:
        """Stop serving a model once its accepted requests are answered; `dependents` also unloads the steps of an ensemble."""
        return self._operation(management.unload_model(name, dependents=dependents), self._call_settings(timeout_s))

    @ClientMethod
    def log_settings(self, /, **changes: LogSetting) -> ClientOperation[dict[str, LogSetting]]:
        """Change settings of the server's log, such as log_verbose_level=1, and return all of them."""
        return self._operation(management.log_settings(changes))

    @ClientMethod
    def trace_settings(self, /, model: str = "", **changes: TraceSetting) -> ClientOperation[dict[str, list[str]]]:
        """Change settings of the server's tracing, such as trace_rate=100, and return all; None clears one.

        Args:
            model: name of the model; empty for the settings of all models.
            changes: setting -> value or values.
        """
        return self._operation(management.trace_settings(model, changes))

    @ClientMethod
    def is_live(self) -> ClientOperation[bool]:
        """Return whether a server answers at the address."""
        return self._operation(management.server_live(), retry=False)

    @ClientMethod
    def is_ready(self, model: str | None = None, version: str = "") -> ClientOperation[bool]:
        """Return whether the server, or one model, takes requests now; an unknown model is not ready."""
        return self._operation(management.ready(model, version), retry=False)

    @ClientMethod
    def wait_until_ready(
        self, model: str | None = None, version: str = "", *, timeout_s: float | None = None
    ) -> ClientOperation[None]:
        """Wait until the server, or one model, takes requests.

        Raises:
            DeadlineExceeded: it was not ready within `timeout_s` (None for the client's own); the text gives the reason.
        """
        settings = self._call_settings(timeout_s)
        return self._operation(management.wait_until_ready(model, version, settings.deadline), settings, retry=False)

    @ClientMethod
    def server_metadata(self) -> ClientOperation[pb.ServerMetadataResponse]:
        """Return the server's name, version and protocol extensions."""
        return self._operation(management.server_metadata())


def _outputs_of(exchange: Exchange[InferAnswer]) -> Exchange[dict[str, Array]]:
    return (yield from exchange).outputs
