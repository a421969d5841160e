"""The synchronous client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

import grpc

from protos.inference_pb2 import (
    ModelInferRequest,
    ModelInferResponse,
    ModelMetadataResponse,
    ModelStatistics,
    RepositoryIndexResponse,
    ServerMetadataResponse,
)
from serve.client import exchanges
from serve.client.channel import channel_options, checked_address, method_path
from serve.client.deadline import DEFAULT_TIMEOUT_S, Deadline, checked_timeout
from serve.client.errors import InferenceClientError, from_rpc_error

if TYPE_CHECKING:
    from types import TracebackType

    from protos.model_config_pb2 import ModelConfig
    from serve.client.messages import Parameter
    from serve.client.tensors import Array

Answer = TypeVar("Answer")


class InferenceClient:
    """A connection to one server: `InferenceClient("127.0.0.1:8001").infer("mlp", {"x": array})["y"]`.

    It connects at the first call, may be used by many threads at once, and finds a server that restarts again; it does not
    survive a fork. Whatever the server or the request has wrong is raised as an InferenceClientError or a subclass of it.

    Args:
        address: HOST:PORT of the server's gRPC port.
        timeout_s: seconds that each call may take when it does not say otherwise, sent to the server as the gRPC deadline; None
            for no limit.
        retries: how many times a call is sent again, within its deadline, when the server cannot be reached or is overloaded.

    Raises:
        InvalidRequest: an argument is out of range.
    """

    def __init__(self, address: str, *, timeout_s: float | None = DEFAULT_TIMEOUT_S, retries: int = 0) -> None:
        self.address = checked_address(address)
        self.timeout_s = checked_timeout(timeout_s)
        self._channel: Any = grpc.insecure_channel(address, options=channel_options(retries=retries))
        self._rpcs: dict[str, Any] = {}
        self._metadata: exchanges.MetadataCache = {}
        self._closed = False

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        version: str = "",
        outputs: Sequence[str] | None = None,
        timeout_s: float | None = None,
        request_id: str = "",
        parameters: Mapping[str, Parameter] | None = None,
    ) -> dict[str, Array]:
        """Run a model.

        Args:
            model: its name.
            inputs: name -> array, with the batch dimension where the model has one. An array must have the model's dtype or one
                that casts to it without loss; lists and numbers are converted if they fit. BF16 is given as
                `ml_dtypes.bfloat16` or as uint16 bit patterns, BYTES as `bytes` or `str`.
            version: empty for the one that the model's policy chooses.
            outputs: the names wanted; None for all.
            timeout_s: seconds for the whole of it; None for the client's own.
            request_id: comes back in the response and stands in the server's log.
            parameters: request parameters such as {"priority": 1}.

        Returns:
            name -> array, in the server's order. The arrays are the caller's own, and writeable.

        Raises:
            InvalidRequest: an input is unknown, or its dtype, shape or values do not fit the model.
            ModelNotFound: the server has no such model.
            Overloaded: the server's queue is full.
            DeadlineExceeded: no answer in time.
            ServerUnavailable: nobody answers at the address.
        """
        steps = exchanges.infer(
            self._metadata, model, inputs, version=version, outputs=outputs, request_id=request_id, parameters=parameters
        )
        return self._carry_out(steps, timeout_s)

    def infer_message(self, request: ModelInferRequest, *, timeout_s: float | None = None) -> ModelInferResponse:
        """Send a request that the caller has built and return the response as it comes."""
        return self._carry_out(exchanges.infer_message(request), timeout_s)

    def models(self) -> list[RepositoryIndexResponse.ModelIndex]:
        """What the repository holds, loaded or not: entries with name, version, state and reason."""
        return self._carry_out(exchanges.models())

    def model_metadata(self, name: str, version: str = "") -> ModelMetadataResponse:
        """Versions, platform, and name, datatype and shape of each input and output (-1: any size)."""
        return self._carry_out(exchanges.model_metadata(name, version))

    def model_config(self, name: str, version: str = "") -> ModelConfig:
        """The configuration that the model is served with, completed by the server."""
        config: ModelConfig = self._carry_out(exchanges.model_config(name, version))
        return config

    def statistics(self, name: str = "", version: str = "") -> list[ModelStatistics]:
        """Counters and times since each model was loaded, in nanoseconds; of all models when the name is empty."""
        return self._carry_out(exchanges.statistics(name, version))

    def is_live(self) -> bool:
        """Whether a server answers at the address."""
        return self._carry_out(exchanges.server_live())

    def is_ready(self, model: str | None = None, version: str = "") -> bool:
        """Whether the server, or one model, takes requests now; an unknown model is not ready."""
        return self._carry_out(exchanges.ready(model, version))

    def server_metadata(self) -> ServerMetadataResponse:
        """The server's name, version and protocol extensions."""
        return self._carry_out(exchanges.server_metadata())

    def close(self) -> None:
        """Close the connection; calls under way end with the code "CANCELLED". Closing twice is fine."""
        self._closed = True
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _carry_out(self, steps: exchanges.Exchange[Answer], timeout_s: float | None = None) -> Answer:
        deadline = Deadline.after(self.timeout_s if timeout_s is None else checked_timeout(timeout_s))
        try:
            call = next(steps)
            while True:
                try:
                    answer = self._ask(call, deadline)
                except InferenceClientError as error:
                    call = steps.throw(error)
                else:
                    call = steps.send(answer)
        except StopIteration as finished:
            result: Answer = finished.value
            return result

    def _ask(self, call: exchanges.Call, deadline: Deadline) -> Any:
        if self._closed:
            raise InferenceClientError("this client is closed; make a new one", code="CANCELLED")
        rpc = self._rpcs.get(call.method)
        if rpc is None:
            rpc = self._rpcs[call.method] = self._channel.unary_unary(
                method_path(call.method), type(call.request).SerializeToString, call.answer.FromString
            )
        timeout_s = deadline.remaining_s(method=call.method, address=self.address)
        try:
            return rpc(call.request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error, method=call.method, address=self.address, timeout_s=deadline.limit_s) from None
