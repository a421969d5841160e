"""POST /v2/models/<model>/classify: classes of a picture file, with scores, in the form of Hugging Face's image classification.

See https://huggingface.co/docs/inference-providers/tasks/image-classification.
"""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, NotRequired, TypedDict

import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from halfserve.protos.inference_pb2 import ModelInferRequest
from halfserve.serve.engine.config.parameters import own_parameter
from halfserve.serve.engine.errors import (
    FailedPreconditionError,
    InferenceError,
    InvalidArgumentError,
    UnsupportedError,
)
from halfserve.serve.engine.model import Model
from halfserve.serve.http.infer_route import inference_entry, joined, named, record_refusal
from halfserve.serve.http.request_body import BodyReader, memory_held
from halfserve.serve.http.routing.error_forms import InputError
from halfserve.serve.http.routing.operations import (
    BYTES_TYPE,
    JSON_TYPE,
    OF_INFERENCE,
    BodyContent,
    Component,
    DescribedAnswer,
    Keyword,
    Positive,
    RestOperation,
    Tag,
)
from halfserve.serve.http.routing.route_table import MODEL, VERSION, serves
from halfserve.serve.http.tasks.classification import softmax
from halfserve.serve.http.tasks.row_requests import ROW_TIMES, RowRequests, Vector, time_left_s, vector_of
from halfserve.serve.http.tasks.text_bodies import Content, read_content, shown, text_field, whole_field
from halfserve.serve.http.tasks.text_endpoint import json_rows, sigmoid
from halfserve.serve.http.tasks.tokenized_models import labels_of, task_of
from halfserve.serve.protocol.raw_tensors import LENGTH_PREFIX_BYTES
from halfserve.serve.protocol.rpc import INFERENCE
from halfserve.serve.protocol.service import Service

IMAGE_CLASSIFICATION: Final = "image-classification"
TOP: Final = 5  # classes of an answer, where a request does not say how many
FUNCTIONS: Final[Mapping[str, Callable[[Vector], Vector]]] = {
    "sigmoid": sigmoid,
    "softmax": softmax,
    "none": lambda logits: logits,
}
DATA_URL: Final = "data:"


@dataclass(frozen=True, kw_only=True)
class AskedPicture:
    """Content of a classification request."""

    data: bytes  # an encoded picture
    top: int = TOP  # the number of classes that are wanted
    function: str | None = None  # name in FUNCTIONS of the function that makes scores; None for the model's own


class ClassifyParametersJson(TypedDict):
    top_k: NotRequired[Annotated[Positive | None, Keyword("default", TOP)]]
    function_to_apply: NotRequired[Literal["sigmoid", "softmax", "none"] | None]


class ClassifyBody(TypedDict):
    inputs: Annotated[str, "A picture file in base64, or as a data: URL."]
    parameters: NotRequired[ClassifyParametersJson | None]


class PictureClassJson(TypedDict):
    label: str
    score: float


def _operation(name: str, version: str) -> RestOperation:
    example = [{"label": "tabby", "score": 0.91}, {"label": "tiger cat", "score": 0.06}]
    classes = Annotated[list[PictureClassJson], Component("PictureClasses")]
    return RestOperation(
        name,
        Tag.INFERENCE,
        f"The best classes of a picture, by {version} of a model for image-classification",
        DescribedAnswer("The best classes, the most likely first.", BodyContent(classes, example)),
        "The body is a JPEG, PNG or WebP file with any content type but application/json; or JSON with the file in base64, as "
        "Hugging Face's clients send it. The server scales and cuts the picture by the preprocessing.json that export writes "
        "beside the model.",
        takes=(BodyContent(None, media_type=BYTES_TYPE), BodyContent(ClassifyBody)),
        errors=OF_INFERENCE | {409},
    )


