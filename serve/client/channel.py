"""How both clients reach a server: the address, the method paths and the channel's options."""

from __future__ import annotations

import json

from serve.client.errors import InvalidRequest

SERVICE = "inference.GRPCInferenceService"
MAX_MESSAGE_BYTES = 2**31 - 1  # protobuf's own limit; grpc's default of 4 MiB is less than a batch of 32 images
MAX_RETRIES = 4  # gRPC makes at most five attempts


def method_path(method: str) -> str:
    """The path of one RPC, such as "/inference.GRPCInferenceService/ModelInfer"."""
    return f"/{SERVICE}/{method}"


def checked_address(address: str) -> str:
    """The address as it is, if it reads HOST:PORT.

    Raises:
        InvalidRequest: it has a scheme, or no host, or no port between 1 and 65535.
    """
    host, _, port = address.rpartition(":")
    if "/" in address or not host or not (port.isdecimal() and port.isascii()) or not 0 < int(port) < 2**16:
        raise InvalidRequest(f"the address must be HOST:PORT, such as 127.0.0.1:8001, not {address!r}")
    return address


def channel_options(*, retries: int = 0) -> list[tuple[str, int | str]]:
    """Options for grpc.insecure_channel and grpc.aio.insecure_channel.

    Args:
        retries: how many times a call is sent again when the server cannot be reached or is overloaded (0 to 4). gRPC does it,
            within the call's deadline, and waits as long as the server's retry hint says. Inference has no side effects, so
            sending it again is safe.

    Raises:
        InvalidRequest: retries is out of range.
    """
    if not 0 <= retries <= MAX_RETRIES:
        raise InvalidRequest(f"retries must be 0 to {MAX_RETRIES}, not {retries!r}")
    options: list[tuple[str, int | str]] = [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        # Without it, clients of one process share connections and the waiting times after a failed attempt.
        ("grpc.use_local_subchannel_pool", 1),
        # A server that restarts is found again within two seconds instead of two minutes.
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 2000),
    ]
    if retries:
        # A message above this size is not kept for sending again; the default is 256 KiB.
        options += [("grpc.service_config", _retry_config(retries)), ("grpc.per_rpc_retry_buffer_size", MAX_MESSAGE_BYTES)]
    return options


def _retry_config(retries: int) -> str:
    policy = {
        "maxAttempts": retries + 1,
        "initialBackoff": "0.05s",
        "maxBackoff": "2s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
    }
    return json.dumps({"methodConfig": [{"name": [{"service": SERVICE}], "retryPolicy": policy}]})
