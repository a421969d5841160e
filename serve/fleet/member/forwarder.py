"""Forwards requests for models that only other members of the cluster serve, as clients may ask any member for any model.

Our own clients know where each model is served, and send their requests there. A forwarded call carries its caller's token,
and its metadata counts how often it was forwarded: at most twice, as the model may have moved meanwhile.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from halfserve.protos.cluster_pb2 import Directory, Member
from halfserve.protos.inference_pb2 import ModelConfigRequest, ModelConfigResponse, ModelStreamInferResponse
from halfserve.protos.request_parameters import SEQUENCE_ID
from halfserve.serve.engine.errors import InferenceError, UnavailableError
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.fleet.member.member_socket import CHANNEL_OPTIONS, answered_error, has_answered
from halfserve.serve.protocol.inference import Cancel, Inference, ManyReplies, Reply
from halfserve.serve.protocol.inference_stream import IS_FINAL, STATUS
from halfserve.serve.protocol.messages import parse_request
from halfserve.serve.protocol.rpc import Headers
from halfserve.serve.protocol.service import INFER_PATH, INFER_STREAM_PATH, SERVICE, Service
from halfserve.serve.protocol.status import RETRY_HINT, error_of
from halfserve.serve.security.tls import ServerTls
from halfserve.serve.transports.listener import LogThrottle

logger = logging.getLogger(__name__)

FORWARDED, AUTHORIZATION = b"halfserve-forwarded", b"authorization"
ONCE, TWICE = "1", "2"
CONFIG_PATH = f"/{SERVICE}/ModelConfig"
TRIES = 2  # attempts per request, as a member may just have ended
CLOSE_S = 60.0  # time limit for calls over connections made with an earlier certificate
M = TypeVar("M", bound=Message)
Ask = Callable[[Any, list[tuple[str, str]]], Awaitable[bytes]]  # (grpc.aio.Channel, metadata) -> serialized answer


class Forwarder:
    """The other members of a cluster, as targets of forwarded requests. Lives on the event loop.

    Attributes:
        directory: the current directory.
        forwarded: number of inference requests forwarded so far.
    """

    def __init__(self, member: str, core: InferenceCore, tls: ServerTls | None) -> None:
        """Start without known members; `member` is this server's id. With `tls` of this server, the others use TLS too."""
        self.directory = Directory()
        self.forwarded = 0
        self._tls = tls
        self._files = None if tls is None else tls.files  # the TLS files that the channels were made with
        self._throttle = LogThrottle(logger.warning)
        self._member = member
        self._core = core
        self._serving: dict[str, list[str]] = {}  # addresses by model
        self._is_decoupled: dict[str, bool] = {}  # whether a model is decoupled, by name, as far as is known
        self._channels: dict[str, Any] = {}  # grpc.aio.Channel by address; grpcio ships no types
        self._open: Counter[str] = Counter()  # forwarded calls that are not answered yet, by address

    async def follow(self, directory: Directory) -> None:
        """Forward requests to the members of this directory from now on."""
        self.directory = directory
        self._serving, self._is_decoupled = {}, {}
        for one in directory.members:
            if one.state == Member.SERVING and one.id != self._member:
                for name in one.models:
                    self._serving.setdefault(name, []).append(one.grpc_address)
        present = {one.grpc_address for one in directory.members}
        await asyncio.gather(*(self._channels.pop(gone).close() for gone in self._channels.keys() - present))

    def serving(self, name: str) -> list[str]:
        """Addresses of the other members that serve a model."""
        return self._serving.get(name, [])

    def inference(self, service: Service, headers: Headers) -> Inference:
        """The inference entry point for requests with these headers."""
        if _is_last(headers):
            return service.inference
        return service.inference.with_forwarding(partial(self._infer, service, headers))

    async def call(self, name: str, path: str, request: Message, answer: type[M], headers: Headers) -> M | None:
        """Call a method of a member that serves a model; None if there is no such member, or the call must not be forwarded.

        Raises:
            InferenceError: the member refused the request.
        """
        if _is_last(headers) or not self.serving(name):
            return None

        async def ask(channel: Any, metadata: list[tuple[str, str]]) -> bytes:
            answered: bytes = await channel.unary_unary(path)(request.SerializeToString(), metadata=metadata)
            return answered

        return answer.FromString(await self._call(name, ask, headers))

    async def close(self) -> None:
        """End the connections."""
        channels, self._channels = self._channels, {}
        await asyncio.gather(*(channel.close() for channel in channels.values()))

    def _infer(
        self,
        service: Service,
        headers: Headers,
        data: bytes,
        time_left_s: float | None,
        reply: Reply,
        many: ManyReplies | None,
    ) -> Cancel | None:
        """Forward a request for a model that is not served here; returns None if it is, or if no other member serves it."""
        try:
            request = parse_request(data)
        except InferenceError:
            return None
        name = request.model_name
        if not service.may_see(name) or self._core.served(name) or not self.serving(name):
            return None
        self.forwarded += 1
        # All requests of a sequence go to the same member while it serves the model.
        sequence = request.parameters[SEQUENCE_ID].SerializeToString() if SEQUENCE_ID in request.parameters else None
        if many is None:
            ask: Ask = partial(_ask_once, data, time_left_s)
        else:  # the request came over a stream
            ask = StreamedRequest(data, name, time_left_s, many, self._is_decoupled).ask
        call = partial(self._call, name, ask, headers, sequence)
        task = asyncio.get_running_loop().create_task(_answer(call, reply))
        self._core.wait_for(task)
        return task.cancel  # type: ignore[return-value]  # its result says nothing to the caller

    async def _call(self, name: str, ask: Ask, headers: Headers, sequence: bytes | None = None) -> bytes:
        metadata = [(FORWARDED.decode(), TWICE if FORWARDED in headers else ONCE)]
        if AUTHORIZATION in headers:
            metadata.append((AUTHORIZATION.decode(), headers[AUTHORIZATION].decode("latin-1")))
        tried: list[str] = []
        while True:
            addresses = [address for address in self.serving(name) if address not in tried]
            if not addresses:
                raise _unreachable(name)
            address = self._choose(addresses, sequence)
            tried.append(address)
            self._open[address] += 1
            try:
                return await ask(self._channel(address), metadata)
            except grpc.aio.AioRpcError as error:
                is_gone = error.code() is grpc.StatusCode.UNAVAILABLE
                if not has_answered(error):
                    hint = "" if self._tls is None else " (--tls-peer-ca, --tls-peer-name)"
                    why = error.details()
                    self._throttle.say("requests for model %s cannot be forwarded to %s: %s%s", name, address, why, hint)
                if not is_gone or sequence is not None or len(tried) == TRIES:
                    raise (answered_error(error) if has_answered(error) else _unreachable(name)) from None
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                raise _unreachable(name) from None  # the member has left the directory, which closed its channel
            finally:
                self._open[address] -= 1

    def _choose(self, addresses: Sequence[str], sequence: bytes | None) -> str:
        if sequence is not None:  # rendezvous hashing: sequences of other members stay when a member joins or leaves
            return max(addresses, key=lambda address: hashlib.blake2b(address.encode() + sequence).digest())
        # The less loaded of two random members, so that one member does not get everything at once.
        return min(random.sample(addresses, min(2, len(addresses))), key=self._open.__getitem__)

    def _channel(self, address: str) -> Any:
        if self._tls is not None and self._tls.files is not self._files:
            self._files = self._tls.files
            former, self._channels = self._channels, {}
            for channel in former.values():
                self._core.wait_for(asyncio.get_running_loop().create_task(channel.close(CLOSE_S)))
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._connect(address)
        return channel

    def _connect(self, address: str) -> Any:
        if self._tls is None:
            return grpc.aio.insecure_channel(address, CHANNEL_OPTIONS)
        name = self._tls.peer_name
        named = [] if name is None else [("grpc.ssl_target_name_override", name), ("grpc.default_authority", name)]
        return grpc.aio.secure_channel(address, self._tls.peer_credentials(), [*CHANNEL_OPTIONS, *named])


