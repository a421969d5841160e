"""POST /v1/rerank and /v2/rerank as Cohere's, and POST /rerank as text-embeddings-inference's.

See https://docs.cohere.com/reference/rerank and https://huggingface.github.io/text-embeddings-inference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, NotRequired, TypedDict
from uuid import uuid4

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from halfserve.serve.engine.errors import BackendError
from halfserve.serve.engine.model import Model
from halfserve.serve.http.routing.error_forms import ErrorForm, Fault, InputError
from halfserve.serve.http.routing.operations import BodyContent, Component, Count, DescribedAnswer, Positive, RestOperation, Tag
from halfserve.serve.http.routing.route_table import serves
from halfserve.serve.http.tasks.row_requests import Vector
from halfserve.serve.http.tasks.text_bodies import (
    TeiTruncationJson,
    flag_field,
    refuse_fields,
    require_count,
    shown,
    text_field,
    texts_of,
    truncates,
    whole_field,
)
from halfserve.serve.http.tasks.text_endpoint import (
    OF_TEXTS,
    TextEndpoint,
    json_rows,
    json_with_rows,
    serves_tei,
    sigmoid,
)
from halfserve.serve.http.tasks.tokenized_models import RERANK
from halfserve.serve.protocol.rpc import INFERENCE

RESULT_BYTES = 64  # JSON of one result, without the document


EXAMPLE = {"model": "ranker", "query": "when does the train leave?", "documents": ["at seven", "a cat sleeps"]}


class CohereRerankBody(TypedDict):
    model: NotRequired[Annotated[str | None, "May be left out where the server has one such model."]]
    query: str
    documents: Annotated[list[str | dict[str, Any]], "Texts, or objects with a text; at most 2048. Long ones are cut."]
    top_n: NotRequired[Positive | None]
    return_documents: NotRequired[bool | None]


class RerankUsageJson(TypedDict):
    total_tokens: Count


class DocumentJson(TypedDict):
    text: str


class RankedDocumentJson(TypedDict):
    index: Count
    relevance_score: float
    document: NotRequired[DocumentJson]


class CohereRerankResponseJson(TypedDict):
    id: str
    model: str
    usage: RerankUsageJson
    meta: dict[str, Any]
    results: list[RankedDocumentJson]


class TeiRerankBody(TeiTruncationJson):
    query: str
    texts: list[str]
    raw_scores: NotRequired[bool | None]
    return_text: NotRequired[bool | None]


class RankedTextJson(TypedDict):
    index: Count
    score: float
    text: NotRequired[str]


TeiRanks = Annotated[list[RankedTextJson], Component("TeiRanks")]
RERANK_V2 = RestOperation(
    "rerankV2",
    Tag.TEXT,
    "The same under Cohere's newer path",
    DescribedAnswer("The most relevant first.", BodyContent(CohereRerankResponseJson)),
    takes=(BodyContent(CohereRerankBody, EXAMPLE),),
    errors=OF_TEXTS,
)
RERANK_V1 = replace(
    RERANK_V2,
    name="rerank",
    summary="Documents by their relevance for a query, as Cohere's",
    takes=(BodyContent(CohereRerankBody, EXAMPLE | {"top_n": 1}),),
)


class RerankRoutes:
    """The routes that score texts against a query."""

    def __init__(self, endpoint: TextEndpoint) -> None:
        self._endpoint = endpoint

    @serves("POST", "/v1/rerank", INFERENCE, RERANK_V1, form=ErrorForm.COHERE)
    @serves("POST", "/v2/rerank", INFERENCE, RERANK_V2, form=ErrorForm.COHERE)
    async def cohere(self, request: Request) -> Response:
        """Return the documents, the most relevant first; long ones are cut."""
        endpoint = self._endpoint
        content = await endpoint.content(request)
        model = await endpoint.named(request, content, RERANK)
        with endpoint.recorded(request, model.name):
            refuse_fields(content, {"rank_fields": "join the fields of a document into its text"})
            query, documents = text_field(content, "query"), _documents(content.get("documents"))
            most = whole_field(content, "top_n") or len(documents)
            returns_documents = flag_field(content, "return_documents", default=False)
        logits, counts, model = await self._logits(request, model, query, documents, "documents", truncate=True)

        def write() -> bytes:
            scores = sigmoid(logits)
            results: list[dict[str, Any]] = [
                {"index": int(index), "relevance_score": float(scores[index])} for index in best_first(logits)[:most]
            ]
            if returns_documents:
                for result in results:
                    result["document"] = {"text": documents[result["index"]]}
            usage = {"total_tokens": sum(counts)}
            head = {"id": str(uuid4()), "model": model.name, "usage": usage, "meta": {"billed_units": {"search_units": 1}}}
            return json_with_rows(head, "results", results)

        return await endpoint.answer(request, _size(documents, most, with_texts=returns_documents), write)

    @serves_tei(
        "/rerank",
        "teiRerank",
        "Texts by their relevance for a query",
        BodyContent(TeiRerankBody, {"query": EXAMPLE["query"], "texts": EXAMPLE["documents"]}),
        DescribedAnswer("The most relevant first.", BodyContent(TeiRanks)),
    )
    async def tei(self, request: Request) -> Response:
        """Return the texts, the most relevant first: scores from 0 to 1, or with `raw_scores` the model's logits."""
        endpoint = self._endpoint
        content = await endpoint.content(request)
        model = await endpoint.only(request, RERANK)
        with endpoint.recorded(request, model.name):
            truncate = truncates(content)
            query, texts = text_field(content, "query"), texts_of(content.get("texts"), "texts")
            is_raw = flag_field(content, "raw_scores", default=False)
            returns_texts = flag_field(content, "return_text", default=False)
        logits, _, _ = await self._logits(request, model, query, texts, "texts", truncate=truncate)

        def write() -> bytes:
            scores = logits if is_raw else sigmoid(logits)
            return json_rows(
                [
                    {"index": int(index), "score": float(scores[index]), **({"text": texts[index]} if returns_texts else {})}
                    for index in best_first(logits)
                ]
            )

        return await endpoint.answer(request, _size(texts, len(texts), with_texts=returns_texts), write)

    async def _logits(
        self, request: Request, model: Model, query: str, texts: Sequence[str], param: str, *, truncate: bool
    ) -> tuple[Vector, list[int], Model]:
        """Return a logit (texts,) for each text; see `TextEndpoint.vectors`."""
        pairs = [(query, text) for text in texts]
        vectors, counts, model = await self._endpoint.of_texts(request, model, pairs, param, truncate=truncate)
        if len(vectors[0]) != 1:
            raise BackendError(f"model {model.name!r} answers with {len(vectors[0])} numbers for a pair, expected one score")
        return np.concatenate(vectors), counts, model


def best_first(scores: Vector) -> Sequence[np.intp]:
    """Return indices by descending score; equal ones in the order of the request."""
    return list(np.argsort(-scores, kind="stable"))


def _documents(value: Any) -> list[str]:
    """Return the texts of documents, each a text or an object with one."""
    if not isinstance(value, list):
        raise InputError(f"'documents' is {shown(value)}, expected a list of texts", param="documents")
    require_count(value, "documents")
    texts: list[str] = []
    for index, entry in enumerate(value):
        text = entry.get("text") if isinstance(entry, dict) else entry
        if not isinstance(text, str):
            raise InputError(f'documents[{index}] is {shown(entry)}, expected a text or {{"text": ...}}', param="documents")
        if not text:
            raise InputError(f"documents[{index}] is an empty text, expected characters", param="documents", fault=Fault.EMPTY)
        texts.append(text)
    return texts


def _size(texts: Sequence[str], most: int, *, with_texts: bool) -> int:
    return RESULT_BYTES * most + (sum(map(len, texts)) if with_texts else 0)
