"""An RPC, what it requires of its callers, one call of it, and the layers around its method; the same for both transports and
REST.

A method is `async method(request, call)`. For an RPC with one message each way, it gets the request and returns the response.
For a streaming RPC, it gets the asynchronous iterator of the requests, sends responses with `call.send`, and returns None.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from google.protobuf.message import Message

from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.observability.observability import Observability
from halfserve.serve.protocol.shared_memory import SharedMemory

SERVER_NAME = "halfserve"
Headers = Mapping[bytes, bytes]  # headers of a call, names in lower case
Send = Callable[[Message], Awaitable[None]]


class Role(StrEnum):
    """The right to a group of calls, which a token carries.

    INFER: send inference requests, and read metadata. METRICS: read the metrics. SHARED_MEMORY: register memory of the server's
    machine, and infer from it. ADMIN: all of these, and change what is served, logged and traced.
    """

    INFER = "infer"
    METRICS = "metrics"
    SHARED_MEMORY = "shared-memory"
    ADMIN = "admin"


class Api(StrEnum):
    """Groups of methods and routes that a header can be required for, by Triton's names."""

    HEALTH = "health"
    METADATA = "metadata"
    INFERENCE = "inference"
    SHARED_MEMORY = "shared-memory"
    MODEL_CONFIG = "model-config"
    MODEL_REPOSITORY = "model-repository"
    STATISTICS = "statistics"
    TRACE = "trace"
    LOGGING = "logging"


@dataclass(frozen=True, slots=True)
class Access:
    """Requirements of a method or a route on its callers.

    Attributes:
        role: role that the caller's token must carry; None admits callers without a token, and does not limit their rate.
        api: group whose restriction applies; None if no restriction can.
        is_admin: whether it changes the server, so that a server with an admin port serves it on that port alone.
    """

    role: Role | None
    api: Api | None
    is_admin: bool = False


HEALTH = Access(None, Api.HEALTH)
METADATA = Access(Role.INFER, Api.METADATA)
INFERENCE = Access(Role.INFER, Api.INFERENCE)
MODEL_READY = Access(Role.INFER, Api.HEALTH)
MODEL_CONFIG = Access(Role.INFER, Api.MODEL_CONFIG)
STATISTICS = Access(Role.INFER, Api.STATISTICS)
REPOSITORY_INDEX = Access(Role.INFER, Api.MODEL_REPOSITORY)
REPOSITORY_CHANGE = Access(Role.ADMIN, Api.MODEL_REPOSITORY, is_admin=True)
SHARED_MEMORY = Access(Role.SHARED_MEMORY, Api.SHARED_MEMORY)
TRACE = Access(Role.ADMIN, Api.TRACE, is_admin=True)
LOGGING = Access(Role.ADMIN, Api.LOGGING, is_admin=True)
METRICS = Access(Role.METRICS, None)
DESCRIPTION = Access(Role.INFER, None)  # what the server offers: the page, the OpenAPI document, reflection
UNKNOWN_ROUTE = DESCRIPTION  # a path without a route has no answer but 404, which says where the list is
UNKNOWN_METHOD = Access(Role.ADMIN, None)


class ServerView:
    """The server as an RPC sees it: with all models, or those that its caller may use.

    Attributes:
        core: the visible models.
        memory: shared memory of the server.
        observability: logs and traces of the server.
        server_version: version of the server.
        server_name: name of the server.
        is_whole: whether all models are visible, so that the settings of the whole server may be changed.
    """

    def __init__(
        self,
        core: InferenceCore,
        memory: SharedMemory,
        observability: Observability,
        server_version: str,
        server_name: str = SERVER_NAME,
    ) -> None:
        self.core = core
        self.memory = memory
        self.observability = observability
        self.server_version = server_version
        self.server_name = server_name
        self.is_whole = True

    def may_see(self, model: str) -> bool:  # noqa: ARG002  (a restricted view answers otherwise)
        """Return whether the models of this name are visible."""
        return True


async def _send_nothing(_: Message) -> None:
    raise TypeError("this RPC returns its only response; only streaming RPCs send")


@dataclass(frozen=True, kw_only=True, slots=True)
class RpcCall:
    """One call of an RPC.

    Attributes:
        server: the server, as far as the caller may see it.
        peer: address of the client; "" if the transport does not pass it on.
        headers: headers of the call.
        grant: rights that the gate of the port has granted to the caller; None without a gate.
        send: sends one response of a streaming RPC, and returns once the client can take another.
    """

    server: ServerView
    peer: str = ""
    headers: Headers = field(default_factory=dict)
    grant: object | None = None
    send: Send = _send_nothing


Method = Callable[[Any, RpcCall], Awaitable[Any]]


@dataclass(frozen=True)
class Rpc:
    """An RPC.

    Attributes:
        path: path of the RPC, such as "/inference.GRPCInferenceService/ServerLive".
        request: class of the requests.
        method: answers; see the module.
        access: requirements on the caller.
        is_stream: whether there may be any number of messages each way.
        is_large: whether a request may contain a model's files.
    """

    path: str
    request: type[Message]
    method: Method
    access: Access = UNKNOWN_METHOD
    is_stream: bool = False
    is_large: bool = False


Layer = Callable[[Rpc, Method], Method]  # returns the method, or another one around it


def layered(rpc: Rpc, layer: Layer) -> Rpc:
    return replace(rpc, method=layer(rpc, rpc.method))
