"""Base of both clients: their settings, and each unary operation, declared once.

`Client` returns an operation's answer; `AsyncClient` returns a coroutine that gives it (see `ClientMethod`).
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, update_wrapper
from types import MethodType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar, Unpack, overload

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.client import management
from halfserve.serve.client.cluster.channel import ClusterChannel
from halfserve.serve.client.connection import (
    Balancing,
    ChannelSettings,
    Compression,
    Headers,
    HeaderValue,
    Tls,
    Token,
    bearer,
    check_encrypted,
    checked_balancing,
    compression_named,
    headers_of,
    method_path,
    parse_address,
)
from halfserve.serve.client.errors import Cancelled, ClientError, InvalidRequest, from_rpc_error
from halfserve.serve.client.exchange import (
    DEFAULT_TIMEOUT_S,
    Answer,
    Deadline,
    Exchange,
    RetryBudget,
    RetryPolicy,
    UnaryRpc,
    checked_timeout,
    retried,
)
from halfserve.serve.client.inference import (
    SEND_OPTIONS,
    InferOptions,
    InferState,
    SendOptions,
    infer,
    infer_message,
    unregister_everything,
    without_sending,
)
from halfserve.serve.client.management import LogSetting, TraceSetting
from halfserve.serve.client.messages import InferAnswer
from halfserve.serve.client.tensors import Array

if TYPE_CHECKING:
    from halfserve.protos.model_config_pb2 import ModelConfig

RETRIES_IN_CLUSTER = 3
CLOSING_S = 5.0  # time limit for unregistering shared memory when a client closes

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class CallSettings:
    """Settings for the RPCs of one operation.

    Attributes:
        deadline: deadline of the whole operation.
        headers: gRPC metadata.
        compression: compression as a grpc value; None for the channel's.
        closing: whether the client is being closed, in which case other operations are refused.
    """

    deadline: Deadline
    headers: Headers
    compression: Any
    closing: bool = False


@dataclass(frozen=True)
class ClientOperation(Generic[Answer]):
    """An exchange with the client's retries applied, and the settings of its RPCs."""

    exchange: Exchange[Answer]
    settings: CallSettings


class SyncRunner(ABC):
    """Executes operations and returns their answers."""

    @abstractmethod
    def _run(self, prepare: Callable[[], ClientOperation[Answer]]) -> Answer: ...


class AsyncRunner(ABC):
    """Executes operations on an event loop."""

    @abstractmethod
    async def _run(self, prepare: Callable[[], ClientOperation[Answer]]) -> Answer: ...


class ClientMethod(Generic[P, R]):
    """A method that returns a `ClientOperation[R]`; called, it returns R on a SyncRunner and a coroutine on an AsyncRunner."""

    def __init__(self, prepare: Callable[Concatenate[Any, P], ClientOperation[R]]) -> None:
        self._prepare = prepare
        update_wrapper(self, prepare)

    @overload
    def __get__(self, runner: None, owner: type) -> Self: ...

    @overload
    def __get__(self, runner: SyncRunner, owner: type) -> Callable[P, R]: ...

    @overload
    def __get__(self, runner: AsyncRunner, owner: type) -> Callable[P, Coroutine[Any, Any, R]]: ...

    def __get__(self, runner: Any, owner: type) -> Any:
        return self if runner is None else MethodType(self, runner)

    def __call__(self, runner: Any, *arguments: P.args, **options: P.kwargs) -> Any:
        return runner._run(partial(self._prepare, runner, *arguments, **options))  # noqa: SLF001  (see SyncRunner)


