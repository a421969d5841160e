"""`client.model("mlp")`: one model of a server, known by its description."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, Unpack

from serve.client.bound_exchange import BoundModel
from serve.client.streaming.stream_order import DEFAULT_IN_FLIGHT

if TYPE_CHECKING:
    from serve.client.exchanges.model_description import ModelDescription
    from serve.client.options import BoundInferOptions, RequestOptions
    from serve.client.streaming.async_stream import Source
    from serve.client.streaming.stream_order import StreamAnswer
    from serve.client.values.tensors import Array


class _Client(Protocol):
    """What a handle needs of InferenceClient."""

    def infer_bound(self, model: BoundModel, inputs: Any, **options: Unpack[BoundInferOptions]) -> dict[str, Array]: ...

    def stream_infer(
        self,
        model: str,
        requests: Iterable[Mapping[str, Any]],
        *,
        version: str = "",
        in_flight: int = DEFAULT_IN_FLIGHT,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[StreamAnswer]: ...

    def is_ready(self, model: str | None = None, version: str = "") -> bool: ...


class _AsyncClient(Protocol):
    """What a handle needs of AsyncInferenceClient."""

    async def infer_bound(self, model: BoundModel, inputs: Any, **options: Unpack[BoundInferOptions]) -> dict[str, Array]: ...

    def stream_infer(
        self,
        model: str,
        requests: Source,
        *,
        version: str = "",
        in_flight: int = DEFAULT_IN_FLIGHT,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[StreamAnswer]: ...

    async def is_ready(self, model: str | None = None, version: str = "") -> bool: ...


class Model(BoundModel):
    """A model of an InferenceClient: `client.model("mlp").infer(array)["y"]`. Made by `InferenceClient.model`."""

    def __init__(self, client: _Client, description: ModelDescription) -> None:
        super().__init__(description)
        self._client = client

    def infer(self, inputs: Any, **options: Unpack[BoundInferOptions]) -> dict[str, Array]:
        """As `InferenceClient.infer`; names, shapes and rows are checked before anything is sent.

        Args:
            inputs: name -> array, or just the array where the model has one input.
            options: see `serve.client.options.BoundInferOptions`.
        """
        return self._client.infer_bound(self, inputs, **options)

    def stream_infer(
        self,
        requests: Iterable[Mapping[str, Any]],
        *,
        in_flight: int = DEFAULT_IN_FLIGHT,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[StreamAnswer]:
        """As `InferenceClient.stream_infer`."""
        return self._client.stream_infer(
            self.name, requests, version=self.version, in_flight=in_flight, timeout_s=timeout_s, **options
        )

    def is_ready(self) -> bool:
        """Whether the model takes requests now."""
        return self._client.is_ready(self.name, self.version)


class AsyncModel(BoundModel):
    """A model of an AsyncInferenceClient: `(await model.infer(array))["y"]`. Made by `AsyncInferenceClient.model`."""

    def __init__(self, client: _AsyncClient, description: ModelDescription) -> None:
        super().__init__(description)
        self._client = client

    async def infer(self, inputs: Any, **options: Unpack[BoundInferOptions]) -> dict[str, Array]:
        """As `Model.infer`."""
        return await self._client.infer_bound(self, inputs, **options)

    def stream_infer(
        self,
        requests: Source,
        *,
        in_flight: int = DEFAULT_IN_FLIGHT,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[StreamAnswer]:
        """As `AsyncInferenceClient.stream_infer`."""
        return self._client.stream_infer(
            self.name, requests, version=self.version, in_flight=in_flight, timeout_s=timeout_s, **options
        )

    async def is_ready(self) -> bool:
        """Whether the model takes requests now."""
        return await self._client.is_ready(self.name, self.version)