class StreamedRequest:
    """One request of a stream, forwarded to another member; over a stream of its own if the model is decoupled."""

    def __init__(
        self, data: bytes, name: str, time_left_s: float | None, many: ManyReplies, is_decoupled: dict[str, bool]
    ) -> None:
        """Prepare a serialized ModelInferRequest, which `ask` sends; `many` receives the responses of a decoupled model.

        `is_decoupled` says of models by name whether they are, as far as is known; this one is added.
        """
        self._data = data
        self._name = name
        self._time_left_s = time_left_s
        self._many = many
        self._is_decoupled = is_decoupled
        self._has_begun = self._is_answered = False

    async def ask(self, channel: Any, metadata: list[tuple[str, str]]) -> bytes:
        """Send the request; returns the response, which is empty for a decoupled model, whose responses go to `many`.

        Raises:
            InferenceError: the member refused the request, or was lost after its first response.
        """
        if self._is_answered:
            raise UnavailableError("the member that computed this request was lost before its last response; send it again")
        if self._name not in self._is_decoupled:
            request = ModelConfigRequest(name=self._name).SerializeToString()
            found = await channel.unary_unary(CONFIG_PATH)(request, timeout=self._time_left_s, metadata=metadata)
            config = ModelConfigResponse.FromString(found).config
            self._is_decoupled[self._name] = config.model_transaction_policy.decoupled
        if not self._is_decoupled[self._name]:
            try:
                return await _ask_once(self._data, self._time_left_s, channel, metadata)
            except grpc.aio.AioRpcError:
                self._is_decoupled.pop(self._name, None)  # it may have been reloaded with another configuration
                raise
        if not self._has_begun:
            self._has_begun = True
            self._many.begin(wants_empty_final=False)  # the member sends the empty final response
        stream = channel.stream_stream(INFER_STREAM_PATH)([self._data], timeout=self._time_left_s, metadata=metadata)
        async for received in stream:
            self._is_answered = True
            response, is_final = _streamed(received)
            read = asyncio.Event()
            self._many.response(response, final=is_final, read=read.set)
            await read.wait()  # the model of the other member waits for the client as one of this server does
        return b""


