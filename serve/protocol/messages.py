"""Bytes as messages."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from protos.inference_pb2 import ModelInferRequest
from serve.engine.errors import InvalidArgumentError
from serve.protocol.infer_wire import MAX_FIELDS, MAX_INNER_FIELDS, has_too_many_fields

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


def parse_request(data: bytes) -> ModelInferRequest:
    """The inference request that these bytes are.

    Raises:
        InvalidArgumentError: they are none, or one with too many fields.
    """
    check_fields(data)
    return parse(ModelInferRequest, data)


def check_fields(data: bytes) -> None:
    """Whether an inference request may be looked at field by field.

    Raises:
        InvalidArgumentError: it has too many.
    """
    if has_too_many_fields(data):
        raise InvalidArgumentError(
            f"the request has more than {MAX_FIELDS} inputs, outputs, parameters and raw_input_contents, or its inputs and "
            f"outputs have more than {MAX_INNER_FIELDS} sizes and parameters; expected fewer"
        )
