"""POST /v1/embeddings as OpenAI's, and POST /embed as text-embeddings-inference's.

See https://platform.openai.com/docs/api-reference/embeddings and https://huggingface.github.io/text-embeddings-inference.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Annotated, Any, NotRequired, TypedDict

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from halfserve.serve.engine.config.parameters import own_parameter
from halfserve.serve.engine.model import Model
from halfserve.serve.http.routing.error_forms import ErrorForm, InputError
from halfserve.serve.http.routing.operations import BodyContent, Component, Count, DescribedAnswer, Positive, RestOperation, Tag
from halfserve.serve.http.routing.route_table import serves
from halfserve.serve.http.tasks.row_requests import Vector
from halfserve.serve.http.tasks.text_bodies import (
    TeiTruncationJson,
    flag_field,
    one_or_more,
    refuse_fields,
    require_count,
    shown,
    truncates,
    whole_field,
)
from halfserve.serve.http.tasks.text_endpoint import OF_TEXTS, TextEndpoint, json_rows, json_with_rows, serves_tei
from halfserve.serve.http.tasks.tokenized_models import EMBEDDINGS
from halfserve.serve.protocol.rpc import INFERENCE

DIMENSIONS = "halfserve.embedding_dimensions"
IDS_SETTING = "halfserve.token_ids"
FORMATS = ("float", "base64")
JSON_BYTES = 12  # size of a number in JSON
NO_PROMPT = "write the prompt in front of each text"


class EmbeddingBody(TypedDict):
    model: NotRequired[Annotated[str | None, "May be left out where the server has one such model."]]
    input: Annotated[
        str | list[str | int | list[Any]],
        "A text or texts; or token ids of a text or lists of them, where the model's setting halfserve.token_ids is own; at "
        "most 2048.",
    ]
    encoding_format: NotRequired[Annotated[str | None, "float, or base64 of little-endian float32."]]
    dimensions: NotRequired[Annotated[Positive | None, "Numbers to keep of each vector, where the model was trained for it."]]
    user: NotRequired[str]


class EmbeddingUsageJson(TypedDict):
    prompt_tokens: Count
    total_tokens: Count


class EmbeddingJson(TypedDict):
    object: str
    index: Count
    embedding: list[float] | str


class EmbeddingResponseJson(TypedDict):
    object: str
    model: str
    usage: EmbeddingUsageJson
    data: list[EmbeddingJson]


class TeiTextsBody(TeiTruncationJson):
    inputs: Annotated[str | list[str | int | list[Any]], "A text or texts; at most 2048."]


class TeiEmbedBody(TeiTextsBody):
    normalize: NotRequired[bool | None]


TeiVectors = Annotated[list[list[float]], Component("TeiVectors")]


class EmbeddingRoutes:
    """The routes that answer with embeddings."""

    def __init__(self, endpoint: TextEndpoint) -> None:
        self._endpoint = endpoint

    @serves(
        "POST",
        "/v1/embeddings",
        INFERENCE,
        RestOperation(
            "createEmbedding",
            Tag.TEXT,
            "Embeddings of texts, as OpenAI's",
            DescribedAnswer("The embeddings, each of length 1.", BodyContent(EmbeddingResponseJson)),
            takes=(BodyContent(EmbeddingBody, {"model": "encoder", "input": ["the train leaves at seven", "a cat sleeps"]}),),
            errors=OF_TEXTS,
        ),
        form=ErrorForm.OPENAI,
    )
    async def openai(self, request: Request) -> Response:
        """Return a vector of length 1 for each input, as numbers or as base64 of little-endian float32."""
        endpoint = self._endpoint
        content = await endpoint.content(request)
        model = await endpoint.named(request, content, EMBEDDINGS)
        with endpoint.recorded(request, model.name):
            inputs = _inputs(content.get("input"))
            form = FORMATS[0] if content.get("encoding_format") is None else content["encoding_format"]
            if form not in FORMATS:
                raise InputError(f"'encoding_format' is {shown(form)}, expected float or base64", param="encoding_format")
            size = whole_field(content, "dimensions")
            if size is not None:
                _require_dimensions(model, size)
            if not isinstance(inputs[0], str):
                _require_own_ids(model)

        if isinstance(inputs[0], str):
            vectors, counts, model = await endpoint.of_texts(request, model, inputs, "input", truncate=False)
        else:
            vectors, counts, model = await endpoint.vectors(request, model, lambda loaded: loaded.of_ids(inputs, "input"))
        if size is not None and size > len(vectors[0]):
            raise InputError(f"'dimensions' is {size}, but model {model.name!r} has {len(vectors[0])}", param="dimensions")

        def write() -> bytes:
            shorter: Iterator[Any] = (normalized(vector[:size]) for vector in vectors)
            if form != FORMATS[0]:
                shorter = (base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in shorter)
            entries = ({"object": "embedding", "index": index, "embedding": entry} for index, entry in enumerate(shorter))
            usage = {"prompt_tokens": sum(counts), "total_tokens": sum(counts)}
            return json_with_rows({"object": "list", "model": model.name, "usage": usage}, "data", entries)

        return await endpoint.answer(request, JSON_BYTES * sum(map(len, vectors)), write)

    @serves_tei(
        "/embed",
        "embed",
        "Embeddings of texts",
        BodyContent(TeiEmbedBody, {"inputs": ["the train leaves at seven"], "truncate": True}),
        DescribedAnswer("A vector for each text.", BodyContent(TeiVectors)),
    )
    async def tei(self, request: Request) -> Response:
        """Return a list of vectors, of length 1 unless `normalize` is false."""
        endpoint = self._endpoint
        content = await endpoint.content(request)
        model = await endpoint.only(request, EMBEDDINGS)
        with endpoint.recorded(request, model.name):
            refuse_fields(content, {"prompt_name": NO_PROMPT, "dimensions": "ask /v1/embeddings for them"})
            truncate = truncates(content)
            normalize = flag_field(content, "normalize", default=True)
            texts = one_or_more(content.get("inputs"), "inputs")
        vectors, _, _ = await endpoint.of_texts(request, model, texts, "inputs", truncate=truncate)
        return await endpoint.answer(
            request,
            JSON_BYTES * sum(map(len, vectors)),
            lambda: json_rows(map(normalized, vectors) if normalize else vectors),
        )


def normalized(vector: Vector) -> Vector:
    """Return a vector of length 1 in the same direction, float32; one of zeros stays as it is."""
    length = float(np.linalg.norm(vector))
    result: Vector = vector / np.float32(length) if length > 0 else vector
    return result


def _inputs(value: Any) -> list[Any]:
    """Texts, or lists of token ids, at least one."""
    if not isinstance(value, str | list):
        raise InputError(f"'input' is {shown(value)}, expected a text, texts, token ids or lists of them", param="input")
    if isinstance(value, list) and value and type(value[0]) is int:
        return [value]
    if isinstance(value, str) or not value or not isinstance(value[0], list):
        return list(one_or_more(value, "input"))
    require_count(value, "input")
    for index, entry in enumerate(value):
        if not isinstance(entry, list):
            raise InputError(f"input[{index}] is {shown(entry)}, expected a list of token ids", param="input")
    return value


def _require_own_ids(model: Model) -> None:
    """Check that clients of the model send ids of its own vocabulary: those of OpenAI's give vectors without a meaning."""
    if own_parameter(model.config, IDS_SETTING) != "own":
        raise InputError(
            f"'input' has token ids, which may be those of OpenAI's vocabulary and not of model {model.name!r}; send texts "
            "(LangChain's OpenAIEmbeddings does with check_embedding_ctx_length=False). If clients send ids of the model's own "
            f'vocabulary, set {IDS_SETTING} to "own" in its config.pbtxt',
            param="input",
        )


def _require_dimensions(model: Model, size: int) -> None:
    """Check that vectors may be cut to `size` numbers, which only a model trained for it (Matryoshka) allows."""
    shape = next(iter(model.outputs.values())).shape
    if DIMENSIONS not in model.config.parameters:
        if size == shape[-1]:
            return
        raise InputError(
            f"'dimensions' is {size}, but embeddings of model {model.name!r} cannot be shortened; leave it out (a model "
            f"trained for it, Matryoshka, says so in its config.pbtxt: {DIMENSIONS})",
            param="dimensions",
        )
    allowed: frozenset[int] | None = own_parameter(model.config, DIMENSIONS)
    if allowed is not None and size not in allowed and size != shape[-1]:
        known = ", ".join(map(str, sorted(allowed)))
        raise InputError(f"'dimensions' is {size}, expected one of {known} for model {model.name!r}", param="dimensions")
