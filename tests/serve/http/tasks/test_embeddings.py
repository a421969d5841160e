from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from halfserve.serve.http.http_options import HttpLimits, HttpOptions
from tests.serve.conftest import load_repository
from tests.serve.http.running_http import running_http
from tests.serve.http.tasks.small_text_models import LONGEST, SPECIAL, WORDS, expected, save_text_model, setting, unit
from tests.serve.running_server import running_server

PLAIN = WORDS[len(SPECIAL) :]
# More than are queued together, of many lengths.
MANY = [" ".join(PLAIN[index % 7 : index % 7 + 1 + index % 5]) for index in range(150)]
MOST_CHARACTERS = 64 * LONGEST


@contextmanager
def served(repository: Path, limits: HttpLimits = HttpOptions.limits) -> Iterator[httpx.Client]:
    with (
        running_server(lambda: load_repository(repository)) as server,
        running_http(server, limits=limits) as rest,
        httpx.Client(base_url=f"http://127.0.0.1:{rest.port}", timeout=60) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a server whose only model is an "embedder" without settings."""
    repository = tmp_path_factory.mktemp("plain")
    save_text_model(repository, "embedder")
    with served(repository) as client:
        yield client


def post(client: httpx.Client, **content: Any) -> httpx.Response:
    return client.post("/v1/embeddings", json={"model": "embedder", "input": "the train", **content})


def error_of(answer: httpx.Response) -> tuple[int, str, str | None, str | None]:
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return answer.status_code, error["message"], error["param"], error["code"]


def test_openais_client_gets_each_texts_vector(openai_client: openai.OpenAI) -> None:
    answer = openai_client.embeddings.create(model="embedder", input=MANY)  # more than a batch takes
    assert [entry.index for entry in answer.data] == list(range(len(MANY)))
    vectors = np.array([entry.embedding for entry in answer.data])
    assert np.allclose(vectors, unit(expected("embedder", MANY)), atol=1e-6)
    assert (answer.model, answer.object) == ("embedder", "list")


def test_numbers_and_base64_are_the_same_vector(texts: httpx.Client) -> None:
    plain, coded = (post(texts, encoding_format=form).json()["data"][0]["embedding"] for form in ("float", "base64"))
    assert np.frombuffer(base64.b64decode(coded), "<f4").tolist() == np.array(plain, np.float32).tolist()


def test_usage_counts_tokens_with_the_special_ones(texts: httpx.Client) -> None:
    assert post(texts, input=["the", "the the"]).json()["usage"] == {"prompt_tokens": 7, "total_tokens": 7}


# What each class sends for `CLIENT_TEXTS`, byte for byte: langchain-openai 1.7.4, llama-index-embeddings-openai 0.6.0 and
# -openai-like 0.4.0. The ids are those of tiktoken's cl100k_base, cut to bytes: LangChain's default.
CLIENT_TEXTS = ["the train leaves at seven", "a cat sleeps"]
AS_TEXTS = b'{"model":"embedder","input":["the train leaves at seven","a cat sleeps"],"encoding_format":"base64"}'
AS_OPENAIS_IDS = b'{"model":"embedder","input":[[116,104,101],[97,32,99,97,116]],"encoding_format":"base64"}'


def test_texts_of_langchain_and_llama_index_are_embedded(plain: httpx.Client) -> None:
    # OpenAIEmbeddings(check_embedding_ctx_length=False), OpenAIEmbedding(model_name=...) and OpenAILikeEmbedding send the same.
    answer = plain.post("/v1/embeddings", content=AS_TEXTS).json()
    vectors = [np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in answer["data"]]
    assert np.allclose(vectors, unit(expected("embedder", CLIENT_TEXTS)), atol=1e-6)


@pytest.mark.parametrize("body", [AS_OPENAIS_IDS, b'{"model":"embedder","input":[4,5]}'])
def test_token_ids_are_refused_unless_the_model_says_whose_they_are(plain: httpx.Client, body: bytes) -> None:
    status, message, param, _ = error_of(plain.post("/v1/embeddings", content=body))
    assert (status, param) == (400, "input")
    assert message.startswith("'input' has token ids, which may be those of OpenAI's vocabulary and not of model 'embedder'")
    assert "check_embedding_ctx_length=False" in message
    assert 'set halfserve.token_ids to "own" in its config.pbtxt' in message


def test_a_body_over_the_limit_names_the_option(plain: httpx.Client, tmp_path: Path) -> None:
    thousand = json.dumps({"model": "embedder", "input": ["the train " * 220] * 1000}).encode()  # as many as LangChain sends
    zipped = {"content-encoding": "gzip"}
    for content, headers in ((thousand, {}), (gzip.compress(thousand, 1), zipped)):
        status, message, _, _ = error_of(plain.post("/v1/embeddings", content=content, headers=headers))
        assert status == 413
        assert message.endswith("send fewer texts at once, or start the server with a larger --max-text-mib")
    save_text_model(tmp_path, "embedder")
    limits = HttpLimits(max_text_body_bytes=len(thousand))
    with served(tmp_path, limits) as client:
        # The texts are read, and refused for another reason: they are longer than the model takes.
        assert error_of(client.post("/v1/embeddings", content=thousand))[3] == "context_length_exceeded"


def test_token_ids_stand_for_their_text(texts: httpx.Client) -> None:
    (tokens,) = texts.post("/tokenize", params={"model": "embedder"}, json={"inputs": "the train"}).json()
    ids = [token["id"] for token in tokens]
    by_text = post(texts, input="the train").json()
    assert post(texts, input=ids).json() == by_text
    several = post(texts, input=[ids, ids]).json()
    assert [entry["index"] for entry in several["data"]] == [0, 1]
    assert several["usage"]["total_tokens"] == 2 * len(ids)


@pytest.mark.parametrize(
    ("content", "status", "message", "param", "code"),
    [
        ({"input": ""}, 400, "input[0] is an empty text, expected characters", "input", None),
        ({"input": []}, 400, "'input' is an empty list, expected at least one text", "input", None),
        ({"input": ["a", ""]}, 400, "input[1] is an empty text, expected characters", "input", None),
        ({"input": None}, 400, "'input' is null, expected a text, texts, token ids or lists", "input", None),
        ({"input": 7}, 400, "'input' is 7, expected a text, texts, token ids or lists of them", "input", None),
        ({"input": ["a", 7]}, 400, "input[1] is 7, expected a text", "input", None),
        ({"input": [[2], "a"]}, 400, 'input[1] is "a", expected a list of token ids', "input", None),
        ({"input": [2, 10**6]}, 400, "input[0] has 1000000, expected token ids from 0 to 14", "input", None),
        ({"input": [2, -1]}, 400, "input[0] has -1, expected token ids from 0 to 14", "input", None),
        ({"input": [[2], [True]]}, 400, "input[1] has true, expected token ids from 0 to 14", "input", None),
        ({"input": [[]]}, 400, "input[0] has no token ids, expected at least one", "input", None),
        ({"input": ["a"] * 2049}, 400, "'input' has 2049 entries, expected at most 2048; split the request", "input", None),
        (
            {"input": ["the", "the " * LONGEST]},
            400,
            f"input[1] has {LONGEST + 2} tokens, expected at most {LONGEST} tokens for model 'embedder'; shorten it",
            "input",
            "context_length_exceeded",
        ),
        (
            {"input": [2] * (LONGEST + 1)},
            400,
            f"input[0] has {LONGEST + 1} tokens, expected at most {LONGEST} tokens",
            "input",
            "context_length_exceeded",
        ),
        (
            {"input": "x" * (MOST_CHARACTERS + 1)},
            400,
            f"input[0] has {MOST_CHARACTERS + 1} characters, expected at most {MOST_CHARACTERS} characters",
            "input",
            "context_length_exceeded",
        ),
        ({"encoding_format": "hex"}, 400, "'encoding_format' is \"hex\", expected float or base64", "encoding_format", None),
        ({"encoding_format": []}, 400, "'encoding_format' is a list of 0", "encoding_format", None),
        ({"dimensions": 4}, 400, "'dimensions' is 4, but embeddings of model 'embedder' cannot", "dimensions", None),
        ({"dimensions": 0}, 400, "'dimensions' is 0, expected a whole number of 1 or more", "dimensions", None),
        ({"dimensions": True}, 400, "'dimensions' is true, expected a whole number", "dimensions", None),
        ({"model": 7}, 400, "'model' is 7, expected a text", "model", None),
        ({"model": "none"}, 404, "model 'none' is not served here", None, "model_not_found"),
        ({"model": "ranker"}, 400, "model 'ranker' is for rerank, expected one for embeddings or", "model", None),
    ],
)  # fmt: skip
def test_a_wrong_request_is_refused_in_openais_form(
    texts: httpx.Client, content: dict[str, Any], status: int, message: str, param: str | None, code: str | None
) -> None:
    found, text, *rest = error_of(post(texts, **content))
    assert (found, rest) == (status, [param, code])
    assert text.startswith(message)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "the body is not JSON in UTF-8: "),
        (b'{"model": "embedder", "input": "\xff"}', 400, "the body is not JSON in UTF-8: "),
        (b'{"model": "embedder", "input": "\\ud800"}', 400, "the body is not JSON in UTF-8: "),
        (b'{"input": ' + b"[" * 20_000, 400, "the body is not JSON in UTF-8: "),
        (b"[" * 100_000, 400, "the body has more than 32768 brackets, "),
        (b'{"input": [' + b'"a",' * 100_000 + b'"a"]}', 400, "the body has more than 32768 brackets, "),
        (b"[]", 400, "the body is a list of 0, expected a JSON object"),
        (b'{"input": "' + b"a" * 10_000_000 + b'"}', 413, "a message of 10000013 bytes is too large, expected at most 2097152"),
    ],
)
def test_a_hostile_body_is_refused(texts: httpx.Client, body: bytes, status: int, message: str) -> None:
    found, text, _, _ = error_of(texts.post("/v1/embeddings", content=body))
    assert found == status
    assert text.startswith(message)


def test_control_characters_are_text(texts: httpx.Client) -> None:
    assert post(texts, input="the\0train\x1b[2J\u202e").status_code == 200


def test_openais_client_raises_its_own_errors(openai_client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="model 'none' is not served here"):
        openai_client.embeddings.create(model="none", input="a")
    with pytest.raises(openai.BadRequestError) as raised:
        openai_client.embeddings.create(model="embedder", input="the " * 100)
    assert raised.value.code == "context_length_exceeded"


def test_openais_client_lists_the_models_that_take_text(openai_client: openai.OpenAI) -> None:
    assert [model.id for model in openai_client.models.list()] == ["classifier", "embedder", "ranker"]
    assert openai_client.models.retrieve("ranker").id == "ranker"
    with pytest.raises(openai.NotFoundError, match="no model 'none' that takes text"):
        openai_client.models.retrieve("none")


def test_embed_answers_with_vectors(texts: httpx.Client) -> None:
    answer = texts.post("/embed", json={"inputs": MANY[:5], "normalize": False}).json()
    wanted = expected("embedder", MANY[:5])
    assert np.allclose(answer, wanted, atol=1e-6)
    assert np.allclose(texts.post("/embed", json={"inputs": MANY[0]}).json(), unit(wanted)[:1], atol=1e-6)


def test_embed_cuts_a_long_text_only_if_asked(texts: httpx.Client) -> None:
    long = "the train leaves " * LONGEST
    longer = "cat" + " " * MOST_CHARACTERS + "cat"  # cut before it is tokenized, too
    refused = texts.post("/embed", json={"inputs": [long]})
    assert refused.status_code == 413
    assert refused.json() == {
        "error": f"inputs[0] has {3 * LONGEST + 2} tokens, expected at most {LONGEST} tokens for model 'embedder'; shorten it",
        "error_type": "Validation",
    }
    cut = texts.post("/embed", json={"inputs": [long, longer], "truncate": True}).json()
    assert np.allclose(cut, unit(expected("embedder", [long, "cat"])), atol=1e-6)


@pytest.mark.parametrize(
    ("content", "status", "kind", "text"),
    [
        ({"inputs": ""}, 400, "Empty", "inputs[0] is an empty text"),
        ({"inputs": []}, 400, "Empty", "'inputs' is an empty list"),
        ({"inputs": [7]}, 422, "Validation", "inputs[0] is 7, expected a text"),
        ({"inputs": "a", "normalize": 1}, 422, "Validation", "'normalize' is 1, expected true or false"),
        ({"inputs": "a", "prompt_name": "query"}, 422, "Validation", "'prompt_name' is not served here; write the prompt"),
        ({"inputs": "a", "truncation_direction": "Left"}, 422, "Validation", "'truncation_direction' is \"Left\", expected"),
        ({"inputs": ["a"] * 3000}, 413, "Validation", "'inputs' has 3000 entries, expected at most 2048"),
    ],
)
def test_a_wrong_request_is_refused_in_teis_form(
    texts: httpx.Client, content: dict[str, Any], status: int, kind: str, text: str
) -> None:
    answer = texts.post("/embed", json=content)
    assert (answer.status_code, answer.json()["error_type"]) == (status, kind)
    assert answer.json()["error"].startswith(text)


def test_a_matryoshka_models_vectors_may_be_shortened(tmp_path: Path) -> None:
    save_text_model(tmp_path, "embedder", setting("halfserve.embedding_dimensions", "2, 4"))
    with served(tmp_path) as client:
        for size in (2, 4, 8):
            vector = post(client, dimensions=size).json()["data"][0]["embedding"]
            assert np.allclose(vector, unit(expected("embedder", ["the train"])[0, :size]), atol=1e-6)
        _, text, param, _ = error_of(post(client, dimensions=3))
        assert (text, param) == ("'dimensions' is 3, expected one of 2, 4 for model 'embedder'", "dimensions")
