"""The synchronous client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Unpack

import grpc

from protos.inference_pb2 import (
    ModelInferRequest,
    ModelInferResponse,
    ModelMetadataResponse,
    ModelStatistics,
    ModelStreamInferResponse,
    RepositoryIndexResponse,
    ServerMetadataResponse,
    SystemSharedMemoryStatusResponse,
)
from serve.client.bound_exchange import BoundModel, bind
from serve.client.client_base import CLOSING_S
from serve.client.connection.channel import method_path
from serve.client.exchanges import control, inquiries
from serve.client.infer_exchange import infer_message
from serve.client.model_handles import Model
from serve.client.region_exchange import close_region, open_region
from serve.client.streaming.stream_order import DEFAULT_IN_FLIGHT, METHOD, StreamAnswer, prepare_stream
from serve.client.streaming.sync_stream import SyncStream
from serve.client.sync_driver import SyncDriver

if TYPE_CHECKING:
    from protos.model_config_pb2 import ModelConfig
    from serve.client.exchanges.control import LogSetting, TraceSetting
    from serve.client.options import BoundInferOptions, InferOptions, RequestOptions, SendOptions
    from serve.client.sharing.shared_region import SharedRegion
    from serve.client.values.answer import InferAnswer
    from serve.client.values.tensors import Array


class InferenceClient(SyncDriver):
    """A connection to one server: `InferenceClient("127.0.0.1:8001").infer("mlp", {"x": array})["y"]`.

    It connects at the first call, may be used by many threads at once, and finds a server that restarts again. It does not
    survive a fork: after one, each call says so. Whatever the server or the request has wrong is raised as an
    InferenceClientError or a subclass of it. Arguments: see `serve.client.client_base.ClientBase`.
    """

    def infer(self, model: str, inputs: Mapping[str, Any], **options: Unpack[InferOptions]) -> dict[str, Array]:
        """Run a model.

        Args:
            model: its name.
            inputs: name -> array, with the batch dimension where the model has one. An array must have the model's dtype or one
                that casts to it without loss (or say cast=True); lists and numbers are converted if they fit. Tensors of torch
                will do, and whatever else numpy reads. BF16 is given as `ml_dtypes.bfloat16` or as uint16 bit patterns, BYTES
                as `bytes` or `str`.
            options: version, outputs, timeout_s and more; see `serve.client.options.InferOptions`.

        Returns:
            name -> array, in the server's order. The arrays are the caller's own, and writeable.

        Raises:
            InvalidRequest: an input is unknown, or its dtype, shape or values do not fit the model.
            ModelNotFound: the server has no such model.
            Overloaded: the server's queue is full.
            DeadlineExceeded: no answer in time.
            ServerUnavailable: nobody answers at the address.
        """
        return self.infer_detailed(model, inputs, **options).outputs

    def infer_detailed(self, model: str, inputs: Mapping[str, Any], **options: Unpack[InferOptions]) -> InferAnswer:
        """As `infer`, with what the server says beside the outputs: the version that has answered, and parameters."""
        return self._carry_out(*self._infer(model, inputs, options))

    def infer_message(self, request: ModelInferRequest, **options: Unpack[SendOptions]) -> ModelInferResponse:
        """Send a request that the caller has built and return the response as it comes."""
        return self._carry_out(infer_message(request), self._sent_with(options))

    def stream_infer(
        self,
        model: str,
        requests: Iterable[Mapping[str, Any]],
        *,
        version: str = "",
        in_flight: int = DEFAULT_IN_FLIGHT,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[StreamAnswer]:
        """Run a model on many requests over one call, and yield the answers in the requests' order.

        A request that fails gets an answer that has its error; the others go on. Leaving the loop early ends the call.

        Args:
            model: its name.
            requests: the inputs of each request, as `infer` takes them. Another thread iterates over it, as fast as answers are
                taken; what it raises is raised here, after the answers to what it gave before.
            version: empty for the one that the model's policy chooses.
            in_flight: how many requests may be under way at once.
            timeout_s: seconds that the server may keep requests waiting without answering any, or leave the stream open when
                all are answered; None for the client's own. The stream as a whole has no limit.
            options: for all requests; see `serve.client.options.RequestOptions`. `request_id` is the stream's own.

        Raises:
            ServerUnavailable: the connection broke; what has no answer yet must be sent again.
            DeadlineExceeded: no answer in time.
            InferenceClientError: as for `infer`, where it is the stream's and not a request's.
        """
        order = self._carry_out(prepare_stream(self._state, model, version, in_flight, options, self.address))
        sending, patience_s = self._streaming(timeout_s)
        call = self._open_channel().stream_stream(
            method_path(METHOD), ModelInferRequest.SerializeToString, ModelStreamInferResponse.FromString
        )
        stream = SyncStream(order, requests, in_flight)
        try:
            for answer in stream.answers(lambda sent: call(sent, metadata=sending.headers), patience_s):
                yield answer
                self._check_process()
        except grpc.RpcError as error:
            raise self._failure(error, METHOD, sending) from None

    def model(self, name: str, version: str = "") -> Model:
        """A handle on one model, which knows its inputs and outputs."""
        return Model(self, self._carry_out(bind(self._state, name, version)))

    def infer_bound(self, model: BoundModel, inputs: Any, **options: Unpack[BoundInferOptions]) -> dict[str, Array]:
        """What `Model.infer` does."""
        return self._carry_out(*self._infer_bound(model, inputs, options)).outputs

    @contextmanager
    def shared_region(self, byte_size: int) -> Iterator[SharedRegion]:
        """Shared memory for arrays that a server on this machine reads and writes in place.

        Inputs that lie in it are not sent, and `infer(..., into={"y": region.array(shape, dtype)})` has outputs written there.
        At the end of the block it is unregistered and its name removed; arrays in it stay usable.

        Raises:
            Unsupported: the server does not take shared memory.
            InvalidRequest: the server cannot open it, as it runs on another machine or as another user.
        """
        region = self._carry_out(open_region(self._state, byte_size))
        try:
            yield region
        finally:
            self._carry_out(close_region(self._state, region), self._sending(CLOSING_S), retry=False)

    def shared_regions(self) -> dict[str, SystemSharedMemoryStatusResponse.RegionStatus]:
        """The shared memory that is registered at the server, by name."""
        return self._carry_out(control.regions())

    def models(self, *, only_ready: bool = False) -> list[RepositoryIndexResponse.ModelIndex]:
        """What the repository holds, loaded or not: entries with name, version, state and reason."""
        return self._carry_out(inquiries.models(only_ready=only_ready))

    def model_metadata(self, name: str, version: str = "") -> ModelMetadataResponse:
        """Versions, platform, and name, datatype and shape of each input and output (-1: any size)."""
        return self._carry_out(inquiries.model_metadata(name, version))

    def model_config(self, name: str, version: str = "") -> ModelConfig:
        """The configuration that the model is served with, completed by the server."""
        config: ModelConfig = self._carry_out(inquiries.model_config(name, version))
        return config

    def statistics(self, name: str = "", version: str = "") -> list[ModelStatistics]:
        """Counters and times since each model was loaded, in nanoseconds; of all models when the name is empty."""
        return self._carry_out(inquiries.statistics(name, version))

    def load_model(
        self,
        name: str,
        *,
        config: Mapping[str, Any] | str | None = None,
        files: Mapping[str, bytes] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Load a model from the server's repository, or load it anew; returns when it serves.

        Args:
            name: the model's.
            config: overrides its config.pbtxt: ModelConfig's JSON form, as text or as a mapping.
            files: override its files: path in the model's folder, such as "1/model.onnx" -> content. They need a config.
            timeout_s: seconds; None for the client's own.
        """
        self._carry_out(control.load_model(name, config, files), self._sending(timeout_s))

    def unload_model(self, name: str, *, dependents: bool = False, timeout_s: float | None = None) -> None:
        """Stop serving a model, after the requests that it has taken; `dependents`: also the models it is made of."""
        self._carry_out(control.unload_model(name, dependents=dependents), self._sending(timeout_s))

    def log_settings(self, **changes: LogSetting) -> dict[str, LogSetting]:
        """Change settings of the server's log, such as log_verbose_level=1, and return all of them."""
        return self._carry_out(control.log_settings(changes))

    def trace_settings(self, model: str = "", **changes: TraceSetting) -> dict[str, list[str]]:
        """Change settings of the server's tracing, such as trace_rate=100, and return all; None clears one.

        Args:
            model: whose; empty for all models'.
            changes: name -> value or values.
        """
        return self._carry_out(control.trace_settings(model, changes))

    def is_live(self) -> bool:
        """Whether a server answers at the address."""
        return self._carry_out(inquiries.server_live(), retry=False)

    def is_ready(self, model: str | None = None, version: str = "") -> bool:
        """Whether the server, or one model, takes requests now; an unknown model is not ready."""
        return self._carry_out(inquiries.ready(model, version), retry=False)

    def wait_until_ready(self, model: str | None = None, version: str = "", *, timeout_s: float | None = None) -> None:
        """Wait until the server, or one model, takes requests.

        Raises:
            DeadlineExceeded: it does not within `timeout_s` (None for the client's own); the text says what it lacks.
        """
        sending = self._sending(timeout_s)
        self._carry_out(inquiries.wait_until_ready(model, version, sending.deadline), sending, retry=False)

    def server_metadata(self) -> ServerMetadataResponse:
        """The server's name, version and protocol extensions."""
        return self._carry_out(inquiries.server_metadata())
