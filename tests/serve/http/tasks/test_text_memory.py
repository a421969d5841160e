"""What text requests hold of the server's memory, and whose texts are tokenized first."""

from __future__ import annotations

import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np

from halfserve.serve.engine.tensors import Tensors
from halfserve.serve.http.options import HttpOptions
from halfserve.serve.security.memory_budget import MemoryBudget
from tests.serve.engine.fakes import HOLD_S
from tests.serve.http.running_http import running_http
from tests.serve.http.tasks.small_text_models import tokenizer
from tests.serve.http.tasks.test_text_routes import HeldTextBackend, held_text_model
from tests.serve.running_server import running_server

PADDED_TOKENS, ROWS = 4096, 2000  # 66 MB of padded rows
PADDED_BYTES = 8 * PADDED_TOKENS  # of a row's ids


def test_rows_are_padded_and_counted_as_their_turn_comes(tmp_path: Path) -> None:
    backend, budget = HeldTextBackend(held=True), MemoryBudget(2**28)
    with (
        running_server(lambda: [held_text_model(backend, tmp_path, length=PADDED_TOKENS)]) as server,
        running_http(server, HttpOptions(port=0, metrics_port=None), budget=budget) as rest,
        ThreadPoolExecutor(1) as pool,
    ):
        url = f"http://127.0.0.1:{rest.port}/embed"
        httpx.get(f"http://127.0.0.1:{rest.port}/info")  # loads the tokenizer
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
    with (
        running_server(lambda: [held_text_model(Echo(), tmp_path, own, length=6)]) as server,
        running_http(server, HttpOptions(port=0, metrics_port=None)) as rest,
    ):
        url = f"http://127.0.0.1:{rest.port}/v1/embeddings"
        for given in ("the train", [2, 4, 5, 3]):
            assert httpx.post(url, json={"model": "held", "input": given}).status_code == 200
    assert rows == [[1, 1, 2, 4, 5, 3]] * 2
