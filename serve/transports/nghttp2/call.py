"""What a connection asks of its calls."""

from __future__ import annotations

from typing import Protocol

from serve.engine.errors import InferenceError


class Call(Protocol):
    """What a connection asks of one call in flight.

    Attributes:
        is_unary: it is a UnaryCall.
    """

    is_unary: bool

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

    def give_up(self, error: InferenceError) -> None:
        """End with an error, whatever of the request is still to come."""

    def give_up_stalled(self, before_s: float) -> None:
        """End with a status if the client owes the rest of a message since `before_s`, on the loop's clock."""


class UnaryCall(Call, Protocol):
    """One with one message each way, which is answered after the request."""

    def take(self, message: bytes | memoryview) -> None:
        """Take the message, and the client's end."""

    def grew(self) -> None:
        """Some of the message has come, which is kept elsewhere until it is whole."""
