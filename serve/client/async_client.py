"""The asyncio client: the same interface as the synchronous one, awaited."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
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
from serve.client.async_driver import AsyncDriver
from serve.client.bound_exchange import BoundModel, bind
from serve.client.client_base import CLOSING_S
from serve.client.connection.channel import method_path
from serve.client.exchanges import control, inquiries
from serve.client.infer_exchange import infer_message
from serve.client.model_handles import AsyncModel
from serve.client.region_exchange import close_region, open_region
from serve.client.streaming.async_stream import AsyncStream, Source
from serve.client.streaming.stream_order import DEFAULT_IN_FLIGHT, METHOD, StreamAnswer, prepare_stream

if TYPE_CHECKING:
    from protos.model_config_pb2 import ModelConfig
    from serve.client.exchanges.control import LogSetting, TraceSetting
    from serve.client.options import BoundInferOptions, InferOptions, RequestOptions, SendOptions
    from serve.client.sharing.shared_region import SharedRegion
    from serve.client.values.answer import InferAnswer
    from serve.client.values.tensors import Array


class AsyncInferenceClient(AsyncDriver):
    """A connection to one server, for asyncio: `(await client.infer("mlp", {"x": array}))["y"]`.

    Arguments, results and errors are those of InferenceClient. It may be made outside of an event loop; it connects at the
    first call and belongs to that call's loop. Cancelling a task cancels its call on the server too.
    """

    async def infer(self, model: str, inputs: Mapping[str, Any], **options: Unpack[InferOptions]) -> dict[str, Array]:
        """Run a model; see `InferenceClient.infer`."""
        return (await self.infer_detailed(model, inputs, **options)).outputs

    async def infer_detailed(self, model: str, inputs: Mapping[str, Any], **options: Unpack[InferOptions]) -> InferAnswer:
        """As `infer`, with what the server says beside the outputs: the version that has answered, and parameters."""
        return await self._carry_out(*self._infer(model, inputs, options))

    async def infer_message(self, request: ModelInferRequest, **options: Unpack[SendOptions]) -> ModelInferResponse:
        """Send a request that the caller has built and return the response as it comes."""
        return await self._carry_out(infer_message(request), self._sent_with(options))

    async def stream_infer(
        self,
        model: str,
        requests: Source,
        *,
        version: str = "",
        in_flight: int = DEFAULT_IN_FLIGHT,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[StreamAnswer]:
        """Run a model on many requests over one call; see `InferenceClient.stream_infer`.

        `requests` may be an asynchronous iterable. Whoever leaves the loop early should have put the iterator into
        `contextlib.aclosing`, so that the call ends at once.
        """
        order = await self._carry_out(prepare_stream(self._state, model, version, in_flight, options, self.address))
        sending, patience_s = self._streaming(timeout_s)
        rpc = self._open_channel().stream_stream(
            method_path(METHOD), ModelInferRequest.SerializeToString, ModelStreamInferResponse.FromString
        )
        stream = AsyncStream(order, requests, in_flight)
        stream.begin(rpc(metadata=sending.headers))
        try:
            while (answer := await stream.answer(patience_s)) is not None:
                yield answer
        except grpc.RpcError as error:
            raise self._failure(error, METHOD, sending) from None
        finally:
            await stream.end()

    async def model(self, name: str, version: str = "") -> AsyncModel:
        """A handle on one model, which knows its inputs and outputs."""
        return AsyncModel(self, await self._carry_out(bind(self._state, name, version)))

    async def infer_bound(self, model: BoundModel, inputs: Any, **options: Unpack[BoundInferOptions]) -> dict[str, Array]:
        """What `AsyncModel.infer` does."""
        return (await self._carry_out(*self._infer_bound(model, inputs, options))).outputs

    @asynccontextmanager
    async def shared_region(self, byte_size: int) -> AsyncIterator[SharedRegion]:
        """Shared memory for arrays that a server on this machine reads and writes; see `InferenceClient.shared_region`."""
        region = await self._carry_out(open_region(self._state, byte_size))
        try:
            yield region
        finally:
            await self._carry_out(close_region(self._state, region), self._sending(CLOSING_S), retry=False)

    async def shared_regions(self) -> dict[str, SystemSharedMemoryStatusResponse.RegionStatus]:
        """The shared memory that is registered at the server, by name."""
        return await self._carry_out(control.regions())

    async def models(self, *, only_ready: bool = False) -> list[RepositoryIndexResponse.ModelIndex]:
        """What the repository holds, loaded or not: entries with name, version, state and reason."""
        return await self._carry_out(inquiries.models(only_ready=only_ready))

    async def model_metadata(self, name: str, version: str = "") -> ModelMetadataResponse:
        """Versions, platform, and name, datatype and shape of each input and output (-1: any size)."""
        return await self._carry_out(inquiries.model_metadata(name, version))

    async def model_config(self, name: str, version: str = "") -> ModelConfig:
        """The configuration that the model is served with, completed by the server."""
        config: ModelConfig = await self._carry_out(inquiries.model_config(name, version))
        return config

    async def statistics(self, name: str = "", version: str = "") -> list[ModelStatistics]:
        """Counters and times since each model was loaded, in nanoseconds; of all models when the name is empty."""
        return await self._carry_out(inquiries.statistics(name, version))

    async def load_model(
        self,
        name: str,
        *,
        config: Mapping[str, Any] | str | None = None,
        files: Mapping[str, bytes] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Load a model from the server's repository, or load it anew; see `InferenceClient.load_model`."""
        await self._carry_out(control.load_model(name, config, files), self._sending(timeout_s))

    async def unload_model(self, name: str, *, dependents: bool = False, timeout_s: float | None = None) -> None:
        """Stop serving a model, after the requests that it has taken; `dependents`: also the models it is made of."""
        await self._carry_out(control.unload_model(name, dependents=dependents), self._sending(timeout_s))

    async def log_settings(self, **changes: LogSetting) -> dict[str, LogSetting]:
        """Change settings of the server's log, such as log_verbose_level=1, and return all of them."""
        return await self._carry_out(control.log_settings(changes))

    async def trace_settings(self, model: str = "", **changes: TraceSetting) -> dict[str, list[str]]:
        """Change settings of the server's tracing, of all models or one, and return all; None clears one."""
        return await self._carry_out(control.trace_settings(model, changes))

    async def is_live(self) -> bool:
        """Whether a server answers at the address."""
        return await self._carry_out(inquiries.server_live(), retry=False)

    async def is_ready(self, model: str | None = None, version: str = "") -> bool:
        """Whether the server, or one model, takes requests now; an unknown model is not ready."""
        return await self._carry_out(inquiries.ready(model, version), retry=False)

    async def wait_until_ready(self, model: str | None = None, version: str = "", *, timeout_s: float | None = None) -> None:
        """Wait until the server, or one model, takes requests; see `InferenceClient.wait_until_ready`."""
        sending = self._sending(timeout_s)
        await self._carry_out(inquiries.wait_until_ready(model, version, sending.deadline), sending, retry=False)

    async def server_metadata(self) -> ServerMetadataResponse:
        """The server's name, version and protocol extensions."""
        return await self._carry_out(inquiries.server_metadata())
