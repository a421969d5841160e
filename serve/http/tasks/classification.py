"""POST /predict as text-embeddings-inference's: classes of texts, or of pairs of texts, with scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NotRequired

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from halfserve.serve.engine.config.parameters import own_parameter
from halfserve.serve.http.routing.error_forms import Fault, InputError
from halfserve.serve.http.routing.operations import BodyContent, Component, DescribedAnswer
from halfserve.serve.http.tasks.row_requests import Vector
from halfserve.serve.http.tasks.text_bodies import TeiTruncationJson, Text, flag_field, require_count, shown, truncates
from halfserve.serve.http.tasks.text_endpoint import TextEndpoint, json_rows, serves_tei, sigmoid
from halfserve.serve.http.tasks.tokenized_models import CLASSIFICATION, labels_of

RESULT_BYTES = 48  # JSON of one result, without the label


class TeiPredictBody(TeiTruncationJson):
    inputs: Annotated[str | list[str | list[Any]], "A text, a pair of texts, or a list of [text] and [text, text]."]
    raw_scores: NotRequired[bool | None]


TeiPredictions = Annotated[list[dict[str, Any] | list[Any]], Component("TeiPredictions")]


class ClassificationRoutes:
    """The route that classifies texts."""

    def __init__(self, endpoint: TextEndpoint) -> None:
        self._endpoint = endpoint

    @serves_tei(
        "/predict",
        "predict",
        "Classes of texts",
        BodyContent(TeiPredictBody, {"inputs": "the train is late again"}),
        DescribedAnswer(
            "The classes of the text, or a list of them for each text, the most likely first.",
            BodyContent(TeiPredictions),
        ),
    )
    async def tei(self, request: Request) -> Response:
        """Return all classes of each text, the most likely first: with scores from 0 to 1, or with `raw_scores` logits."""
        endpoint = self._endpoint
        content = await endpoint.content(request)
        model = await endpoint.only(request, CLASSIFICATION)
        with endpoint.recorded(request, model.name):
            texts, is_batch = _inputs(content.get("inputs"))
            truncate, is_raw = truncates(content), flag_field(content, "raw_scores", default=False)
        vectors, _, model = await endpoint.of_texts(request, model, texts, "inputs", truncate=truncate)
        is_each_alone = own_parameter(model.config, "halfserve.label_scores") == "sigmoid" or len(vectors[0]) == 1
        score = sigmoid if is_each_alone else softmax
        labels = labels_of(model, len(vectors[0]))

        def write() -> bytes:
            answers = (_ranked(logits if is_raw else score(logits), labels) for logits in vectors)
            return json_rows(answers) if is_batch else json_rows(next(answers))

        size = len(vectors) * sum(RESULT_BYTES + len(label) for label in labels)
        return await endpoint.answer(request, size, write)


def softmax(logits: Vector) -> Vector:
    """Probabilities (classes,), float32, which sum to 1."""
    powers = np.exp((logits - logits.max()).astype(np.float64))
    result: Vector = (powers / powers.sum()).astype(np.float32)
    return result


def _ranked(scores: Vector, labels: Sequence[str]) -> list[dict[str, Any]]:
    order = np.argsort(-scores, kind="stable")
    return [{"score": float(scores[index]), "label": labels[index]} for index in order]


def _inputs(value: Any) -> tuple[list[Text], bool]:
    """Texts and pairs, and whether the request has a list of them: a text, [text] and [text, text] are one input."""
    if isinstance(value, str):
        return [_input([value], "inputs")], False
    if not isinstance(value, list):
        raise InputError(f"'inputs' is {shown(value)}, expected a text, a pair, or a list of lists of these", param="inputs")
    require_count(value, "inputs")
    if isinstance(value[0], str):
        return [_input(value, "inputs")], False
    return [_input(entry, f"inputs[{index}]") for index, entry in enumerate(value)], True


def _input(value: Any, where: str) -> Text:
    if not isinstance(value, list) or len(value) not in (1, 2) or not all(isinstance(text, str) for text in value):
        raise InputError(f"{where} is {shown(value)}, expected [text] or [text, text]", param="inputs")
    if not all(value):
        raise InputError(f"{where} has an empty text, expected characters", param="inputs", fault=Fault.EMPTY)
    return str(value[0]) if len(value) == 1 else (str(value[0]), str(value[1]))