class PictureRoutes:
    """The routes that classify pictures, which they send to the model as they are."""

    def __init__(self, service: Service, bodies: BodyReader) -> None:
        self._service = service
        self._bodies = bodies

    @serves("POST", f"{MODEL}/classify", INFERENCE, _operation("classify", "the latest version"))
    @serves("POST", f"{VERSION}/classify", INFERENCE, _operation("classifyByVersion", "one version"))
    async def classify(self, request: Request) -> Response:
        """Return the best classes of a picture: the body is a picture file, or JSON with one in base64. Raises InferenceError:
        the picture is wrong, or the request was refused or failed; ClientDisconnect: the client has gone.
        """
        name, version = named(request)
        try:
            model = await self._service.core.arrival(name, version)
            asked = await self._asked(request)
            input_name = _picture_input(model)
        except InferenceError as error:
            record_refusal(self._service, request, error, name, version)
            raise
        except ClientDisconnect:
            record_refusal(self._service, request, None, name, version)
            raise
        rows = RowRequests(
            inference_entry(self._service, request),
            _PictureMessages(model, version, input_name),
            [asked.data],
            1,
            memory_held(request),
            time_left_s(request),
        )
        (message,) = await rows.gather(request)
        logits = vector_of(message, model.name)
        function = asked.function or _function_of(model, len(logits))
        body = json_rows(_best(FUNCTIONS[function](logits), labels_of(model, len(logits)), asked.top))
        self._bodies.hold_answer(request, len(body))
        return Response(body, 200, {"cache-control": "no-store", **request.scope[ROW_TIMES]}, JSON_TYPE)

    async def _asked(self, request: Request) -> AskedPicture:
        body = await self._bodies.read(request)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "multipart/form-data":
            raise UnsupportedError("the body is a form, expected the picture file itself (curl --data-binary @FILE)")
        if kind != JSON_TYPE:
            return AskedPicture(data=body)
        memory_held(request).grow(2 * len(body))  # the text, and the bytes that it stands for
        return await self._bodies.understand(body, lambda body: _read_json(read_content(body)))


@dataclass(frozen=True)
class _PictureMessages:
    """Makes the request of one picture."""

    model: Model
    version: str
    input_name: str

    def message(self, row: bytes) -> bytes:
        head = ModelInferRequest(model_name=self.model.name, model_version=self.version)
        head.inputs.add(name=self.input_name, datatype="BYTES", shape=[1])
        head.outputs.add(name=next(iter(self.model.outputs)))
        return joined(head, [len(row).to_bytes(LENGTH_PREFIX_BYTES, "little") + row])


def _picture_input(model: Model) -> str:
    """Return the input that takes pictures. Raises InvalidArgumentError: the model is for another task;
    FailedPreconditionError: nothing says how its pictures are prepared.
    """
    task = task_of(model)
    if task != IMAGE_CLASSIFICATION:
        found = f"is for {task}" if task else "names no task in its configuration (halfserve.task)"
        raise InvalidArgumentError(f"model {model.name!r} {found}, expected one for {IMAGE_CLASSIFICATION}")
    if not model.pictures:
        raise FailedPreconditionError(
            f"model {model.name!r} has no preprocessing.json, which says how pictures are scaled and cut; export it again, or "
            f"send pixels to /v2/models/{model.name}/infer"
        )
    return next(iter(model.pictures))


def _read_json(content: Content) -> AskedPicture:
    """Return a body of Hugging Face: {"inputs": base64, "parameters": {"top_k": 5, "function_to_apply": "softmax"}}."""
    text = text_field(content, "inputs")
    if text.startswith(DATA_URL):
        text = text.partition(",")[2]
    try:
        data = b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InputError(f"'inputs' is {shown(text)}, expected the bytes of a picture in base64", param="inputs") from None
    parameters: Any = content.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise InputError(f"'parameters' is {shown(parameters)}, expected an object", param="parameters")
    function = parameters.get("function_to_apply")
    if function is not None and function not in FUNCTIONS:
        raise InputError(
            f"'function_to_apply' is {shown(function)}, expected one of {', '.join(FUNCTIONS)}", param="function_to_apply"
        )
    return AskedPicture(data=data, top=whole_field(parameters, "top_k") or TOP, function=function)


def _function_of(model: Model, count: int) -> str:
    """Return the name in FUNCTIONS of a model's score function, as transformers' pipeline chooses it."""
    is_each_alone = own_parameter(model.config, "halfserve.label_scores") == "sigmoid" or count == 1
    return "sigmoid" if is_each_alone else "softmax"


def _best(scores: Vector, labels: Any, count: int) -> list[dict[str, Any]]:
    order = np.argsort(-scores, kind="stable")[:count]
    return [{"label": labels[index], "score": float(scores[index])} for index in order]
