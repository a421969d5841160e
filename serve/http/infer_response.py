"""The gRPC message of an answer as REST has it: JSON, and behind it the bytes of the outputs that were asked for as such."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from protos.datatypes import BY_WIRE
from protos.inference_pb2 import ModelInferResponse
from protos.shared_memory_parameters import REGION
from serve.engine.errors import InvalidArgumentError
from serve.http.answers import with_written, written
from serve.http.json_tensors import json_text
from serve.protocol.raw_tensors import from_raw


@dataclass(frozen=True, kw_only=True)
class RestResponse:
    """An answer on its way out.

    Attributes:
        body: JSON, and the bytes behind it.
        json_bytes: the length of the JSON where something follows it; None where nothing does.
    """

    body: bytes
    json_bytes: int | None


def write_response(message: bytes, is_binary: Callable[[str], bool]) -> RestResponse:
    """The body for an answer.

    Args:
        message: a serialized ModelInferResponse.
        is_binary: whether an output is to travel as bytes.

    Raises:
        InvalidArgumentError: an output cannot be written as JSON.
    """
    response = ModelInferResponse.FromString(message)
    content: dict[str, Any] = {"model_name": response.model_name, "model_version": response.model_version}
    if response.id:
        content["id"] = response.id
    if response.parameters:
        content["parameters"] = {name: value.string_param for name, value in response.parameters.items()}
    behind: list[bytes] = []
    outputs = [
        _output(entry, raw, behind if is_binary(entry.name) else None)
        for entry, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    ]
    text = with_written(content, "outputs", f"[{','.join(outputs)}]").encode()
    if not any(is_binary(entry.name) for entry in response.outputs if REGION not in entry.parameters):
        return RestResponse(body=text, json_bytes=None)
    return RestResponse(body=b"".join([text, *behind]), json_bytes=len(text))


def _output(entry: ModelInferResponse.InferOutputTensor, raw: bytes, behind: list[bytes] | None) -> str:
    shape = list(entry.shape)
    output: dict[str, Any] = {"name": entry.name, "datatype": entry.datatype, "shape": shape}
    there = REGION in entry.parameters
    # Triton's clients take whatever has parameters for bytes behind the JSON, so what lies in shared memory has none.
    if behind is not None and not there:
        output["parameters"] = {"binary_data_size": len(raw)}
        behind.append(raw)
    if there or behind is not None:
        return written(output)
    datatype = BY_WIRE[entry.datatype]
    try:
        return with_written(output, "data", json_text(from_raw(raw, datatype, shape), datatype))
    except ValueError as error:
        raise InvalidArgumentError(f"output {entry.name!r} {error}") from None
