"""POST /embed_all, /embed_sparse and /similarity as text-embeddings-inference's.

See https://huggingface.github.io/text-embeddings-inference.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Annotated, Any, NotRequired, TypedDict

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from halfserve.serve.engine.model import Model
from halfserve.serve.http.routing.error_forms import InputError
from halfserve.serve.http.routing.operations import BodyContent, Component, Count, DescribedAnswer
from halfserve.serve.http.tasks.embeddings import JSON_BYTES, NO_PROMPT, TeiTextsBody, normalized
from halfserve.serve.http.tasks.row_requests import Matrix, Vector
from halfserve.serve.http.tasks.text_bodies import (
    Content,
    TeiTruncationJson,
    one_or_more,
    refuse_fields,
    shown,
    text_field,
    texts_of,
    truncates,
)
from halfserve.serve.http.tasks.text_endpoint import TextEndpoint, json_rows, serves_tei
from halfserve.serve.http.tasks.tokenized_models import EMBEDDINGS, SPARSE_EMBEDDINGS, TOKEN_VECTORS
from halfserve.serve.protocol.large_bytes import join_unlocked

ENTRY_BYTES = 40  # JSON of one entry of a sparse vector
EXAMPLE = {"inputs": ["the train leaves at seven"], "truncate": True}
COMPARED = {"source_sentence": "the train leaves at seven", "sentences": ["a train leaves", "a cat sleeps"]}


class TeiSimilarityTextsJson(TypedDict):
    source_sentence: str
    sentences: Annotated[list[str], "Texts to compare with it; at most 2048."]


class TeiSimilarityBody(TypedDict):
    inputs: TeiSimilarityTextsJson
    parameters: NotRequired[TeiTruncationJson | None]


class SparseValueJson(TypedDict):
    index: Count
    value: float


TeiTokenVectors = Annotated[list[list[list[float]]], Component("TeiTokenVectors")]
TeiSparseVectors = Annotated[list[list[SparseValueJson]], Component("TeiSparseVectors")]
TeiSimilarities = Annotated[list[float], Component("TeiSimilarities")]


class TeiEmbeddingRoutes:
    """The routes of embeddings that text-embeddings-inference alone has."""

    def __init__(self, endpoint: TextEndpoint) -> None:
        self._endpoint = endpoint

    @serves_tei(
        "/embed_all",
        "embedAll",
        "Vectors of all tokens of texts",
        BodyContent(TeiTextsBody, EXAMPLE),
        DescribedAnswer("A vector for each token of each text, special tokens included.", BodyContent(TeiTokenVectors)),
    )
    async def tokens(self, request: Request) -> Response:
        """Return the vectors of the tokens of each text, as the model gives them."""
        model, texts, truncate = await self._asked(request, TOKEN_VECTORS)
        matrices = await self._endpoint.token_vectors(
            request, model, lambda loaded: loaded.of_texts(texts, "inputs", truncate=truncate)
        )
        size = JSON_BYTES * sum(matrix.size for matrix in matrices)
        return await self._endpoint.answer(request, size, lambda: _json_matrices(matrices))

    @serves_tei(
        "/embed_sparse",
        "embedSparse",
        "Sparse embeddings of texts (SPLADE)",
        BodyContent(TeiTextsBody, EXAMPLE),
        DescribedAnswer("The weights of each text that are not 0, by token id.", BodyContent(TeiSparseVectors)),
    )
    async def sparse(self, request: Request) -> Response:
        """Return the weights of each text that are not 0, in the order of their indices."""
        model, texts, truncate = await self._asked(request, SPARSE_EMBEDDINGS)
        vectors, _, _ = await self._endpoint.of_texts(request, model, texts, "inputs", truncate=truncate)
        size = ENTRY_BYTES * sum(int(np.count_nonzero(vector)) for vector in vectors)
        return await self._endpoint.answer(request, size, lambda: json_rows(map(_entries, vectors)))

    @serves_tei(
        "/similarity",
        "similarity",
        "Cosines of a text with others",
        BodyContent(TeiSimilarityBody, {"inputs": COMPARED}),
        DescribedAnswer("A cosine for each sentence.", BodyContent(TeiSimilarities)),
    )
    async def similarity(self, request: Request) -> Response:
        """Return the cosine of the source sentence's vector with that of each other sentence."""
        endpoint = self._endpoint
        content = await endpoint.content(request)
        model = await endpoint.only(request, EMBEDDINGS)
        with endpoint.recorded(request, model.name):
            inputs = _object(content.get("inputs"), "inputs")
            texts = [text_field(inputs, "source_sentence"), *texts_of(inputs.get("sentences"), "sentences")]
            parameters = _object(content.get("parameters") or {}, "parameters")
            refuse_fields(parameters, {"prompt_name": NO_PROMPT})
            truncate = truncates(parameters)
        (source, *vectors), _, _ = await endpoint.of_texts(request, model, texts, "inputs", truncate=truncate)
        direction = normalized(source)
        cosines = (float(direction @ normalized(vector)) for vector in vectors)
        return await endpoint.answer(request, JSON_BYTES * len(vectors), lambda: json_rows(cosines))

    async def _asked(self, request: Request, tasks: AbstractSet[str]) -> tuple[Model, list[str], bool]:
        """Return the model with one of these tasks, the texts of a request, and whether long ones are cut."""
        endpoint = self._endpoint
        content = await endpoint.content(request)
        model = await endpoint.only(request, tasks)
        with endpoint.recorded(request, model.name):
            refuse_fields(content, {"prompt_name": NO_PROMPT})
            return model, one_or_more(content.get("inputs"), "inputs"), truncates(content)


def _object(value: Any, name: str) -> Content:
    if not isinstance(value, dict):
        raise InputError(f"{name!r} is {shown(value)}, expected an object", param=name)
    return value


def _entries(vector: Vector) -> list[SparseValueJson]:
    places = np.flatnonzero(vector)
    return [{"index": index, "value": value} for index, value in zip(places.tolist(), vector[places].tolist(), strict=True)]


def _json_matrices(matrices: Sequence[Matrix]) -> bytes:
    """Return matrices as JSON; each row of a matrix is written by itself, see `json_rows`."""
    pieces = [b"["]
    for matrix in matrices:
        pieces += (json_rows(matrix), b",")
    return join_unlocked([*pieces[:-1], b"]"])