def _is_last(headers: Headers) -> bool:
    """Whether a call with these headers must be answered here, because it may not be forwarded again."""
    return headers.get(FORWARDED) == TWICE.encode()


def _streamed(data: bytes) -> tuple[bytes, bool]:
    """The ModelInferResponse in a ModelStreamInferResponse, and whether it is the last one of its request.

    Raises:
        InferenceError: the response contains this error.
    """
    message = ModelStreamInferResponse.FromString(data)
    response = message.infer_response
    if message.error_message:
        code, hint = response.parameters[STATUS].int64_param, response.parameters[RETRY_HINT].string_param
        raise error_of(code, message.error_message, int(hint) / 1000 if hint else None)
    is_final = response.parameters[IS_FINAL].bool_param
    del response.parameters[IS_FINAL]  # the client's stream sets this mark itself
    return response.SerializeToString(), is_final


async def _ask_once(data: bytes, time_left_s: float | None, channel: Any, metadata: list[tuple[str, str]]) -> bytes:
    answer: bytes = await channel.unary_unary(INFER_PATH)(data, timeout=time_left_s, metadata=metadata)
    return answer


async def _answer(call: Callable[[], Awaitable[bytes]], reply: Reply) -> None:
    try:
        answer: bytes | InferenceError = await call()
    except InferenceError as error:
        answer = error
    except asyncio.CancelledError:  # the client has disconnected
        return
    reply(answer)


def _unreachable(name: str) -> UnavailableError:
    return UnavailableError(
        f"the members that serve model {name!r} cannot be reached from this one, whose log says why; ask again in a moment"
    )
