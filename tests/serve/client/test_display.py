from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

from protos import inference_pb2 as pb
from protos.model_config_pb2 import ModelConfig
from serve.client.display import models_table, outputs_json, outputs_table, provider_of


def response(datatype: str) -> pb.ModelInferResponse:
    made = pb.ModelInferResponse(model_name="m", model_version="2")
    made.outputs.add(name="y", datatype=datatype)
    return made


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
        (np.array([[0x3F80, 0xC000]], np.uint16), "BF16", ["BF16", "1 -2"]),
        (np.array([["é".encode(), b"\xff"]], object), "BYTES", ["é", r"\xff"]),
        (np.zeros((0, 3), np.float32), "FP32", ["[0, 3]"]),
    ],
)
def test_a_line_per_output(array: np.ndarray[Any, Any], datatype: str, texts: list[str]) -> None:
    line = printed(outputs_table(response(datatype), {"y": array}))
    assert all(text in line for text in texts)


def test_json_of_bf16_holds_numbers_not_bit_patterns() -> None:
    answer = outputs_json(response("BF16"), {"y": np.array([[0x3F80, 0xC000]], np.uint16)})
    assert answer["outputs"]["y"]["data"] == [[1.0, -2.0]]
    assert json.loads(json.dumps(answer, allow_nan=False)) == answer


def test_a_model_that_failed_to_load_shows_why() -> None:
    row = {"name": "m", "version": "1", "state": "UNAVAILABLE", "reason": "no such file"}
    text = printed(models_table([row | {"platform": "", "provider": None, "inputs": [], "outputs": []}]))
    assert "UNAVAILABLE (no such file)" in text


def test_the_provider_is_what_the_configuration_says() -> None:
    config = ModelConfig()
    assert provider_of(config) is None
    config.parameters["halfserve.provider"].string_value = "CUDAExecutionProvider"
    assert provider_of(config) == "CUDAExecutionProvider"
