"""`halfserve infer` and `halfserve models`, through the command's own entry."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest

from halfserve import main
from tests.serve.running_server import RunningServer

Run: TypeAlias = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def command(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as finished:
            main(list(arguments))
        captured = capsys.readouterr()
        return int(finished.value.code or 0), captured.out, captured.err

    return command


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    path = tmp_path / "x.npy"
    np.save(path, np.random.default_rng(5).standard_normal(64).astype(np.float32))
    return path


def test_infer_prints_a_table(server: RunningServer, run: Run, digits: Path) -> None:
    code, out, err = run("infer", "mlp", "--address", server.address, "--input", f"x={digits}")
    assert code == 0
    assert "FP16" in out
    assert "[1, 10]" in out
    assert err.splitlines() == [
        "x: converted from float32 to FP16",
        "x: added the batch dimension, [64] is sent as [1, 64]",
    ]


def test_infer_answers_machines_with_one_object(server: RunningServer, run: Run, digits: Path, tmp_path: Path) -> None:
    written = tmp_path / "out.npz"
    arguments = ("--address", server.address, "--input", f"x={digits}", "--version", "1", "--output-file", str(written))
    code, out, _ = run("infer", "mlp", *arguments, "--json")
    answer = json.loads(out)
    assert (code, answer["model"], answer["version"]) == (0, "mlp", "1")
    y = answer["outputs"]["y"]
    assert (y["datatype"], y["shape"], y["argmax"]) == ("FP16", [1, 10], [int(np.argmax(y["data"]))])
    with np.load(written) as arrays:
        np.testing.assert_array_equal(arrays["y"], np.array(y["data"], np.float16), strict=True)


def test_json_has_no_word_for_nan_so_strings_say_it(server: RunningServer, run: Run) -> None:
    others = [
        f"in_{wire}=[[1]]"
        for wire in ["UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32"]
    ]
    special = ["in_FP64=[[NaN, Infinity, -Infinity]]", "in_BOOL=[[true]]", 'in_BYTES=[["a"]]']
    inputs = [part for value in (*others, *special) for part in ("--input", value)]
    code, out, _ = run("infer", "echo_types", "--address", server.address, *inputs, "--json")
    outputs = json.loads(out, parse_constant=pytest.fail)["outputs"]
    assert code == 0
    assert outputs["out_FP64"]["data"] == [["NaN", "Infinity", "-Infinity"]]
    assert outputs["out_BYTES"]["data"] == [["a"]]
    assert outputs["out_BOOL"]["data"] == [[True]]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["infer", "nope", "--input", "x=[1]"], 1, "nope"),
        (["infer", "mlp", "--input", "x=[1, 2]"], 1, "has the shape [2], expected [-1, 64]"),
        (["infer", "mlp", "--input", "x"], 2, "--input x: expected NAME=FILE.npy"),
        (["infer", "mlp", "--input", "x=[1]", "--output-file", "/nowhere/y.npz"], 1, "there is no folder /nowhere"),
        (["models", "--address", "nonsense"], 1, "the address must be HOST:PORT"),
        (["models", "--address", "127.0.0.1:1"], 1, "no server answers at 127.0.0.1:1 (connection refused)"),
    ],
)
def test_wrong_input_is_answered_in_one_line(
    server: RunningServer, run: Run, arguments: list[str], code: int, text: str
) -> None:
    address = [] if "--address" in arguments else ["--address", server.address]
    returned, out, err = run(*arguments, *address)
    assert (returned, out) == (code, "")
    assert err.startswith(f"halfserve {arguments[0]}: ")
    assert text in err
    assert err.count("\n") == 1


def test_models_lists_what_the_server_has(server: RunningServer, run: Run) -> None:
    code, out, _ = run("models", "--address", server.address, "--json")
    models = {(m["name"], m["version"]): m for m in json.loads(out)["models"]}
    assert code == 0
    assert {("mlp", "1"), ("mlp", "3"), ("echo_types", "1")} <= models.keys()
    mlp = models["mlp", "3"]
    assert mlp["provider"] == "CPUExecutionProvider"
    assert mlp["inputs"] == [{"name": "x", "datatype": "FP16", "shape": [-1, 64]}]
    code, out, _ = run("models", "--address", server.address)
    assert code == 0
    assert "echo_types" in out
