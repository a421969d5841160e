"""Tables and JSON of the commands."""

from __future__ import annotations

import io
import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

from halfserve.protos.inference_pb2 import ModelStatistics
from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.client.cli.display import (
    PipedConsole,
    answer_json,
    computation_of,
    models_table,
    outputs_table,
    provider_of,
)
from halfserve.serve.client.cli.models import activity_json, activity_table, snapshot_of
from halfserve.serve.client.infer_messages import InferAnswer
from tests.serve.engine.fakes import MEASURED
from tests.whole_words import broken_words

FAILED: dict[str, Any] = {"name": "m", "version": "1", "state": "UNAVAILABLE", "reason": "", "platform": "", "provider": None}
FAILED |= {"inputs": [], "outputs": []}


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
def test_texts_of_servers_are_not_read_as_markup(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    PipedConsole().print(outputs_table(answered(np.array([text.encode()], object))))
    PipedConsole().print(models_table([FAILED | {"name": text, "reason": text}]))
    assert capsys.readouterr().out.count(text) == 3


def test_control_characters_of_servers_are_escaped(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = "a\x1b]0;title\x07\x1b[2J\x9b31m\r"
    PipedConsole().print(outputs_table(answered(np.array([text.encode()], object))))
    PipedConsole().print(models_table([FAILED | {"name": text, "reason": text}]))
    PipedConsole().print(text)
    shown = capsys.readouterr().out
    assert shown.count(r"a\x1b]0;title\x07\x1b[2J\x9b31m\x0d") == 4
    assert all(character.isprintable() or character == "\n" for character in shown)


def test_non_finite_parameters_become_json_strings() -> None:
    shown = answer_json(answered(np.zeros(1), loss=float("nan"), most=float("-inf"), guard=True))
    assert shown["parameters"] == {"loss": "NaN", "most": "-Infinity", "guard": True}


def test_json_holds_numbers_and_response_parameters() -> None:
    shown = answer_json(answered(np.array([[1, -2]], ml_dtypes.bfloat16), guard="fell back"))
    y = {"datatype": "BF16", "shape": [1, 2], "data": [[1.0, -2.0]], "argmax": [0]}
    assert shown == {"model": "m", "version": "2", "outputs": {"y": y}, "parameters": {"guard": "fell back"}}
    assert json.loads(json.dumps(shown, allow_nan=False)) == shown


def test_tables_keep_words_whole_in_eighty_columns() -> None:
    names = ("input_ids", "attention_mask", "token_type_ids")
    inputs = [{"name": name, "datatype": "INT64", "shape": [-1, -1]} for name in names]
    outputs = [{"name": "last_hidden_state", "datatype": "FP16", "shape": [-1, -1, 384]}]
    served: dict[str, Any] = {"name": "minilm-reranker-v2", "version": "12", "state": "READY", "reason": ""}
    served |= {"platform": "onnxruntime_onnx", "provider": "CUDAExecutionProvider", "inputs": inputs, "outputs": outputs}
    reason = "model.onnx: is not a readable ONNX file (Error parsing message with type 'onnx.ModelProto'); export it again"
    failed = served | {"state": "UNAVAILABLE", "reason": reason, "provider": None, "platform": "", "inputs": [], "outputs": []}
    assert broken_words(models_table([served, failed])) == []
    busy = statistics("minilm-reranker-v2", requests=123456, rows=3_000_000, batches=2000, ms=99999)
    assert broken_words(activity_table(snapshot_of([], [], 0.0), snapshot_of([busy], [], 1.0))) == []
    long = snapshot_of([statistics("cross-encoder-ms-marco-minilm-l12-v2")], [], 1.0)
    assert "model 1: cross-encoder-ms-marco-minilm-l12-v2/1" in printed(activity_table(long, long))


def test_the_provider_comes_from_the_configuration() -> None:
    config = ModelConfig()
    assert provider_of(config) is None
    config.parameters["halfserve.provider"].string_value = "CUDAExecutionProvider"
    assert provider_of(config) == "CUDAExecutionProvider"


def test_the_table_says_where_and_in_which_precision() -> None:
    config = ModelConfig()
    assert computation_of(config) == {}
    config.parameters["halfserve.precision"].string_value = "bf16"
    config.parameters["halfserve.measured"].string_value = MEASURED
    text = printed(
        models_table([FAILED | {"state": "READY", "reason": "", "provider": "OpenVINO on cpu"} | computation_of(config)])
    )
    assert "OpenVINO on cpu: bf16" in text
    assert MEASURED not in " ".join(text.split())  # it is in --json


def statistics(name: str = "m", *, requests: int = 0, rows: int = 0, batches: int = 0, ms: int = 0, failed: int = 0) -> Any:
    made = ModelStatistics(name=name, version="1", inference_count=rows, execution_count=batches)
    made.inference_stats.success.count = requests
    made.inference_stats.fail.count = failed
    for stage in ("queue", "compute_input", "compute_infer", "compute_output"):
        getattr(made.inference_stats, stage).ns = ms * 1_000_000
    return made


def test_rates_and_means_between_two_snapshots() -> None:
    before = snapshot_of([statistics(requests=10, rows=20, batches=10, ms=5)], [], 100.0)
    now = snapshot_of([statistics(requests=30, rows=60, batches=20, ms=25, failed=4)], [], 102.0)
    assert activity_json(before, now) == {
        "seconds": 2.0,
        "models": [
            {
                "name": "m",
                "version": "1",
                "requests_per_s": 10.0,
                "rows_per_s": 20.0,
                "failures_per_s": 2.0,
                "mean_batch": 4.0,
                "queue_ms": 1.0,
                "compute_ms": 3.0,
            }
        ],
    }


@pytest.mark.parametrize("earlier", [[], [statistics(requests=99, rows=99, batches=9)]])
def test_a_model_that_was_loaded_in_between_counts_from_nothing(earlier: list[Any]) -> None:
    now = snapshot_of([statistics(requests=4, rows=4, batches=1)], [], 1.0)
    assert activity_json(snapshot_of(earlier, [], 0.0), now)["models"][0]["rows_per_s"] == 4.0


def test_an_idle_model_has_no_means() -> None:
    look = snapshot_of([statistics(requests=4, rows=4)], [], 1.0)
    row = activity_json(look, look)["models"][0]
    assert (row["mean_batch"], row["queue_ms"], row["requests_per_s"]) == (None, None, 0.0)
    assert printed(activity_table(look, look)).split()[-7:] == ["m/1", "0", "0", "0", "-", "-", "-"]
