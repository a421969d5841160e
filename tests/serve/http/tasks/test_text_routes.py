"""What holds for all text endpoints: which model answers, rights, clients that go, reloads, statistics."""

from __future__ import annotations

import logging
import shutil
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from tokenizers import Tokenizer

from halfserve.installation import install_hint
from halfserve.protos.datatypes import BY_WIRE
from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine.backend import ModelInterface
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.queueing.pace import BatchLimits
from halfserve.serve.engine.tensors import ANY_SIZE, Tensors, TensorSpec
from halfserve.serve.http.http_options import HttpOptions
from halfserve.serve.http.rest_server import RestServer
from halfserve.serve.protocol.rpc import Role
from halfserve.serve.security.security_options import ClientLimits, SecurityOptions
from halfserve.serve.security.tokens import new_token
from halfserve.serve.transports.listening import BindError
from tests.serve.conftest import load_repository
from tests.serve.engine.fakes import HOLD_S, HeldBackend
from tests.serve.http.running_http import running_http
from tests.serve.http.tasks.small_text_models import LABELS, LONGEST, save_text_model, tokenizer
from tests.serve.http.test_inference import wait_until_waiting
from tests.serve.running_server import RunningServer, running_server
from tests.serve.security.guarded import write_tokens
from tests.serve.security.test_http import guarded_http, headers_with

EMBED = {"model": "embedder", "input": "the train"}
EITHER = "embeddings or text-embeddings"


@contextmanager
def served(repository: Path) -> Iterator[httpx.Client]:
    with (
        running_server(lambda: load_repository(repository)) as server,
        running_http(server) as rest,
        httpx.Client(base_url=f"http://127.0.0.1:{rest.port}", timeout=60) as client,
    ):
        yield client


def test_a_path_without_a_models_name_asks_for_one_where_there_are_several(tmp_path: Path) -> None:
    first = save_text_model(tmp_path, "embedder")
    shutil.copytree(first, tmp_path / "second")
    with served(tmp_path) as client:
        answer = client.post("/embed", json={"inputs": "a"})
        assert answer.status_code == 422
        assert answer.json()["error"].endswith(": embedder, second; say which: /embed?model=NAME")
        assert client.post("/embed?model=second", json={"inputs": "a"}).status_code == 200
        answer = client.post("/rerank", json={"query": "a", "texts": ["a"]})
        assert (answer.status_code, answer.json()["error"]) == (404, "no model for rerank is served here; /rerank needs one")


def test_a_request_without_a_model_asks_the_only_one_or_gets_the_names(texts: httpx.Client, tmp_path: Path) -> None:
    assert texts.post("/v1/embeddings", json={"input": "the train"}).json()["model"] == "embedder"
    assert texts.post("/v1/rerank", json={"query": "a", "documents": ["the"]}).status_code == 200
    shutil.copytree(save_text_model(tmp_path, "embedder"), tmp_path / "second")
    with served(tmp_path) as client:
        answer = client.post("/v1/embeddings", json={"input": "a"})
        message = f"several models are for {EITHER}: embedder, second; name one of them in the field 'model', which is missing"
        assert answer.status_code == 400
        assert answer.json()["error"].items() >= {"message": message, "param": "model"}.items()


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("POST", "/v1/embeddings", f"model 'none' is not served here, expected one for {EITHER}: embedder"),
        ("POST", "/embed?model=none", f"model 'none' is not served here, expected one for {EITHER}: embedder"),
        ("POST", "/v2/models/none/infer", "model 'none' is not served here; POST /v2/repository/index lists what is"),
        ("GET", "/v2/models/none", "model 'none' is not served here; POST /v2/repository/index lists what is"),
    ],
)
def test_an_unknown_models_error_names_no_rpc_to_rest_clients(
    texts: httpx.Client, method: str, path: str, expected: str
) -> None:
    text = texts.request(method, path, content=b'{"model": "none", "input": "a", "inputs": []}').text
    assert expected in text
    assert "RepositoryIndex" not in text
    # The path that the error names answers.
    assert texts.post("/v2/repository/index").status_code == 200


def test_info_describes_the_model_as_tei_does(texts: httpx.Client) -> None:
    info = texts.get("/info", params={"model": "classifier"}).json()
    assert (info["model_id"], info["max_input_length"], info["max_client_batch_size"]) == ("classifier", LONGEST, 2048)
    assert info["model_type"] == {
        "classifier": {
            "id2label": {str(index): label for index, label in enumerate(LABELS)},
            "label2id": {label: index for index, label in enumerate(LABELS)},
        }
    }
    assert texts.get("/info", params={"model": "embedder"}).json()["model_type"] == {"embedding": {"pooling": "model"}}


def test_tokens_have_their_places_in_the_text(texts: httpx.Client) -> None:
    special = {"special": True, "start": None, "stop": None}
    answer = texts.post("/tokenize?model=embedder", json={"inputs": ["The train"]}).json()
    assert answer == [
        [
            {"id": 2, "text": "[CLS]", **special},
            {"id": 4, "text": "The", "special": False, "start": 0, "stop": 3},
            {"id": 5, "text": "train", "special": False, "start": 4, "stop": 9},
            {"id": 3, "text": "[SEP]", **special},
        ]
    ]
    plain = texts.post("/tokenize?model=embedder", json={"inputs": "The", "add_special_tokens": False}).json()
    assert [token["id"] for token in plain[0]] == [4]


