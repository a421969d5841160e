"""Channels to a cluster, with the interface of grpc's and grpc.aio's channels: each call goes to a member chosen for it."""

from __future__ import annotations

import asyncio
import os
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import Any, ClassVar

import grpc

from halfserve.protos.cluster_pb2 import Directory
from halfserve.protos.request_parameters import SEQUENCE_END, SEQUENCE_ID, SEQUENCE_START
from halfserve.protos.shared_memory_parameters import REGION
from halfserve.serve.client.channel_settings import ChannelSettings, Headers, Tls, bearer, check_encrypted, parse_address
from halfserve.serve.client.cluster.directory import DirectoryWatch
from halfserve.serve.client.cluster.members import MemberConnection, Members
from halfserve.serve.client.errors import Overloaded, ServerUnavailable, deadline_exceeded, from_rpc_error
from halfserve.serve.client.exchange import UnaryRpc
from halfserve.serve.client.infer_messages import is_stateful

KEEPALIVE_S = 2.0  # without pings, calls to a lost machine would wait for their deadlines
CONNECTING_S = 2.0  # time limit of a connection attempt; short, as another member can be tried
# Fields that name the model a member must serve, by method; other methods concern the whole cluster, and any member answers.
MODEL_FIELDS = {"ModelInfer": "model_name", "ModelMetadata": "name", "ModelConfig": "name"}
Serializer = Callable[[Any], bytes]
Deserializer = Callable[[bytes], Any]


class ClusterChannel(ABC):
    """Base of both channels.

    `headers` returns the metadata for Watch, which uses connections of its own; a token (`has_token`) may leave this machine
    only encrypted.
    """

    _library: ClassVar[Any]  # grpc or grpc.aio

    def __init__(self, settings: ChannelSettings, headers: Callable[[], Headers], *, has_token: bool) -> None:
        opened = partial(open_member, settings, has_token)
        self._shown = settings.target.shown
        self._members = Members(partial(opened, self._library), self._closer())
        self._watch = DirectoryWatch(settings.target.members, partial(opened, grpc), headers, self._members.take)
        self._watch.start()
        # The thread holds no reference to this channel, so it ends with a client that is not closed.
        self._stop = weakref.finalize(self, _stop, self._watch, os.getpid())

    @abstractmethod
    def unary_unary(self, path: str, serialize: Serializer, deserialize: Deserializer) -> Callable[..., Any]:
        """Make a callable for a unary method, like a channel to one server."""

    @abstractmethod
    def stream(self, model: str, path: str, serialize: Serializer | None, deserialize: Deserializer) -> Callable[..., Any]:
        """Make a callable for streams, like a channel to one server; a stream stays with one member that serves the model."""

    @abstractmethod
    def _closer(self) -> Callable[[Any], None]: ...


class SyncClusterChannel(ClusterChannel):
    """Replaces a grpc.Channel. Thread-safe."""

    _library = grpc

    def unary_unary(self, path: str, serialize: Serializer, deserialize: Deserializer) -> Callable[..., Any]:
        method = Method(path, serialize, deserialize)

        def ask(rpc: UnaryRpc, *, timeout: float | None, **sent: Any) -> Any:
            if not self._watch.has_directory:
                timeout = self._wait(timeout)
            with MemberCall(self._members, method, rpc.request) as call:
                return call(rpc, timeout=timeout, **sent)

        return ask

    def stream(self, model: str, path: str, serialize: Serializer | None, deserialize: Deserializer) -> Callable[..., Any]:
        def begin(requests: Any, **sent: Any) -> Any:
            member = self._members.pick(model)
            call = member.channel.stream_stream(path, serialize, deserialize)(requests, **sent)

            def ended() -> None:
                self._members.settle(member, _trouble(call.code()))

            if not call.add_callback(ended):
                ended()  # it had ended before
            return call

        return begin

    def close(self) -> None:
        """Close the channels to all members; calls in flight end."""
        self._stop()
        self._watch.join()
        for channel in self._members.take_channels():
            channel.close()

    def _wait(self, timeout_s: float | None) -> float | None:
        """Wait for the directory; return the remaining seconds."""
        began_s = time.monotonic()
        try:
            self._watch.settled.result(timeout_s)
        except TimeoutError:
            raise deadline_exceeded(method="Watch", address=self._shown, limit_s=None) from None
        self._watch.check()
        return timeout_s and timeout_s - (time.monotonic() - began_s)

    def _closer(self) -> Callable[[Any], None]:
        return methodcaller("close")


