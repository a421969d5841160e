"""The asyncio client: the same interface as the synchronous one, awaited."""

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


class AsyncInferenceClient:
    """A connection to one server, for asyncio: `(await client.infer("mlp", {"x": array}))["y"]`.

    Arguments, results and errors are those of InferenceClient. It may be made outside of an event loop; it connects at the
    first call and belongs to that call's loop. Cancelling a task cancels its call on the server too.

    Args:
        address: HOST:PORT of the server's gRPC port.
        timeout_s: seconds that each call may take when it does not say otherwise; None for no limit.
        retries: how many times a call is sent again, within its deadline, when the server cannot be reached or is overloaded.

    Raises:
        InvalidRequest: an argument is out of range.
    """

    def __init__(self, address: str, *, timeout_s: float | None = DEFAULT_TIMEOUT_S, retries: int = 0) -> None:
        self.address = checked_address(address)
        self.timeout_s = checked_timeout(timeout_s)
        self._options = channel_options(retries=retries)
        self._channel: Any = None
        self._rpcs: dict[str, Any] = {}
        self._metadata: exchanges.MetadataCache = {}
        self._closed = False

    async def infer(
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
        """Run a model; see `InferenceClient.infer`."""
        steps = exchanges.infer(
            self._metadata, model, inputs, version=version, outputs=outputs, request_id=request_id, parameters=parameters
        )
        return await self._carry_out(steps, timeout_s)

    async def infer_message(self, request: ModelInferRequest, *, timeout_s: float | None = None) -> ModelInferResponse:
        """Send a request that the caller has built and return the response as it comes."""
        return await self._carry_out(exchanges.infer_message(request), timeout_s)

    async def models(self) -> list[RepositoryIndexResponse.ModelIndex]:
        """What the repository holds, loaded or not: entries with name, version, state and reason."""
        return await self._carry_out(exchanges.models())

    async def model_metadata(self, name: str, version: str = "") -> ModelMetadataResponse:
        """Versions, platform, and name, datatype and shape of each input and output (-1: any size)."""
        return await self._carry_out(exchanges.model_metadata(name, version))

    async def model_config(self, name: str, version: str = "") -> ModelConfig:
        """The configuration that the model is served with, completed by the server."""
        config: ModelConfig = await self._carry_out(exchanges.model_config(name, version))
        return config

    async def statistics(self, name: str = "", version: str = "") -> list[ModelStatistics]:
        """Counters and times since each model was loaded, in nanoseconds; of all models when the name is empty."""
        return await self._carry_out(exchanges.statistics(name, version))

    async def is_live(self) -> bool:
        """Whether a server answers at the address."""
        return await self._carry_out(exchanges.server_live())

    async def is_ready(self, model: str | None = None, version: str = "") -> bool:
        """Whether the server, or one model, takes requests now; an unknown model is not ready."""
        return await self._carry_out(exchanges.ready(model, version))

    async def server_metadata(self) -> ServerMetadataResponse:
        """The server's name, version and protocol extensions."""
        return await self._carry_out(exchanges.server_metadata())

    async def close(self) -> None:
        """Close the connection; calls under way end with the code "CANCELLED". Closing twice is fine."""
        self._closed = True
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _carry_out(self, steps: exchanges.Exchange[Answer], timeout_s: float | None = None) -> Answer:
        deadline = Deadline.after(self.timeout_s if timeout_s is None else checked_timeout(timeout_s))
        try:
            call = next(steps)
            while True:
                try:
                    answer = await self._ask(call, deadline)
                except InferenceClientError as error:
                    call = steps.throw(error)
                else:
                    call = steps.send(answer)
        except StopIteration as finished:
            result: Answer = finished.value
            return result

    async def _ask(self, call: exchanges.Call, deadline: Deadline) -> Any:
        if self._closed:
            raise InferenceClientError("this client is closed; make a new one", code="CANCELLED")
        rpc = self._rpcs.get(call.method) or self._new_rpc(call)
        timeout_s = deadline.remaining_s(method=call.method, address=self.address)
        try:
            return await rpc(call.request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error, method=call.method, address=self.address, timeout_s=deadline.limit_s) from None

    def _new_rpc(self, call: exchanges.Call) -> Any:
        if self._channel is None:
            # Not in the constructor: grpc.aio ties a channel to the loop that runs when it is made.
            self._channel = grpc.aio.insecure_channel(self.address, options=self._options)
        path = method_path(call.method)
        rpc = self._channel.unary_unary(path, type(call.request).SerializeToString, call.answer.FromString)
        self._rpcs[call.method] = rpc
        return rpc
