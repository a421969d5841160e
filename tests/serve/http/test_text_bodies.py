"""Bodies that are nothing but the one tensor that a model takes: its one text, or the bytes of its numbers."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import numpy as np
import pytest
from onnx import TensorProto, helper

from serve.http.options import HttpOptions
from tests.models import save_model
from tests.serve.engine.model_folders import load
from tests.serve.http.running_http import running_http
from tests.serve.running_server import running_server

HEADER = "inference-header-content-length"


def answer_to(folder: Path, shape: list[int | str], body: bytes, kind: int = TensorProto.STRING) -> httpx.Response:
    """Of a model that gives back what it gets."""
    save_model(folder / "echo.onnx", [helper.make_node("Identity", ["x"], ["y"])], [("x", kind, shape)], [("y", kind, shape)])
    with (
        running_server(lambda: [load(folder / "echo.onnx")]) as server,
        running_http(server, HttpOptions(port=0, metrics_port=None)) as rest,
    ):
        return httpx.post(f"http://127.0.0.1:{rest.port}/v2/models/echo/infer", content=body, headers={HEADER: "0"})


@pytest.mark.parametrize("shape", [[1], ["batch", 1]])
@pytest.mark.parametrize("text", ["caf\u00e9", ""])
def test_a_body_may_be_the_only_text(tmp_path: Path, shape: list[int | str], text: str) -> None:
    answer = answer_to(tmp_path, shape, text.encode())
    length = int(answer.headers[HEADER])
    assert json.loads(answer.content[:length])["outputs"][0]["shape"] == [1] * len(shape)
    size = len(text.encode())
    assert answer.content[length:] == size.to_bytes(4, "little") + text.encode()


def test_a_body_is_not_one_of_several_texts(tmp_path: Path) -> None:
    answer = answer_to(tmp_path, ["batch", 2], b"text")
    assert (answer.status_code, answer.json()["error"].partition("has ")[2]) == (
        400,
        "no shape that follows from its bytes; send JSON",
    )


@pytest.mark.parametrize(
    ("shape", "count", "asked"), [([2, "n"], 6, [2, 3]), (["n", 2], 2, [1, 2]), ([2, "n", 0], 0, [2, 0, 0])]
)
def test_the_one_size_that_is_open_follows_from_the_bytes(
    tmp_path: Path, shape: list[int | str], count: int, asked: list[int]
) -> None:
    body = np.arange(count, dtype=np.float32).tobytes()
    answer = answer_to(tmp_path, shape, body, TensorProto.FLOAT)
    length = int(answer.headers[HEADER])
    assert json.loads(answer.content[:length])["outputs"][0]["shape"] == asked
    assert answer.content[length:] == body


def test_what_is_left_over_of_the_bytes_is_refused(tmp_path: Path) -> None:
    answer = answer_to(tmp_path, [2, "n"], bytes(4 * 5), TensorProto.FLOAT)
    assert answer.status_code == 400
    assert answer.json()["error"] == "input 'x' has 20 bytes, expected 16 for FP32 of shape [2, 2]"
