"""Requests for models that other members of the cluster serve: forward them, as a client may ask any member for any model.

Our own clients know where each model is served, and ask there. A forwarded call says so in its metadata, and is not forwarded
again.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from halfserve.protos.cluster_pb2 import Directory, Member
from halfserve.serve.engine.errors import FailedPreconditionError, InferenceError, UnavailableError
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.protocol.inference import Cancel, Inference, Reply
from halfserve.serve.protocol.messages import parse_request
from halfserve.serve.protocol.request_cache import SEQUENCE_ID
from halfserve.serve.protocol.service import INFER_PATH, Headers, Service
from halfserve.serve.protocol.status import RETRY_HINT, error_of

FORWARDED, AUTHORIZATION = b"halfserve-forwarded", b"authorization"
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
TRIES = 2  # a member may have gone a moment ago
M = TypeVar("M", bound=Message)


class Elsewhere:
    """The other members of a cluster, as far as requests are forwarded to them. Lives on the event loop.

    Attributes:
        directory: the present one.
        forwarded: inference requests so far.
    """

    def __init__(self, member: str, core: InferenceCore, *, is_encrypted: bool) -> None:
        """Members that are not known yet; `member` is the own id, and `is_encrypted` says whether they all speak TLS."""
        self.directory = Directory()
        self.forwarded = 0
        self._is_encrypted = is_encrypted
        self._member = member
        self._core = core
        self._serving: dict[str, list[str]] = {}  # addresses by model
        self._channels: dict[str, Any] = {}  # grpc.aio.Channel by address; grpcio ships no types
        self._open: Counter[str] = Counter()  # forwarded calls without an answer, by address

    async def follow(self, directory: Directory) -> None:
        """Forward to the members of this directory from now on."""
        self.directory = directory
        self._serving = {}
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
        """The entry for requests with these headers."""
        if FORWARDED in headers:
            return service.inference
        return service.inference.with_elsewhere(partial(self._infer, service, headers))

    async def call(self, name: str, path: str, request: Message, answer: type[M], headers: Headers) -> M | None:
        """Call a method of a member that serves a model; None where there is none, or the call is forwarded already.

        Raises:
            InferenceError: that member refuses.
        """
        if FORWARDED in headers or not self.serving(name):
            return None
        return answer.FromString(await self._call(name, path, request.SerializeToString(), None, headers))

    async def close(self) -> None:
        """End the connections."""
        channels, self._channels = self._channels, {}
        await asyncio.gather(*(channel.close() for channel in channels.values()))

    def _infer(self, service: Service, headers: Headers, data: bytes, time_left_s: float | None, reply: Reply) -> Cancel | None:
        """Forward a request for a model that is not served here; None where it is, or no other member serves it."""
        try:
            request = parse_request(data)
        except InferenceError:
            return None
        name = request.model_name
        if not service.may_see(name) or self._core.served(name) or not self.serving(name):
            return None
        self.forwarded += 1
        # All requests of a sequence go to the same member, as long as it serves the model.
        sequence = request.parameters[SEQUENCE_ID].SerializeToString() if SEQUENCE_ID in request.parameters else None
        call = partial(self._call, name, INFER_PATH, data, time_left_s, headers, sequence)
        task = asyncio.get_running_loop().create_task(_answer(call, reply))
        self._core.wait_for(task)
        return task.cancel  # type: ignore[return-value]  # its result says nothing to the caller

    async def _call(
        self, name: str, path: str, data: bytes, time_left_s: float | None, headers: Headers, sequence: bytes | None = None
    ) -> bytes:
        if self._is_encrypted:  # this member does not know whose certificates to trust
            raise FailedPreconditionError(
                f"model {name!r} is served by other members of this cluster, and with TLS none forwards requests; ask "
                f"{self.serving(name)[0]}"
            )
        metadata = [(FORWARDED.decode(), "1")]
        if AUTHORIZATION in headers:
            metadata.append((AUTHORIZATION.decode(), headers[AUTHORIZATION].decode("latin-1")))
        tried: list[str] = []
        while True:
            addresses = [address for address in self.serving(name) if address not in tried]
            if not addresses:
                raise UnavailableError(f"the members that serve model {name!r} cannot be reached now; ask again in a moment")
            address = self._choose(addresses, sequence)
            tried.append(address)
            self._open[address] += 1
            try:
                answer: bytes = await self._channel(address).unary_unary(path)(data, timeout=time_left_s, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                is_gone = error.code() is grpc.StatusCode.UNAVAILABLE
                if not is_gone or sequence is not None or len(tried) == TRIES:
                    raise _error(error) from None
            else:
                return answer
            finally:
                self._open[address] -= 1

    def _choose(self, addresses: Sequence[str], sequence: bytes | None) -> str:
        if sequence is not None:  # rendezvous hashing: others keep their member when one comes or goes
            return max(addresses, key=lambda address: hashlib.blake2b(address.encode() + sequence).digest())
        # The less busy one of two, so that no member gets all requests of all others at once.
        return min(random.sample(addresses, min(2, len(addresses))), key=self._open.__getitem__)

    def _channel(self, address: str) -> Any:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = grpc.aio.insecure_channel(address, OPTIONS)
        return channel


async def _answer(call: Callable[[], Awaitable[bytes]], reply: Reply) -> None:
    try:
        answer: bytes | InferenceError = await call()
    except InferenceError as error:
        answer = error
    except asyncio.CancelledError:  # the client has gone
        return
    reply(answer)


def _error(error: Any) -> InferenceError:
    hints = [value for key, value in error.trailing_metadata() or () if key == RETRY_HINT]
    code: tuple[int, str] = error.code().value
    return error_of(code[0], str(error.details()), int(hints[0]) / 1000 if hints else None)
