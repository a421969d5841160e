"""How both clients reach a server: the method paths and the channel's options."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

import grpc

from serve.client.connection.address import Balancing, Target
from serve.client.connection.tls import Tls
from serve.client.errors import InvalidRequest

SERVICE = "inference.GRPCInferenceService"
MAX_MESSAGE_BYTES = 2**31 - 1  # protobuf's own limit; grpc's default of 4 MiB is less than a batch of 32 images

Compression = Literal["gzip", "deflate"]
_COMPRESSIONS = {"gzip": grpc.Compression.Gzip, "deflate": grpc.Compression.Deflate}


def method_path(method: str) -> str:
    """The path of one RPC, such as "/inference.GRPCInferenceService/ModelInfer"."""
    return f"/{SERVICE}/{method}"


def compression_named(name: str | None) -> Any:
    """Grpc's own value for a compression; None for none.

    Raises:
        InvalidRequest: it is no compression that gRPC knows.
    """
    if name is None:
        return None
    if name not in _COMPRESSIONS:
        raise InvalidRequest(f"compression must be one of {', '.join(_COMPRESSIONS)} or None, not {name!r}")
    return _COMPRESSIONS[name]


def channel_options(*, balancing: Balancing = "pick_first", keepalive_s: float | None = None) -> list[tuple[str, int | str]]:
    """Options for grpc.insecure_channel and grpc.aio.insecure_channel.

    Args:
        balancing: how calls are spread over a target's addresses.
        keepalive_s: seconds of silence after which the server is pinged while calls wait for it; None for never.
    """
    options: list[tuple[str, int | str]] = [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        # Without it, clients of one process share connections and the waiting times after a failed attempt.
        ("grpc.use_local_subchannel_pool", 1),
        # A server that restarts is found again within a second instead of two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # How long an attempt may take, with TLS and HTTP/2's greeting: a supervised server that restarts has connections wait.
        ("grpc.min_reconnect_backoff_ms", 5000),
        ("grpc.service_config", json.dumps({"loadBalancingConfig": [{balancing: {}}]})),
    ]
    if keepalive_s is not None:
        milliseconds = max(1, round(keepalive_s * 1000))
        options += [("grpc.keepalive_time_ms", milliseconds), ("grpc.keepalive_timeout_ms", milliseconds)]
    return options


@dataclass(frozen=True, kw_only=True)
class ChannelSettings:
    """Everything that a channel is made from.

    Attributes:
        target: whom to ask.
        tls: certificates; None for an unencrypted connection.
        balancing: how calls are spread over the target's addresses.
        compression: of messages, where a call does not say otherwise.
        keepalive_s: see `channel_options`.
    """

    target: Target
    tls: Tls | None
    balancing: Balancing
    compression: str | None
    keepalive_s: float | None

    def open(self, library: Any) -> Any:
        """A channel of `library`, which is grpc or grpc.aio; it connects at the first call."""
        options = channel_options(balancing=self.balancing, keepalive_s=self.keepalive_s)
        compression = compression_named(self.compression)
        if self.tls is None:
            return library.insecure_channel(self.target.uri, options=options, compression=compression)
        if self.tls.server_name is not None:
            options.append(("grpc.ssl_target_name_override", self.tls.server_name))
            options.append(("grpc.default_authority", self.tls.server_name))
        return library.secure_channel(self.target.uri, self.tls.credentials(), options=options, compression=compression)