class AsyncClusterChannel(ClusterChannel):
    """Replaces a grpc.aio.Channel, on the event loop that runs when it is made."""

    _library = grpc.aio

    def __init__(self, settings: ChannelSettings, headers: Callable[[], Headers], *, has_token: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._streams: set[asyncio.Task[None]] = set()
        super().__init__(settings, headers, has_token=has_token)

    def unary_unary(self, path: str, serialize: Serializer, deserialize: Deserializer) -> Callable[..., Any]:
        method = Method(path, serialize, deserialize)

        async def ask(rpc: UnaryRpc, *, timeout: float | None, **sent: Any) -> Any:  # noqa: ASYNC109  (as grpc.aio has it)
            if not self._watch.has_directory:
                timeout = await self._wait(timeout)
            with MemberCall(self._members, method, rpc.request) as call:
                return await call(rpc, timeout=timeout, **sent)

        return ask

    def stream(self, model: str, path: str, serialize: Serializer | None, deserialize: Deserializer) -> Callable[..., Any]:
        def begin(**sent: Any) -> Any:
            member = self._members.pick(model)
            call = member.channel.stream_stream(path, serialize, deserialize)(**sent)

            async def settle() -> None:
                self._members.settle(member, _trouble(await call.code()))

            task = self._loop.create_task(settle())
            self._streams.add(task)
            task.add_done_callback(self._streams.discard)
            return call

        return begin

    async def close(self) -> None:
        """Close the channels to all members; calls in flight end."""
        self._stop()
        self._watch.join()
        await asyncio.gather(*(channel.close() for channel in self._members.take_channels()))

    async def _wait(self, timeout_s: float | None) -> float | None:
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wrap_future(self._watch.settled)
        except TimeoutError:
            raise deadline_exceeded(method="Watch", address=self._shown, limit_s=None) from None
        self._watch.check()
        return timeout_s and timeout_s - (time.monotonic() - began_s)

    def _closer(self) -> Callable[[Any], None]:
        return partial(_close_on, self._loop)


class Method:
    """A unary RPC, and the requirements of its requests on the member."""

    def __init__(self, path: str, serialize: Serializer, deserialize: Deserializer) -> None:
        self._made = (path, serialize, deserialize)
        self._path = path
        self.name = path.rpartition("/")[2]
        self._field = MODEL_FIELDS.get(self.name)
        self.is_inference = self.name == "ModelInfer"

    def rpc(self, member: MemberConnection) -> Any:
        found = member.rpcs.get(self._path)
        if found is None:
            found = member.rpcs[self._path] = member.channel.unary_unary(*self._made)
        return found

    def model(self, request: Any) -> str:
        """Return the name of the model that the member must serve; "" for none."""
        name: str = "" if self._field is None else getattr(request, self._field)
        return name

    def is_shared(self, request: Any) -> bool:
        """Return whether the request refers to memory that this client shares with a member."""
        if not self.is_inference:
            return "SharedMemory" in self.name
        return any(REGION in tensor.parameters for tensors in (request.inputs, request.outputs) for tensor in tensors)


class MemberCall:
    """One call to a member, from the choice of the member to its answer.

    Raises:
        ServerUnavailable: the member cannot be reached, or refuses requests.
        Overloaded: the member is too busy.
    """

    def __init__(self, members: Members, method: Method, request: Any) -> None:
        self._members = members
        self._method = method
        self._model = method.model(request)
        # Requests are searched for shared memory only once a member has some.
        is_shared = (members.is_sharing or not method.is_inference) and method.is_shared(request)
        if method.is_inference and is_stateful(request) and not is_shared:
            sequence = request.parameters[SEQUENCE_ID].SerializeToString()
            starts, ends = (_is_set(request, flag) for flag in (SEQUENCE_START, SEQUENCE_END))
            self._member = members.pick_for_sequence(self._model, sequence, starts=starts, ends=ends)
        else:
            self._member = members.pick(self._model, shared=is_shared)

    def __enter__(self) -> Any:
        return self._method.rpc(self._member)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        failure = None
        if isinstance(error, grpc.RpcError):
            failure = from_rpc_error(error, method=self._method.name, address=self._member.address, timeout_s=None)
        if not isinstance(failure, ServerUnavailable | Overloaded):
            self._members.settle(self._member)
            return  # the member answered or the caller gave up: handled as with a single server
        self._members.settle(self._member, failure)
        failure.elsewhere = self._members.has_other(self._model)
        raise failure from None


def _is_set(request: Any, flag: str) -> bool:
    # Reading a missing parameter would add it.
    return flag in request.parameters and bool(request.parameters[flag].bool_param)


def watch_cluster(
    address: str, take: Callable[[Directory], None], *, tls: Tls | None, token: str | None, headers: Headers = ()
) -> DirectoryWatch:
    """Start following the directory of the cluster at cluster://HOST:PORT,...; see `DirectoryWatch`.

    The token, of a caller who may watch, is sent only over TLS, or to this machine. Raises InvalidRequest: the address or the
    token is malformed.
    """
    target = parse_address(address)
    settings = ChannelSettings(target=target, tls=tls, balancing="pick_first", compression=None, keepalive_s=None)
    sent: Headers = headers if token is None else headers + bearer(token)
    watch = DirectoryWatch(target.members, partial(open_member, settings, token is not None, grpc), lambda: sent, take)
    watch.start()
    return watch


def open_member(settings: ChannelSettings, has_token: bool, library: Any, address: str) -> Any:
    """Open a channel of `library` to a member.
    Raises InvalidRequest: the address is malformed, or a token would be sent there unencrypted.
    """
    target = parse_address(address)
    if has_token:
        check_encrypted(target, settings.tls)
    keepalive_s = settings.keepalive_s or KEEPALIVE_S
    return replace(settings, target=target, keepalive_s=keepalive_s, connecting_s=CONNECTING_S).open(library)


def _trouble(code: Any) -> ServerUnavailable | None:
    return ServerUnavailable("the stream broke") if code is grpc.StatusCode.UNAVAILABLE else None


def _stop(watch: DirectoryWatch, process: int) -> None:
    if os.getpid() == process:  # gRPC does not survive a fork
        watch.stop()


def _close_on(loop: asyncio.AbstractEventLoop, channel: Any) -> None:
    if not loop.is_closed():
        asyncio.run_coroutine_threadsafe(channel.close(), loop)
