"""Bodies that are nothing but the one text that a model takes."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from onnx import TensorProto, helper

from serve.http.options import HttpOptions
from tests.models import save_model
from tests.serve.engine.model_folders import load
from tests.serve.http.running_http import running_http
from tests.serve.running_server import running_server

HEADER = "inference-header-content-length"


def answer_to_text(folder: Path, shape: list[int | str], body: bytes) -> httpx.Response:
    """Of a model that gives back the text it gets."""
    text = TensorProto.STRING
    save_model(folder / "echo.onnx", [helper.make_node("Identity", ["x"], ["y"])], [("x", text, shape)], [("y", text, shape)])
    with (
        running_server(lambda: [load(folder / "echo.onnx")]) as server,
        running_http(server, HttpOptions(port=0, metrics_port=None)) as rest,
    ):
        return httpx.post(f"http://127.0.0.1:{rest.port}/v2/models/echo/infer", content=body, headers={HEADER: "0"})


@pytest.mark.parametrize("shape", [[1], ["batch", 1]])
@pytest.mark.parametrize("text", ["caf\u00e9", ""])
def test_a_body_may_be_the_only_text(tmp_path: Path, shape: list[int | str], text: str) -> None:
    answer = answer_to_text(tmp_path, shape, text.encode())
    length = int(answer.headers[HEADER])
    assert json.loads(answer.content[:length])["outputs"][0]["shape"] == [1] * len(shape)
    size = len(text.encode())
    assert answer.content[length:] == size.to_bytes(4, "little") + text.encode()


def test_a_body_is_not_one_of_several_texts(tmp_path: Path) -> None:
    answer = answer_to_text(tmp_path, ["batch", 2], b"text")
    assert (answer.status_code, answer.json()["error"].partition("has ")[2]) == (
        400,
        "no shape that follows from its bytes; send JSON",
    )
