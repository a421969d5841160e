"""Bytes as messages."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from serve.engine.errors import InvalidArgumentError

M = TypeVar("M", bound=Message)


def parse(message: type[M], data: bytes) -> M:
    """The message that these bytes are.

    Raises:
        InvalidArgumentError: they are none.
    """
    try:
        return message.FromString(data)
    except DecodeError:
        raise InvalidArgumentError(
            f"the request is not a {message.DESCRIPTOR.name} message; check the client's .proto files"
        ) from None
