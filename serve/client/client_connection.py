"""Base of both clients: how operations run, settings, the channel, checks whether it may be used."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, update_wrapper
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

from halfserve.serve.client.channel_settings import (
    BALANCINGS,
    Balancing,
    ChannelSettings,
    Compression,
    Headers,
    HeaderValue,
    Tls,
    Token,
    bearer,
    check_encrypted,
    compression_named,
    headers_of,
    method_path,
    parse_address,
)
from halfserve.serve.client.cluster.channel import ClusterChannel
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
from halfserve.serve.client.infer_exchange import SEND_OPTIONS, InferState, unregister_everything
from halfserve.serve.client.infer_messages import received_response, received_stream_response

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class CallSettings:
    deadline: Deadline  # deadline of the whole operation
    headers: Headers  # gRPC metadata
    compression: Any  # compression as a grpc value; None for the channel's
    closing: bool = False  # whether the client is being closed, in which case other operations are refused


@dataclass(frozen=True)
class ClientOperation(Generic[Answer]):
    """An exchange with the client's retries applied, and the settings of its RPCs."""

    exchange: Exchange[Answer]
    settings: CallSettings


class SyncRunner(ABC):
    @abstractmethod
    def _run(self, prepare: Callable[[], ClientOperation[Answer]]) -> Answer: ...


class AsyncRunner(ABC):
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


RETRIES_IN_CLUSTER = 3
CLOSING_S = 5.0  # time limit for unregistering shared memory when a client closes


class ClientConnection(ABC):
    """Settings and channel of a client, which opens at the first call.

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
        if balancing not in BALANCINGS:
            raise InvalidRequest(f"balancing must be one of {', '.join(BALANCINGS)}, not {balancing!r}")
        self._channel_settings = ChannelSettings(
            target=server, tls=tls, balancing=balancing, compression=compression, keepalive_s=keepalive_s
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
        """Return the settings of a stream, which has no deadline as a whole, and the time limit for an answer in seconds."""
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
                method_path(rpc.method),
                UnaryRpc.serialized,
                received_response if rpc.method == "ModelInfer" else rpc.answer.FromString,
            )
        return self._rpcs[rpc.method]

    def _stream(self, model: str) -> Any:
        channel = self._open_channel()
        begin = partial(channel.stream, model) if isinstance(channel, ClusterChannel) else channel.stream_stream
        return begin(method_path("ModelStreamInfer"), None, received_stream_response)

    def _check_usable(self, *, closing: bool = False) -> None:
        """Refuse a call that would hang.

        Raises Cancelled: the client is closed; ClientError: this process is a fork of the one that connected, or the client
        belongs to another event loop.
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
