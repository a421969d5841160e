"""Descriptions of the routes that ask a model by its tensors."""

from __future__ import annotations

from typing import Annotated, Any, Final

from halfserve.serve.http.routing.kserve_bodies import GenerateBody, GenerateResponseJson, InferBody, InferResponseJson
from halfserve.serve.http.routing.operations import (
    BYTES_TYPE,
    OF_INFERENCE,
    BodyContent,
    Bytes,
    Count,
    DescribedAnswer,
    RestOperation,
    Tag,
)

EVENT_STREAM: Final = "text/event-stream"
LENGTH_HEADER: Final = "Inference-Header-Content-Length"

INFER: Final = RestOperation(
    "infer",
    Tag.INFERENCE,
    "Ask {model}",
    DescribedAnswer(
        "The outputs, in the order that was asked for.",
        BodyContent(
            InferResponseJson,
            example={
                "model_name": "unbatched",
                "model_version": "1",
                "id": "42",
                "outputs": [{"name": "y", "datatype": "FP32", "shape": [3], "data": [2.0, 4.0, 6.0]}],
            },
        ),
        BodyContent(
            Annotated[Bytes, "The JSON, and behind it the bytes of each output that was asked for with binary_data."],
            media_type=BYTES_TYPE,
        ),
        headers={LENGTH_HEADER: Annotated[int, "Bytes of the JSON, where bytes of tensors follow it."]},
    ),
    "Tensors travel as JSON (`data`: flat, or nested as the shape is) or as bytes: then the body is the JSON, whose length "
    "`Inference-Header-Content-Length` tells, and behind it the bytes of every input with the parameter `binary_data_size`, "
    "little-endian and row-major; each element of BYTES has its length before it, in four bytes. With a length of 0 the whole "
    "body is the bytes of the model's only input; of BYTES it is the text of its one element. NaN and infinities are the texts "
    '"NaN", "Infinity" and "-Infinity" in JSON. Request and response may be compressed with gzip or deflate. A client that '
    "closes the connection gives its place in the queue back.",
    takes=(
        BodyContent(
            InferBody,
            example={
                "id": "42",
                "inputs": [{"name": "x", "datatype": "FP32", "shape": [3], "data": [1.0, 2.0, 3.0]}],
                "outputs": [{"name": "y"}],
            },
        ),
        BodyContent(Bytes, media_type=BYTES_TYPE),
    ),
    errors=OF_INFERENCE,
    headers={LENGTH_HEADER: Annotated[Count, "Bytes of the JSON at the body's start, where bytes follow it."]},
)
_GENERATED: Final[dict[str, Any]] = {"model_name": "unbatched", "model_version": "1", "id": "42", "y": [2.0, 4.0, 6.0]}
_ASKED: Final = BodyContent(GenerateBody, example={"id": "42", "x": [1.0, 2.0, 3.0]})
GENERATE: Final = RestOperation(
    "generate",
    Tag.INFERENCE,
    "Ask {model} by input names, for one response",
    DescribedAnswer(
        "The outputs and the response's parameters by name; an output of one element is a value, any other one a flat list.",
        BodyContent(GenerateResponseJson, example=_GENERATED),
    ),
    "Triton's generate extension. Each field whose name is an input's is that input: a value or a flat list, which takes "
    "the input's shape; the last open size follows from the number of elements, other open sizes are 1. All other fields, and "
    "those of `parameters`, are parameters of the request. A model that gives no response, or more than one, is an error here; "
    "ask it by `generate_stream`.",
    takes=(_ASKED,),
    errors=OF_INFERENCE,
)
GENERATE_STREAM: Final = RestOperation(
    "generateStream",
    Tag.INFERENCE,
    "Ask {model} by input names, for any number of responses",
    DescribedAnswer("The responses, as they come.", BodyContent(GenerateResponseJson, media_type=EVENT_STREAM)),
    "The request is that of `generate`. Each response is one server-sent event, sent as soon as the model gives it. An error "
    "of the model is an event too, an object with the text `error`; if it comes first, the status is its own. A request that "
    "is refused before it is queued is answered with JSON. A client that closes the connection cancels the request.",
    takes=(_ASKED,),
    errors=OF_INFERENCE,
)
