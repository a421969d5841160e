from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest

from tests.serve.http.tasks.small_text_models import LONGEST, expected, sigmoid

QUERY = "the train leaves"
DOCUMENTS = ["at seven", "a cat sleeps on a warm wall", "the train", "the wall " * LONGEST]
# The model answers in FP16.
TOLERANCE = 1e-3


def scores() -> list[float]:
    return [float(score) for score in sigmoid(expected("ranker", [(QUERY, text) for text in DOCUMENTS])[:, 0])]


def best_first() -> list[int]:
    return [int(index) for index in np.argsort(scores())[::-1]]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
def test_cohere_ranks_documents_and_cuts_long_ones(texts: httpx.Client, path: str) -> None:
    answer = texts.post(path, json={"model": "ranker", "query": QUERY, "documents": DOCUMENTS}).json()
    assert [entry["index"] for entry in answer["results"]] == best_first()
    found = [entry["relevance_score"] for entry in answer["results"]]
    assert np.allclose(found, sorted(scores(), reverse=True), atol=TOLERANCE)
    assert "document" not in answer["results"][0]


def test_cohere_returns_the_best_documents_only_if_asked(texts: httpx.Client) -> None:
    documents = [{"text": DOCUMENTS[0]}, *DOCUMENTS[1:]]
    content = {"model": "ranker", "query": QUERY, "documents": documents, "top_n": 2, "return_documents": True}
    results = texts.post("/v1/rerank", json=content).json()["results"]
    assert [entry["document"]["text"] for entry in results] == [DOCUMENTS[index] for index in best_first()[:2]]


def test_tei_ranks_texts(texts: httpx.Client) -> None:
    content = {"query": QUERY, "texts": DOCUMENTS, "truncate": True, "return_text": True}
    answer = texts.post("/rerank", json=content).json()
    assert [entry["index"] for entry in answer] == best_first()
    assert [entry["text"] for entry in answer] == [DOCUMENTS[index] for index in best_first()]
    assert np.allclose([entry["score"] for entry in answer], sorted(scores(), reverse=True), atol=TOLERANCE)


def test_tei_gives_logits_if_asked(texts: httpx.Client) -> None:
    answer = texts.post("/rerank", json={"query": QUERY, "texts": DOCUMENTS[:2], "raw_scores": True}).json()
    logits = expected("ranker", [(QUERY, text) for text in DOCUMENTS[:2]])[:, 0]
    assert np.allclose([entry["score"] for entry in answer], sorted(logits, reverse=True), atol=TOLERANCE)


def test_tei_refuses_a_long_pair(texts: httpx.Client) -> None:
    answer = texts.post("/rerank", json={"query": QUERY, "texts": DOCUMENTS})
    assert answer.status_code == 413
    assert answer.json()["error"].startswith(f"texts[3] has {3 + 2 * LONGEST + 3} tokens, expected at most {LONGEST} tokens")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"documents": []}, "'documents' is an empty list, expected at least one text"),
        ({"documents": "a"}, "'documents' is \"a\", expected a list of texts"),
        ({"documents": ["a", {"title": "b"}]}, 'documents[1] is an object of 1, expected a text or {"text": ...}'),
        ({"documents": [{"text": ""}]}, "documents[0] is an empty text, expected characters"),
        ({"query": ""}, "'query' is an empty text, expected one with characters"),
        ({"top_n": 0}, "'top_n' is 0, expected a whole number of 1 or more"),
        ({"rank_fields": ["title"]}, "'rank_fields' is not served here; join the fields"),
        ({"model": "embedder"}, "model 'embedder' is for embeddings, expected one for rerank: ranker"),
    ],
)
def test_a_wrong_request_is_refused_in_coheres_form(texts: httpx.Client, content: dict[str, Any], message: str) -> None:
    answer = texts.post("/v1/rerank", json={"model": "ranker", "query": QUERY, "documents": ["a"], **content})
    assert answer.status_code == 400
    assert answer.json()["message"].startswith(message)
