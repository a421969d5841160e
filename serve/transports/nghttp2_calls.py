"""From the path of a call to the object that carries it."""

from __future__ import annotations

import asyncio
from functools import partial

from serve.engine.errors import InferenceError, UnsupportedError
from serve.protocol.service import INFER_PATH, INFER_STREAM_PATH, Service
from serve.protocol.status import status_of
from serve.transports.grpc_framing import MessageReader
from serve.transports.grpc_headers import timeout_seconds
from serve.transports.nghttp2_connection import Call, GrpcConnection
from serve.transports.nghttp2_streams import InferStreamCall, StreamCall
from serve.transports.nghttp2_unary import InferCall, UnaryCall


class Calls:
    """Opens the call that a path names."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._unary = {path.encode(): method for path, method in service.unary.items()}
        self._streams = {path.encode(): method for path, method in service.streams.items()}
        self._infer = INFER_PATH.encode()
        self._infer_stream = INFER_STREAM_PATH.encode()

    def open(self, connection: GrpcConnection, stream: int, headers: dict[bytes, bytes]) -> Call:
        """The call that these headers begin; one that is refused already takes no more than its end."""
        path = headers.get(b":path", b"")
        try:
            time_left = timeout_seconds(headers.get(b"grpc-timeout"))
            reader = MessageReader(connection.limits.max_message_bytes, headers.get(b"grpc-encoding"))
            if path == self._infer:
                return InferCall(connection, stream, reader, self._service.inference, time_left)
            if path == self._infer_stream:
                return InferStreamCall(connection, stream, reader, self._service.inference, time_left)
            unary = self._unary.get(path)
            if unary is not None:
                return UnaryCall(connection, stream, reader, unary)
            method = self._streams.get(path)
            if method is not None:
                return StreamCall(connection, stream, reader, method, time_left)
            name = path.decode("ascii", "replace")
            raise UnsupportedError(f"{name} is not served here; server reflection lists what is")
        except InferenceError as error:
            return RefusedCall(connection, stream, error)


class RefusedCall:
    """A call that was over when it began."""

    held_bytes = 0

    def __init__(self, connection: GrpcConnection, stream: int, error: InferenceError) -> None:
        # In the next turn of the loop: the connection does not know of this call yet.
        asyncio.get_running_loop().call_soon(partial(connection.fail, stream, status_of(error), ended=False))

    def receive(self, data: bytes) -> int:
        """Drop it."""
        return len(data)

    def end(self) -> None:
        """It has been answered."""

    def gone(self) -> None:
        """It has been answered."""

    def give_up_stalled(self, before_s: float) -> None:
        """It has been answered."""