def test_a_model_without_a_tokenizer_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (save_text_model(tmp_path, "embedder") / "1" / "tokenizer.json").write_text("{}")
    with caplog.at_level(logging.WARNING), served(tmp_path) as client:
        answer = client.post("/v1/embeddings", json=EMBED)
        assert answer.status_code == 409
        assert answer.json()["error"]["message"].startswith(
            "model 'embedder' takes no text here: its tokenizer.json is missing"
        )
    assert "embedder/1: cannot use its tokenizer.json: " in caplog.text


def test_a_tokenizer_is_not_read_through_a_link_out_of_the_repository(tmp_path: Path) -> None:
    path = save_text_model(tmp_path / "models", "embedder") / "1" / "tokenizer.json"
    path.rename(tmp_path / "outside.json")
    path.symlink_to(tmp_path / "outside.json")
    with served(tmp_path / "models") as client:
        assert client.post("/v1/embeddings", json=EMBED).status_code == 409


def test_a_server_without_the_package_says_what_to_install(text_repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with served(text_repository) as client:
        answer = client.post("/v1/embeddings", json=EMBED)
        assert answer.status_code == 501
        assert answer.json()["error"]["message"].endswith(install_hint("text"))


def test_a_token_opens_its_models_only(text_server: RunningServer, tmp_path: Path) -> None:
    made = [new_token("ranks", [Role.INFER], models=["ranker"]), new_token("scrapes", [Role.METRICS])]
    (ranks, scrapes) = write_tokens(tmp_path / "tokens", *made)
    with guarded_http(text_server, SecurityOptions(token_file=tmp_path / "tokens")) as (client, rest):
        headers = headers_with(ranks)
        assert [card["id"] for card in client.get("/v1/models", headers=headers).json()["data"]] == ["ranker"]
        answer = client.post("/v1/embeddings", json=EMBED, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert client.post("/embed", json={"inputs": "a"}, headers=headers).status_code == 404
        content = {"model": "ranker", "query": "a", "documents": ["a", "the cat"]}
        assert client.post("/v1/rerank", json=content, headers=headers).status_code == 200
        assert client.post("/v1/rerank", json=content).json().keys() == {"message"}
        assert client.post("/rerank", json={}).json()["error_type"] == "Validation"
        for key, error in (("wrong", openai.AuthenticationError), (scrapes, openai.PermissionDeniedError)):
            url = f"http://127.0.0.1:{rest.port}/v1"
            with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as of_openai, pytest.raises(error):
                of_openai.embeddings.create(model="embedder", input="the train")


def test_a_client_may_send_more_texts_than_it_may_have_in_progress(text_server: RunningServer) -> None:
    with guarded_http(text_server, SecurityOptions(client_limits=ClientLimits(max_concurrent=3))) as (client, _):
        answer = client.post("/v1/embeddings", json={**EMBED, "input": ["the train"] * 20})
        assert answer.status_code == 200
        assert len(answer.json()["data"]) == 20


def test_a_server_whose_port_is_taken_says_so(text_server: RunningServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = HttpOptions(port=taken.getsockname()[1], metrics_port=None)
        rest = text_server.call(lambda: RestServer(text_server.core, text_server.service, "127.0.0.1", options))
        with pytest.raises(BindError):
            text_server.run(rest.start())


def test_a_text_whose_client_does_not_wait_is_not_computed(tmp_path: Path) -> None:
    backend = HeldTextBackend(held=True)
    with (
        running_server(lambda: [held_text_model(backend, tmp_path)]) as server,
        running_http(server) as rest,
        ThreadPoolExecutor(2) as pool,
    ):
        url = f"http://127.0.0.1:{rest.port}/v1/embeddings"
        first = pool.submit(httpx.post, url, json={"model": "held", "input": "the"}, timeout=HOLD_S)
        assert backend.entered.wait(HOLD_S)
        headers = {"x-stainless-read-timeout": "0.000001"}
        content = {"model": "held", "input": "the cat"}
        late = pool.submit(httpx.post, url, json=content, headers=headers, timeout=HOLD_S)
        while (
            not late.done()
            and not httpx.get(f"http://127.0.0.1:{rest.port}/ui/state", timeout=60).json()["models"][0]["waiting"]
        ):
            pass
        backend.release.set()
        assert late.result().status_code == 504
        assert first.result().status_code == 200
    assert backend.batches == [[3.0]]


def test_each_text_is_an_inference_of_the_model(text_repository: Path) -> None:
    with served(text_repository) as client:
        client.post("/v1/embeddings", json={**EMBED, "input": ["the train"] * 20}).raise_for_status()
        (stats,) = client.get("/v2/models/embedder/stats").json()["model_stats"]
        assert stats["inference_count"] == 20


class HeldTextBackend(HeldBackend):
    """Answers with the number of tokens, once it is released."""

    def compute_dtype(self, name: str) -> np.dtype[np.int64]:
        return np.dtype(np.int64)

    def run(self, inputs: Tensors) -> Tensors:
        self.entered.set()
        assert self.release.wait(HOLD_S)
        ids = inputs["input_ids"]
        self.batches.append([float(ids.shape[1])] * len(ids))
        return {"answer": np.full((len(ids), 1), ids.shape[1], np.float32)}


def held_text_model(backend: HeldBackend, folder: Path, own: Tokenizer | None = None, length: int = ANY_SIZE) -> Model:
    (own or tokenizer()).save(str(folder / "tokenizer.json"))
    ids = TensorSpec(name="input_ids", datatype=BY_WIRE["INT64"], shape=(-1, length))
    answer = TensorSpec(name="answer", datatype=BY_WIRE["FP32"], shape=(-1, 1))
    config = ModelConfig(name="held", max_batch_size=2)
    config.parameters["halfserve.task"].string_value = "embeddings"
    config.parameters["halfserve.token_ids"].string_value = "own"
    interface = ModelInterface(inputs=(ids,), outputs=(answer,), batched=True)
    limits = BatchLimits(max_rows=2)
    return Model(
        name="held",
        version=1,
        interface=interface,
        config=config,
        backends=[backend],
        limits=limits,
        path=folder / "model.onnx",
    ).start()


def test_a_client_that_goes_frees_the_places_of_all_its_texts(tmp_path: Path) -> None:
    backend = HeldTextBackend(held=True)
    with (
        running_server(lambda: [held_text_model(backend, tmp_path)]) as server,
        running_http(server) as rest,
        ThreadPoolExecutor(1) as pool,
    ):
        url = f"http://127.0.0.1:{rest.port}"
        first = pool.submit(httpx.post, f"{url}/embed", json={"inputs": "the", "normalize": False}, timeout=HOLD_S)
        assert backend.entered.wait(HOLD_S)
        with socket.create_connection(("127.0.0.1", rest.port)) as second:
            body = b'{"inputs": ["the cat", "the cat", "the cat", "the cat"]}'
            head = b"POST /embed HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
            second.sendall(head + body)
            wait_until_waiting(rest, 4)
        wait_until_waiting(rest, 0)
        backend.release.set()
        assert first.result().json() == [[3.0]]
    assert backend.batches == [[3.0]]


def test_a_text_that_fails_fails_its_request_and_no_other(tmp_path: Path) -> None:
    class Picky(HeldTextBackend):
        def run(self, inputs: Tensors) -> Tensors:
            if inputs["input_ids"].shape[1] > 4:
                raise ValueError("long ones hurt")
            return super().run(inputs)

    with running_server(lambda: [held_text_model(Picky(), tmp_path)]) as server, running_http(server) as rest:
        url = f"http://127.0.0.1:{rest.port}/v1/embeddings"
        answer = httpx.post(url, json={"model": "held", "input": ["the", "the cat sleeps on", "cat"]}, timeout=60)
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
        assert httpx.post(url, json={"model": "held", "input": ["the", "cat"]}, timeout=60).status_code == 200


def test_no_request_fails_while_versions_take_over(text_repository: Path, tmp_path: Path) -> None:
    for version in ("1", "2", "3"):
        shutil.copytree(text_repository / "embedder", tmp_path / version / "embedder")
        (tmp_path / version / "embedder" / "1").rename(tmp_path / version / "embedder" / version)
    old, *others = (load_repository(tmp_path / version)[0] for version in ("1", "2", "3"))
    stopped = threading.Event()
    statuses: list[int] = []

    def ask(url: str) -> None:
        with httpx.Client(timeout=60) as client:
            while not stopped.is_set():
                statuses.append(client.post(url, json={**EMBED, "input": ["the train", "a cat sleeps"] * 10}).status_code)

    with running_server(lambda: [old]) as server, running_http(server) as rest, ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask, f"http://127.0.0.1:{rest.port}/v1/embeddings") for _ in range(2)]
        try:
            for model in others:
                before = len(statuses)
                while len(statuses) < before + 4:
                    assert not any(task.done() for task in asking)
                server.call(lambda model=model: server.core.replace("embedder", [model]))  # type: ignore[misc]
        finally:
            stopped.set()
        for task in asking:
            task.result()
    assert set(statuses) == {200}


def test_the_header_server_timing_covers_all_texts_of_a_request(texts: httpx.Client) -> None:
    body = {"inputs": ["the cat", "the train"]}
    answer = texts.post("/embed?model=embedder", json=body, headers={"halfserve-timings": "true"})
    named = dict(entry.split(";dur=") for entry in answer.headers["server-timing"].split(", "))
    assert list(named) == ["queue", "compute", "total"]
    assert max(float(named["queue"]), float(named["compute"])) <= float(named["total"]) + 0.002
    plain = texts.post("/embed?model=embedder", json=body)
    assert "server-timing" not in plain.headers
    assert plain.json() == answer.json()