class ClientBase(ABC):
    """Settings and operations that both clients share.

    Args:
        address: HOST:PORT of the server's gRPC port, where a DNS name may stand for several replicas; "unix:/path" of a socket;
            several IP:PORT; or "cluster://HOST:PORT,..." of one or more members of a cluster, from which it learns all others.
        timeout_s: default time limit of each call in seconds, retries included, sent to the server as the gRPC deadline; None
            for no limit.
        retries: most repetitions of a call, where repeating is safe, 0 to 10, or a RetryPolicy. None for 0, and for 3 in a
            cluster, where members may end at any time and another one answers.
        tls: certificates for an encrypted connection; None for no encryption.
        token: bearer token sent in the "authorization" header of each call, or a callable that returns it. Only over TLS, or to
            this machine.
        metadata: gRPC metadata for each call.
        compression: compression of requests, "gzip" or "deflate"; for slow networks, as it costs much CPU.
        balancing: choice among several replicas: "pick_first" uses the first that answers, "round_robin" all in turn.
        shared_memory: pass large tensors in shared memory instead of messages, if the server is on this machine and supports
            it; otherwise they are sent. See also `shared_region`.
        keepalive_s: seconds of silence after which the server is pinged while calls wait for it; None for no pings. Servers
            may close connections that ping too often (gRPC's own do below 300).

    Raises:
        InvalidRequest: an argument is out of range.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        retries: int | RetryPolicy | None = None,
        tls: Tls | None = None,
        token: Token | None = None,
        metadata: Mapping[str, HeaderValue] | None = None,
        compression: Compression | None = None,
        balancing: Balancing = "pick_first",
        shared_memory: bool = False,
        keepalive_s: float | None = None,
    ) -> None:
        server = parse_address(address)
        self.address = server.shown
        self.timeout_s = checked_timeout(timeout_s)
        if keepalive_s is not None and not keepalive_s > 0:
            raise InvalidRequest(f"keepalive_s must be seconds above 0, or None for no pings, not {keepalive_s!r}")
        if token is not None:
            check_encrypted(server, tls)
        compression_named(compression)
        self._channel_settings = ChannelSettings(
            target=server, tls=tls, balancing=checked_balancing(balancing), compression=compression, keepalive_s=keepalive_s
        )
        if retries is None:
            retries = RETRIES_IN_CLUSTER if server.members else 0
        self._retry = retries if isinstance(retries, RetryPolicy) else RetryPolicy(retries=retries)
        self._budget = RetryBudget()
        self._token = token
        self._headers = headers_of(metadata)
        self._state = InferState(shared_memory=shared_memory)
        self._closed = self._unregistered = False
        self._process: int | None = None
        self._channel: Any = None
        self._rpcs: dict[str, Any] = {}
        self._opening, self._ended = threading.Lock(), threading.Event()

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
            options: version, outputs, timeout_s and more; see `halfserve.serve.client.inference.InferOptions`.

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
        """The models of the repository, loaded or not: entries with name, version, state and reason."""
        return self._operation(management.models(only_ready=only_ready))

    @ClientMethod
    def model_metadata(self, name: str, version: str = "") -> ClientOperation[pb.ModelMetadataResponse]:
        """Versions, platform, and name, datatype and shape of each input and output (-1: any size)."""
        return self._operation(management.model_metadata(name, version))

    @ClientMethod
    def model_config(self, name: str, version: str = "") -> ClientOperation[ModelConfig]:
        """The configuration that the model is served with, completed by the server."""
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
        """Whether a server answers at the address."""
        return self._operation(management.server_live(), retry=False)

    @ClientMethod
    def is_ready(self, model: str | None = None, version: str = "") -> ClientOperation[bool]:
        """Whether the server, or one model, takes requests now; an unknown model is not ready."""
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
        """The server's name, version and protocol extensions."""
        return self._operation(management.server_metadata())

    @abstractmethod
    def _open_channel(self) -> Any: ...

    def _new_channel(self, library: Any, in_cluster: type[ClusterChannel]) -> Any:
        if not self._channel_settings.target.members:
            return self._channel_settings.open(library)
        # Not a method of the client: the directory's thread would keep the client from being garbage-collected.
        headers = partial(_with_token, self._headers, self._token)
        return in_cluster(self._channel_settings, headers, has_token=self._token is not None)

    def _operation(
        self, exchange: Exchange[Answer], settings: CallSettings | None = None, *, retry: bool = True
    ) -> ClientOperation[Answer]:
        settings = settings or self._call_settings()
        if retry and (self._retry.retries or self._retry.wait_for_server):
            exchange = retried(exchange, self._retry, self._budget, settings.deadline)
        return ClientOperation(exchange, settings)

    def _inference(self, exchange: Exchange[Answer], options: Mapping[str, Any]) -> ClientOperation[Answer]:
        self._check_usable()  # before the exchange takes shared memory, which a forked child shares with its parent
        return self._operation(exchange, self._sent_with(options))

    def _closing(self, exchange: Exchange[None]) -> ClientOperation[None]:
        return self._operation(exchange, self._call_settings(CLOSING_S), retry=False)

    def _unregistering(self) -> ClientOperation[None]:
        """Operation that unregisters all shared memory of a closed client, when other threads can no longer register any."""
        return ClientOperation(unregister_everything(self._state), replace(self._call_settings(CLOSING_S), closing=True))

    @property
    def _must_unregister(self) -> bool:
        """Whether a server may have shared memory of this client registered."""
        shares = self._state.pool is not None or bool(self._state.left or self._state.regions)
        return shares and not self._unregistered and self._channel is not None

    def _streaming(self, timeout_s: float | None) -> tuple[CallSettings, float | None]:
        """Settings of a stream, which has no deadline as a whole, and the time limit for an answer in seconds."""
        self._check_usable()
        settings = self._call_settings(timeout_s)
        return replace(settings, deadline=Deadline.after(None)), settings.deadline.limit_s

    def _sent_with(self, options: Mapping[str, Any]) -> CallSettings:
        return self._call_settings(**{name: options[name] for name in SEND_OPTIONS if name in options})

    def _call_settings(
        self,
        timeout_s: float | None = None,
        compression: Compression | None = None,
        metadata: Mapping[str, HeaderValue] | None = None,
    ) -> CallSettings:
        headers = self._headers if metadata is None else self._headers + headers_of(metadata)
        return CallSettings(
            deadline=Deadline.after(self.timeout_s if timeout_s is None else checked_timeout(timeout_s)),
            headers=_with_token(headers, self._token),
            compression=compression_named(compression),
        )

    def _unary(self, rpc: UnaryRpc) -> Any:
        if rpc.method not in self._rpcs:
            self._rpcs[rpc.method] = self._open_channel().unary_unary(
                method_path(rpc.method), type(rpc.request).SerializeToString, rpc.answer.FromString
            )
        return self._rpcs[rpc.method]

    def _stream(self, model: str) -> Any:
        channel = self._open_channel()
        begin = partial(channel.stream, model) if isinstance(channel, ClusterChannel) else channel.stream_stream
        return begin(
            method_path("ModelStreamInfer"), pb.ModelInferRequest.SerializeToString, pb.ModelStreamInferResponse.FromString
        )

    def _check_usable(self, *, closing: bool = False) -> None:
        """Refuse a call that would hang.

        Raises:
            Cancelled: the client is closed.
            ClientError: this process is a fork of the one that connected, or the client belongs to another event loop.
        """
        if self._closed and not closing:
            raise Cancelled("this client is closed; make a new one")
        if self._process is None:
            self._process = os.getpid()
        self._check_process()

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise ClientError(
                "this client has connected in another process; gRPC does not survive a fork: make clients in the children, "
                'or start them with the "spawn" method',
                code="FAILED_PRECONDITION",
            )

    def _closed_meanwhile(self, error: Exception | str) -> Cancelled:
        return Cancelled(f"this client was closed during the call ({error}); make a new one")

    def _whole(self, answer: Any, method: str) -> Any:
        """Return the answer; grpc gives None for a call that ended with OK but without a complete message.

        Raises:
            ClientError: the answer is None (code "INTERNAL").
        """
        if answer is None:
            raise ClientError(
                f"{self.address} ended {method} with OK, but with no message, or none that can be read; is a proxy on the way?",
                code="INTERNAL",
            )
        return answer

    def _failure(self, error: Any, method: str, settings: CallSettings) -> ClientError:
        return from_rpc_error(error, method=method, address=self.address, timeout_s=settings.deadline.limit_s)


def _with_token(headers: Headers, token: Token | None) -> Headers:
    return headers if token is None else headers + bearer(token)


def _outputs_of(exchange: Exchange[InferAnswer]) -> Exchange[dict[str, Array]]:
    return (yield from exchange).outputs
