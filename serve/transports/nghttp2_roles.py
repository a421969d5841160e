"""What a connection, its calls and its server ask of each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from serve.transports.nghttp2_connection import GrpcConnection


class Call(Protocol):
    """What a connection asks of one call in flight."""

    @property
    def held_bytes(self) -> int:
        """Bytes of an unfinished message."""

    def receive(self, data: bytes) -> int:
        """Take what the client sent; return how many bytes it may send in its place at once."""

    def receive_last(self, data: bytes) -> int:
        """The same, for the last of what the client sends."""

    def end(self) -> None:
        """The client will send no more, and has not sent anything with that."""

    def gone(self) -> None:
        """The client does not wait for an answer any more, or cannot get it."""

    def give_up_stalled(self, before_s: float) -> None:
        """End with a status if the client owes the rest of a message since `before_s`, on the loop's clock."""


OpenCall = Callable[["GrpcConnection", int], Call]
Route = Callable[[dict[bytes, bytes]], OpenCall]


class Owner(Protocol):
    """What a connection asks of its server."""

    @property
    def received(self) -> bytearray:
        """Memory for what a socket has to say."""

    def connected(self, connection: GrpcConnection) -> bool:
        """Take note of a new connection; False closes it."""

    def disconnected(self, connection: GrpcConnection) -> None:
        """Forget it."""

    def flush_soon(self, connection: GrpcConnection) -> None:
        """Have `connection.flush` called at the end of this turn of the loop."""
