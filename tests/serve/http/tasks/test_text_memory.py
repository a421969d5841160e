"""What text requests hold of the server's memory, and whose texts are tokenized first."""

from __future__ import annotations

import contextlib
import json
import socket
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from halfserve.serve.engine.tensors import Tensors
from halfserve.serve.http.http_options import HttpLimits
from halfserve.serve.http.request_body import FULL
from halfserve.serve.http.rest_server import RestServer
from halfserve.serve.http.tasks.text_bodies import PARSER_TIMES, memory_of_values, read_content
from halfserve.serve.security.memory_budget import MemoryBudget
from tests.serve.engine.fakes import HOLD_S
from tests.serve.http.running_http import running_http
from tests.serve.http.tasks.small_text_models import tokenizer
from tests.serve.http.tasks.test_text_routes import HeldTextBackend, held_text_model
from tests.serve.running_server import RunningServer, running_server

PADDED_TOKENS, ROWS = 4096, 2000  # 66 MB of padded rows
PADDED_BYTES = 8 * PADDED_TOKENS  # of a row's ids
TEXT = "the train " * 3000  # takes a thread some 20 ms


@contextlib.contextmanager
def text_server(
    folder: Path,
    budget: MemoryBudget,
    limits: HttpLimits = HttpLimits(),  # noqa: B008  (it is frozen)
) -> Iterator[tuple[RunningServer, RestServer, str]]:
    """A server with the model "held", which answers with the number of a text's tokens, and its URL."""
    with (
        running_server(lambda: [held_text_model(HeldTextBackend(), folder)]) as server,
        running_http(server, limits=limits, budget=budget) as rest,
    ):
        yield server, rest, f"http://127.0.0.1:{rest.port}"


def asking(
    rest: RestServer, path: str, texts: list[str], address: str = "127.0.0.1", buffer_bytes: int | None = None
) -> socket.socket:
    """A connection from an address of this machine that has sent a request for these texts."""
    peer = socket.socket()
    if buffer_bytes is not None:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    peer.bind((address, 0))
    peer.connect(("127.0.0.1", rest.port))
    body = json.dumps({"inputs": texts}).encode()
    lines = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    peer.sendall(lines.encode() + body)
    return peer


def read_all(peer: socket.socket) -> int:
    """Read and drop an answer until the connection ends; the number of its bytes."""
    peer.settimeout(HOLD_S)
    count = 0
    while piece := len(peer.recv(65_536)):
        count += piece
    return count


def wait_until_held(server: RunningServer, budget: MemoryBudget, least: int) -> None:
    server.until(lambda: budget.held_bytes >= least)


def wait_until_free(server: RunningServer, budget: MemoryBudget) -> None:
    server.until(lambda: not budget.held_bytes)


def test_rows_are_padded_and_counted_as_their_turn_comes(tmp_path: Path) -> None:
    backend, budget = HeldTextBackend(held=True), MemoryBudget(2**28)
    with (
        running_server(lambda: [held_text_model(backend, tmp_path, length=PADDED_TOKENS)]) as server,
        running_http(server, budget=budget) as rest,
        ThreadPoolExecutor(1) as pool,
    ):
        url = f"http://127.0.0.1:{rest.port}/embed"
        httpx.get(f"http://127.0.0.1:{rest.port}/info", timeout=60)  # loads the tokenizer
        tracemalloc.start()
        try:
            content = {"inputs": ["the"] * ROWS, "normalize": False}
            answer = pool.submit(httpx.post, url, json=content, timeout=HOLD_S)
            assert backend.entered.wait(HOLD_S)
            held = server.call(lambda: budget.held_bytes)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        backend.release.set()
        assert answer.result().json() == [[float(PADDED_TOKENS)]] * ROWS
        assert peak < ROWS * PADDED_BYTES / 4
        assert 8 * PADDED_BYTES < held < 2 * peak
        assert server.call(lambda: budget.held_bytes) == 0


def test_token_ids_are_padded_on_the_side_that_the_tokenizer_names(tmp_path: Path) -> None:
    class Echo(HeldTextBackend):
        def run(self, inputs: Tensors) -> Tensors:
            rows.extend(inputs["input_ids"].tolist())
            return {"answer": np.zeros((len(inputs["input_ids"]), 1), np.float32)}

    rows: list[list[int]] = []
    own = tokenizer()
    own.enable_padding(direction="left", pad_id=1)
    with running_server(lambda: [held_text_model(Echo(), tmp_path, own, length=6)]) as server, running_http(server) as rest:
        url = f"http://127.0.0.1:{rest.port}/v1/embeddings"
        for given in ("the train", [2, 4, 5, 3]):
            assert httpx.post(url, json={"model": "held", "input": given}, timeout=60).status_code == 200
    assert rows == [[1, 1, 2, 4, 5, 3]] * 2


