"""An inference request as REST has it, JSON with tensors as JSON or as bytes behind it, made into the gRPC message.

From there on both protocols share every check. See https://github.com/kserve/open-inference-protocol, and Triton's
extension for binary tensor data: the body is JSON, as long as Inference-Header-Content-Length tells, then tensors' bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from protos.datatypes import BY_WIRE
from protos.inference_pb2 import ModelInferRequest
from protos.shared_memory_parameters import REGION
from protos.varint import encoded_varint
from serve.engine.errors import InvalidArgumentError
from serve.http import json_fields as fields
from serve.http.json_fields import Fields
from serve.http.json_tensors import array_from_json
from serve.protocol.raw_tensors import to_raw

RAW_ENTRY = bytes((ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER << 3 | 2,))
BINARY, BINARY_SIZE, ALL_BINARY = "binary_data", "binary_data_size", "binary_data_output"
Buffer = bytes | memoryview


@dataclass(frozen=True, kw_only=True)
class RestRequest:
    """A request on its way in.

    Attributes:
        message: a serialized ModelInferRequest.
        binary: whether outputs are answered as bytes, by name.
        binary_default: the same for outputs that the client does not name.
    """

    message: bytes
    binary: Mapping[str, bool]
    binary_default: bool

    def is_binary(self, output: str) -> bool:
        """Whether this output is answered as bytes."""
        return self.binary.get(output, self.binary_default)


def read_request(body: bytes, json_bytes: int | None, model: str, version: str) -> RestRequest:
    """The message that a body asks for.

    Args:
        body: as received, decompressed.
        json_bytes: how much of it is JSON; None is all.
        model: its name, from the path.
        version: from the path; "" is the latest.

    Raises:
        InvalidArgumentError: it is no such request; the text names the field.
    """
    view = memoryview(body)
    json_end = len(body) if json_bytes is None else json_bytes
    content = fields.parse_object(view[:json_end])
    head = ModelInferRequest(model_name=model, model_version=version, id=fields.text(content, "id", "the request", ""))
    parameters = fields.members(content, "parameters", "the request")
    binary_default = bool(fields.flag(parameters, ALL_BINARY, "parameters", default=False))
    set_parameters(head.parameters, parameters, "the request", skip={ALL_BINARY})
    binary = _outputs(head, content)
    raw = _inputs(head, content, view[json_end:])
    return RestRequest(message=_joined(head, raw), binary=binary, binary_default=binary_default)


def raw_request(body: bytes, model: str, version: str, name: str, datatype: str, shape: list[int]) -> RestRequest:
    """The message for a body that is nothing but the bytes of a model's only input (Inference-Header-Content-Length: 0)."""
    head = ModelInferRequest(model_name=model, model_version=version)
    head.inputs.add(name=name, datatype=datatype, shape=shape)
    return RestRequest(message=_joined(head, [body]), binary={}, binary_default=True)


def set_parameters(target: Any, given: Mapping[str, Any], where: str, *, skip: set[str]) -> None:
    """Write JSON values into a map of InferParameter.

    Raises:
        InvalidArgumentError: a value is none that a parameter can have.
    """
    for name, value in given.items():
        if name in skip:
            continue
        if isinstance(value, bool):
            target[name].bool_param = value
        elif isinstance(value, int) and -(2**63) <= value < 2**64:
            setattr(target[name], "int64_param" if value < 2**63 else "uint64_param", value)
        elif isinstance(value, float):
            target[name].double_param = value
        elif isinstance(value, str):
            target[name].string_param = value
        else:
            raise InvalidArgumentError(f"{where} has parameter {name!r} that is no text, number, true or false")


def _outputs(head: ModelInferRequest, content: Fields) -> dict[str, bool]:
    binary = {}
    for entry in fields.each_object(fields.items(content, "outputs", "the request"), "outputs"):
        name = fields.text(entry, "name", "an entry of outputs")
        where = f"output {name!r}"
        parameters = fields.members(entry, "parameters", where)
        asked = fields.flag(parameters, BINARY, where)
        if asked is not None:
            binary[name] = asked
        set_parameters(head.outputs.add(name=name).parameters, parameters, where, skip={BINARY})
    return binary


def _inputs(head: ModelInferRequest, content: Fields, behind: memoryview) -> list[Buffer]:
    raw: list[Buffer] = []
    position = 0
    for entry in fields.each_object(fields.items(content, "inputs", "the request"), "inputs"):
        name = fields.text(entry, "name", "an entry of inputs")
        where = f"input {name!r}"
        datatype, shape = fields.text(entry, "datatype", where), fields.shape(entry, where)
        parameters = fields.members(entry, "parameters", where)
        tensor = head.inputs.add(name=name, datatype=datatype, shape=shape)
        set_parameters(tensor.parameters, parameters, where, skip={BINARY_SIZE})
        if sum((BINARY_SIZE in parameters, "data" in entry, REGION in parameters)) != 1:
            raise InvalidArgumentError(
                f"{where} must have exactly one of data, parameter {BINARY_SIZE}, and a place in shared memory"
            )
        if BINARY_SIZE in parameters:
            size = fields.whole(parameters, BINARY_SIZE, where)
            if size > len(behind) - position:
                raise InvalidArgumentError(
                    f"{where} has {BINARY_SIZE} {size}, but {len(behind) - position} bytes are left behind the JSON; "
                    "its length goes into Inference-Header-Content-Length"
                )
            raw.append(behind[position : position + size])
            position += size
        elif "data" in entry:
            raw.append(_from_json(entry["data"], datatype, shape, where))
    if position != len(behind):
        raise InvalidArgumentError(f"{len(behind) - position} bytes behind the JSON belong to no input; expected none")
    return raw


def _from_json(data: Any, name: str, shape: list[int], where: str) -> bytes:
    datatype = BY_WIRE.get(name)
    if datatype is None:
        raise InvalidArgumentError(f"{where} has datatype {name!r:.40}, expected one of {', '.join(BY_WIRE)}")
    try:
        return to_raw(array_from_json(data, datatype, shape), datatype)
    except ValueError as error:
        raise InvalidArgumentError(f"{where} {error}") from None


def _joined(head: ModelInferRequest, raw: list[Buffer]) -> bytes:
    """The message, its raw contents laid behind it, so that they are copied once."""
    parts: list[Buffer] = [head.SerializeToString(deterministic=True)]
    for tensor in raw:
        parts += (RAW_ENTRY, encoded_varint(len(tensor)), tensor)
    return b"".join(parts)
