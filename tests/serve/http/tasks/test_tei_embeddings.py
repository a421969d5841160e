"""POST /embed_all, /embed_sparse and /similarity, as clients of text-embeddings-inference ask them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from onnx import TensorProto, helper

from tests.models import save_model
from tests.serve.http.tasks.small_text_models import (
    LONGEST,
    WORDS,
    expected,
    save_text_model,
    setting,
    tokenizer,
    unit,
)
from tests.serve.http.tasks.test_text_routes import served

TEXTS = ["the train leaves at seven", "a cat", "the cat sleeps on the warm wall"]
LONG = " ".join(["cat"] * LONGEST)
SIZE = 4
TABLE = np.random.default_rng(7).standard_normal((len(WORDS), SIZE)).astype(np.float32)


def save_token_model(repository: Path, name: str, *, length: int | str = "length", pads_left: bool = False) -> None:
    """A model with a vector for each token, its word's row of TABLE; with a fixed length, shorter texts are padded."""
    shape: list[int | str] = ["batch", length]
    nodes = [helper.make_node("Gather", ["table", "input_ids"], ["vectors"])]
    save_model(
        repository / name / "1" / "model.onnx",
        nodes,
        [("input_ids", TensorProto.INT64, shape)],
        [("vectors", TensorProto.FLOAT, [*shape, SIZE])],
        {"table": TABLE},
    )
    own = tokenizer()
    own.enable_truncation(LONGEST)
    if pads_left:
        own.enable_padding(direction="left")
    own.save(str(repository / name / "1" / "tokenizer.json"))
    (repository / name / "config.pbtxt").write_text(f"max_batch_size: 8 {setting('halfserve.task', 'feature-extraction')}")


def vectors_of(text: str) -> Any:
    return TABLE[tokenizer().encode(text).ids]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server with a model for each path."""
    repository = tmp_path_factory.mktemp("models")
    save_text_model(repository, "embedder")
    save_text_model(repository, "sparse")
    save_token_model(repository, "tokens")
    save_token_model(repository, "fixed", length=LONGEST)
    save_token_model(repository, "left", length=LONGEST, pads_left=True)
    with served(repository) as client:
        yield client


@pytest.mark.parametrize("name", ["tokens", "fixed", "left"])
def test_every_token_has_its_vector_and_padding_has_none(client: httpx.Client, name: str) -> None:
    answers = client.post(f"/embed_all?model={name}", json={"inputs": TEXTS}).json()
    assert [len(answer) for answer in answers] == [len(tokenizer().encode(text)) for text in TEXTS]
    for answer, text in zip(answers, TEXTS, strict=True):
        np.testing.assert_array_equal(np.array(answer, np.float32), vectors_of(text))
    one = client.post(f"/embed_all?model={name}", json={"inputs": TEXTS[1]}).json()
    assert one == [answers[1]]


def test_sparse_vectors_have_the_weights_that_are_not_0(client: httpx.Client) -> None:
    answers = client.post("/embed_sparse", json={"inputs": TEXTS}).json()
    for answer, vector in zip(answers, expected("sparse", TEXTS), strict=True):
        dense = np.zeros(len(vector))
        for entry in answer:
            assert entry.keys() == {"index", "value"}
            dense[entry["index"]] = entry["value"]
        np.testing.assert_allclose(dense, vector, atol=1e-6)
        assert [entry["index"] for entry in answer] == list(range(1, len(vector), 2))


def test_similarity_is_the_cosine_with_each_sentence(client: httpx.Client) -> None:
    source, *others = TEXTS
    answer = client.post("/similarity", json={"inputs": {"source_sentence": source, "sentences": [*others, source]}}).json()
    vectors = unit(expected("embedder", [*others, source]))
    np.testing.assert_allclose(answer, vectors @ vectors[-1], atol=1e-6)


def test_long_texts_are_cut_where_the_request_asks_for_it(client: httpx.Client) -> None:
    compared = {"source_sentence": "a cat", "sentences": [LONG]}
    for path, body, param in (
        ("/embed_all?model=tokens", {"inputs": LONG}, "inputs"),
        ("/embed_sparse", {"inputs": LONG}, "inputs"),
        ("/similarity", {"inputs": compared}, "inputs"),
    ):
        refused = client.post(path, json=body)
        assert (refused.status_code, refused.json()["error_type"]) == (413, "Validation")
        assert param in refused.json()["error"]
        cut: Any = {"truncate": True, "truncation_direction": "Right"}
        cut = {"parameters": cut} if path == "/similarity" else cut
        assert client.post(path, json={**body, **cut}).status_code == 200
    assert len(client.post("/embed_all?model=tokens", json={"inputs": LONG, "truncate": True}).json()[0]) == LONGEST


@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        ("/embed_all?model=tokens", {}, 422, "'inputs' is null, expected a list of texts"),
        ("/embed_all?model=tokens", {"inputs": []}, 400, "'inputs' is an empty list"),
        ("/embed_all?model=tokens", {"inputs": "a", "prompt_name": "query"}, 422, "'prompt_name' is not served here"),
        ("/embed_all", {"inputs": "a"}, 422, "several models are for feature-extraction: fixed, left, tokens; say which"),
        ("/embed_sparse", {"inputs": ["a", ""]}, 400, "inputs[1] is an empty text"),
        ("/embed_sparse", {"inputs": ["a"] * 2049}, 413, "'inputs' has 2049 entries, expected at most 2048"),
        ("/embed_sparse?model=embedder", {"inputs": "a"}, 422, "is for embeddings, expected one for sparse-embeddings: sparse"),
        ("/similarity", {"inputs": "a"}, 422, "'inputs' is \"a\", expected an object"),
        ("/similarity", {"inputs": {"sentences": ["a"]}}, 422, "'source_sentence' is null, expected a text"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, 400, "'sentences' is an empty list"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["a"] * 2049}}, 413, "'sentences' has 2049 entries"),
        (
            "/similarity",
            {"inputs": {"source_sentence": "a", "sentences": ["a"]}, "parameters": {"truncate": 1}},
            422,
            "'truncate' is 1, expected true or false",
        ),
    ],
)
def test_wrong_input_has_the_status_that_tei_gives(client: httpx.Client, path: str, body: Any, status: int, error: str) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == status
    assert error in answer.json()["error"]
    assert answer.json()["error_type"] == ("Empty" if status == 400 else "Validation")


def test_a_model_without_a_vector_for_each_token_fails_the_request(tmp_path: Path) -> None:
    save_text_model(tmp_path, "embedder")
    config = tmp_path / "embedder" / "config.pbtxt"
    config.write_text(config.read_text().replace('"embeddings"', '"feature-extraction"'))
    with served(tmp_path) as client:
        answer = client.post("/embed_all", json={"inputs": "a cat"})
    assert answer.status_code == 500
    assert answer.json() == {
        "error": "model 'embedder' answers with shape [1, 8], expected a vector for each token: [1, tokens, size]",
        "error_type": "Backend",
    }


def test_info_names_the_pooling(client: httpx.Client) -> None:
    kinds = {name: client.get("/info", params={"model": name}).json()["model_type"] for name in ("sparse", "tokens")}
    assert kinds == {"sparse": {"embedding": {"pooling": "splade"}}, "tokens": {"embedding": {"pooling": "none"}}}
