"""The synchronous client."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, Self, Unpack

import grpc

from halfserve.serve.client.base import ClientBase
from halfserve.serve.client.client_connection import CallSettings, ClientOperation, SyncRunner
from halfserve.serve.client.cluster.channel import SyncClusterChannel
from halfserve.serve.client.errors import ClientError
from halfserve.serve.client.exchange import Answer, Pause, UnaryRpc, advance
from halfserve.serve.client.infer_exchange import RequestOptions, close_region, open_region
from halfserve.serve.client.model_handles import BoundModel, bind
from halfserve.serve.client.shared_regions import SharedRegion
from halfserve.serve.client.stream_drivers import SyncStream
from halfserve.serve.client.streaming import DEFAULT_IN_FLIGHT, METHOD, StreamAnswer, prepare_stream


class Client(ClientBase, SyncRunner):
    """A connection to a server, or to all members of a cluster: `Client("127.0.0.1:8001").infer("mlp", {"x": array})["y"]`.

    It connects at the first call, may be used by many threads at once, and reconnects to a server that restarts. After a fork,
    each call in the child raises an error that says so. Every error of the server or the request is raised as a ClientError or
    a subclass of it. Arguments: see `halfserve.serve.client.client_connection.ClientConnection`.
    """

    def close(self) -> None:
        """Close the connection; calls under way end as Cancelled. Closing twice does no harm."""
        self._closed = True  # set first, so that other threads do not register again what is unregistered here
        self._ended.set()
        if self._must_unregister:
            self._channel.close()  # close first: the server does not unregister memory that a call in flight uses
            self._rpcs.clear()
            self._channel = self._new_channel(grpc, SyncClusterChannel)
            self._run(self._unregistering)
            self._unregistered = True
        if self._channel is not None:
            self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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

        A failed request gets an answer that contains its error; the others continue. Leaving the loop early ends the call. A
        request to a decoupled model gets any number of answers, until one that `is_final`.

        Args:
            model: name of the model.
            requests: the inputs of each request, as for `infer`. Another thread iterates over it, as fast as answers are taken;
                an exception that it raises is raised here, after the answers to the requests before.
            version: version of the model; empty for the one that the model's policy chooses.
            in_flight: most requests in flight at a time.
            timeout_s: longest time in seconds without any answer while requests wait, and between the last answer and the end
                of the stream; None for the client's own. The stream as a whole has no limit.
            options: options of all requests; see `serve.client.infer_exchange.RequestOptions`. The stream sets
                `request_id` itself.

        Raises:
            ServerUnavailable: the connection broke; requests without an answer must be sent again.
            DeadlineExceeded: there was no answer in time.
            ClientError: an error of `infer` that concerns the whole stream instead of one request.
        """
        prepared = prepare_stream(self._state, model, version, in_flight, options, self.address)
        session = self._run(lambda: self._operation(prepared))
        settings, patience_s = self._streaming(timeout_s)
        call = self._stream(model)
        stream = SyncStream(session, requests, in_flight)
        try:
            for answer in stream.answers(lambda sent: call(sent, metadata=settings.headers), patience_s):
                yield answer
                self._check_process()
        except grpc.RpcError as error:
            raise self._failure(error, METHOD, settings) from None

    def model(self, name: str, version: str = "") -> ModelHandle:
        """Return a handle for one model, which knows its inputs and outputs."""
        return ModelHandle(self, self._run(lambda: self._operation(bind(self._state, name, version))))

    @contextmanager
    def shared_region(self, byte_size: int) -> Iterator[SharedRegion]:
        """Shared memory for arrays that a server on this machine reads and writes in place.

        Inputs in the region are not sent, and `infer(..., into={"y": region.array(shape, dtype)})` has outputs written there.
        At the end of the block the region is unregistered and its name removed; its arrays stay usable.

        Raises:
            Unsupported: the server does not support shared memory.
            InvalidRequest: the server cannot open it, because it runs on another machine or as another user.
        """
        region = self._run(lambda: self._operation(open_region(self._state, byte_size)))
        try:
            yield region
        finally:
            self._run(lambda: self._closing(close_region(self._state, region)))

    def _run(self, prepare: Callable[[], ClientOperation[Answer]]) -> Answer:
        operation = prepare()
        outcome: Any = None
        with closing(operation.exchange) as steps:
            try:
                while True:
                    outcome = self._perform(advance(steps, outcome), operation.settings)
            except StopIteration as finished:
                result: Answer = finished.value
                return result

    def _perform(self, step: UnaryRpc | Pause, settings: CallSettings) -> Any:
        """Execute one step; return its answer, or the ClientError that it raised."""
        if isinstance(step, Pause):
            self._ended.wait(step.seconds)  # returns early if another thread closes the client
            return None
        try:
            return self._ask(step, settings)
        except ClientError as error:
            return error

    def _ask(self, rpc: UnaryRpc, settings: CallSettings) -> Any:
        self._check_usable(closing=settings.closing)
        call = self._unary(rpc)
        timeout_s = settings.deadline.remaining_s(method=rpc.method, address=self.address)
        try:
            answer = call(rpc, timeout=timeout_s, metadata=settings.headers, compression=settings.compression)
        except grpc.RpcError as error:
            raise self._failure(error, rpc.method, settings) from None
        except ValueError as error:  # raised by grpc for a channel that another thread has closed meanwhile
            raise self._closed_meanwhile(error) from None
        return self._whole(answer, rpc.method)

    def _open_channel(self) -> Any:
        # Not in the constructor: an unconnected client may be inherited by a forked process.
        with self._opening:
            if self._channel is None:
                self._channel = self._new_channel(grpc, SyncClusterChannel)
                if self._closed:  # another thread may have closed the client before there was a channel to close
                    self._channel.close()
            return self._channel


class ModelHandle(BoundModel, SyncRunner):
    """A model of a Client: `client.model("mlp").infer(array)["y"]`. Made by `Client.model`."""

    _client: Client

    def stream_infer(
        self,
        requests: Iterable[Mapping[str, Any]],
        *,
        in_flight: int = DEFAULT_IN_FLIGHT,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[StreamAnswer]:
        """See `Client.stream_infer`."""
        return self._client.stream_infer(
            self.name, requests, version=self.version, in_flight=in_flight, timeout_s=timeout_s, **options
        )

    def _run(self, prepare: Callable[[], ClientOperation[Answer]]) -> Answer:
        return self._client._run(prepare)  # noqa: SLF001  (the handle is a part of its client)