def test_texts_of_a_client_that_has_gone_are_not_tokenized(tmp_path: Path) -> None:
    budget = MemoryBudget(2**28)
    with text_server(tmp_path, budget) as (server, rest, _):
        too_long = "the " * 40_000  # would be refused in its turn
        with asking(rest, "/embed", [*[TEXT] * 40, too_long]):
            wait_until_held(server, budget, len(TEXT) * 40)
        wait_until_free(server, budget)
        assert server.core.figures.refused == {}


def test_a_clients_text_does_not_wait_for_all_texts_of_another(tmp_path: Path) -> None:
    budget = MemoryBudget(2**28)
    with text_server(tmp_path, budget) as (server, rest, url), contextlib.ExitStack() as others:
        many = [others.enter_context(asking(rest, "/embed", [TEXT] * 30, "127.0.0.2")) for _ in range(4)]
        wait_until_held(server, budget, 4 * len(TEXT) * 30)
        answer = httpx.post(f"{url}/embed", json={"inputs": TEXT[:3000], "normalize": False}, timeout=HOLD_S)
        assert answer.json() == [[602.0]]
        for one in many:
            one.setblocking(False)
            with pytest.raises(BlockingIOError):
                one.recv(1)


def test_a_text_beyond_the_budget_is_refused_before_it_is_tokenized(tmp_path: Path) -> None:
    budget = MemoryBudget(4_000_000)
    head = b"POST /v2/models/held/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2400000\r\n\r\n"
    with text_server(tmp_path, budget) as (server, rest, url), socket.create_connection(("127.0.0.1", rest.port)) as first:
        first.sendall(head + bytes(2_200_000))
        wait_until_held(server, budget, 3_300_000)
        answer = httpx.post(f"{url}/embed", json={"inputs": TEXT[:3000]}, timeout=HOLD_S)
        assert (answer.status_code, answer.json()["error"]) == (503, FULL)


def test_more_tokens_than_an_answer_describes_are_refused(tmp_path: Path) -> None:
    with text_server(tmp_path, MemoryBudget(2**28)) as (_, _, url):
        answer = httpx.post(f"{url}/tokenize", json={"inputs": ["the " * 25_000] * 3}, timeout=HOLD_S)
    assert (answer.status_code, answer.json()["error"]) == (
        413,
        "'inputs' gives more than 65536 tokens, expected at most as many in one request; split it",
    )


def test_many_tokens_are_described_a_few_at_a_time(tmp_path: Path) -> None:
    texts = ["the train " * 500] * 60  # 60,120 tokens
    with text_server(tmp_path, MemoryBudget(2**28)) as (_, rest, url):
        one = httpx.post(f"{url}/tokenize", json={"inputs": texts[0]}, timeout=HOLD_S).text
        tracemalloc.start()
        try:
            with asking(rest, "/tokenize", texts) as peer:
                count = read_all(peer)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        many = httpx.post(f"{url}/tokenize", json={"inputs": texts}, timeout=HOLD_S).text
    assert count > len(texts) * len(one)
    assert peak < 1.5 * count
    assert many == f"[{','.join([one[1:-1]] * len(texts))}]"


def test_tokens_that_are_not_read_are_given_up(tmp_path: Path) -> None:
    budget = MemoryBudget(2**28)
    limits = HttpLimits(stall_s=0.1)
    with text_server(tmp_path, budget, limits) as (server, rest, _), asking(rest, "/tokenize", [TEXT] * 10, buffer_bytes=4096):
        wait_until_held(server, budget, 10 * len(TEXT))
        wait_until_free(server, budget)


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({"a": [0.5] * 200_000}),
        json.dumps({"a": ["x" * 900 + "\U0001f600"] * 2000}, ensure_ascii=False),
        json.dumps({"a": ["x" * 900 + "\U0001f600"] * 2000}),
        json.dumps({"a": ["\u044f" * 400] * 2000}, ensure_ascii=False),
        json.dumps({"a": [{str(number): []} for number in range(15_000)]}),
        json.dumps({"a": [{}, []] * 400}),
    ],
    ids=["numbers", "wide-texts", "escaped-texts", "texts", "objects", "small"],
)
def test_a_bodys_values_take_no_more_memory_than_is_counted_before(body: str) -> None:
    content = body.encode()
    tracemalloc.start()
    try:
        values = read_content(content)
        taken, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert values
    assert taken < memory_of_values(content)
    assert peak < memory_of_values(content) + PARSER_TIMES * len(content) + 4096
