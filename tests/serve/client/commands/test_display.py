from __future__ import annotations

import io
import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

from protos.model_config_pb2 import ModelConfig
from serve.client.commands.console import PipedConsole
from serve.client.commands.display import answer_json, models_table, outputs_table, provider_of
from serve.client.values.answer import InferAnswer


def answered(array: np.ndarray[Any, Any], **parameters: Any) -> InferAnswer:
    return InferAnswer(model="m", version="2", request_id="", parameters=parameters, outputs={"y": array})


def printed(table: Table) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("array", "datatype", "texts"),
    [
        (np.array([[1, 3], [5, 4]], np.float16), "FP16", ["[2, 2]", "1 3 5 4", "1 0"]),
        (np.arange(12.0), "FP64", ["[12]", "0 1 2 3 4 5 6 7 ..."]),
        (np.array([[1, -2]], ml_dtypes.bfloat16), "BF16", ["BF16", "1 -2", " 0"]),
        (np.array([["é".encode(), b"\xff"]], object), "BYTES", ["é", r"\xff"]),
        (np.zeros((0, 3), np.float32), "FP32", ["[0, 3]"]),
    ],
)
def test_a_line_per_output(array: np.ndarray[Any, Any], datatype: str, texts: list[str]) -> None:
    line = printed(outputs_table(answered(array)))
    assert all(text in line for text in [datatype, *texts])


@pytest.mark.parametrize("text", ["[INST] a [/INST]", "a [red]b[/red]", "[/]", ":fire:"])
def test_what_a_server_says_is_no_markup(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    row = {"name": text, "version": "1", "state": "UNAVAILABLE", "reason": text, "platform": "", "provider": None}
    PipedConsole().print(outputs_table(answered(np.array([text.encode()], object))))
    PipedConsole().print(models_table([row | {"inputs": [], "outputs": []}]))
    assert capsys.readouterr().out.count(text) == 3


def test_what_a_server_says_is_no_order_to_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = "a\x1b]0;title\x07\x1b[2J\x9b31m\r"
    row = {"name": text, "version": "1", "state": "UNAVAILABLE", "reason": text, "platform": "", "provider": None}
    PipedConsole().print(outputs_table(answered(np.array([text.encode()], object))))
    PipedConsole().print(models_table([row | {"inputs": [], "outputs": []}]))
    PipedConsole().print(text)
    shown = capsys.readouterr().out
    assert shown.count(r"a\x1b]0;title\x07\x1b[2J\x9b31m\x0d") == 4
    assert all(character.isprintable() or character == "\n" for character in shown)


def test_parameters_that_json_has_no_numbers_for() -> None:
    shown = answer_json(answered(np.zeros(1), loss=float("nan"), most=float("-inf"), guard=True))
    assert shown["parameters"] == {"loss": "NaN", "most": "-Infinity", "guard": True}


def test_json_holds_numbers_and_what_the_server_says_beside() -> None:
    shown = answer_json(answered(np.array([[1, -2]], ml_dtypes.bfloat16), guard="fell back"))
    y = {"datatype": "BF16", "shape": [1, 2], "data": [[1.0, -2.0]], "argmax": [0]}
    assert shown == {"model": "m", "version": "2", "outputs": {"y": y}, "parameters": {"guard": "fell back"}}
    assert json.loads(json.dumps(shown, allow_nan=False)) == shown


def test_a_model_that_failed_to_load_shows_why() -> None:
    row = {"name": "m", "version": "1", "state": "UNAVAILABLE", "reason": "no such file"}
    text = printed(models_table([row | {"platform": "", "provider": None, "inputs": [], "outputs": []}]))
    assert "UNAVAILABLE (no such file)" in text


def test_the_provider_is_what_the_configuration_says() -> None:
    config = ModelConfig()
    assert provider_of(config) is None
    config.parameters["halfserve.provider"].string_value = "CUDAExecutionProvider"
    assert provider_of(config) == "CUDAExecutionProvider"
