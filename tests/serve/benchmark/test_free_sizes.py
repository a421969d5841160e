"""`halfserve bench MODEL` where the model's inputs take any size and no option says which."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from halfserve.serve.engine.repository.model_repository import find_models
from halfserve.serve.model_control.control_options import ControlMode
from tests.models import save_text
from tests.serve.benchmark.test_bench_command import bench, figures
from tests.serve.model_control.controlled import controlled_server, loader
from tests.serve.running_server import RunningServer
from tests.serve.trials.test_padding_check import record

PAIR = "(int64[n, s] tokens, int64[n, s] mask) => (float[n, s] y) { z = Mul (tokens, mask) y = Cast <to = 1> (z) }"
ONE_LEVEL = ("--concurrency", "2", "--requests", "4")


def save_proved(folder: Path) -> None:
    """A model with a certificate, and samples of 7 tokens beside it."""
    save_text(folder / "1" / "model.onnx", PAIR)
    tokens = np.ones((2, 7), np.int64)
    record(folder, {"tokens": tokens, "mask": tokens})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Models "proved" and "plain" (alike), "positions" (64 at most), "picture", and "fives", which takes 5 numbers only."""
    root = tmp_path_factory.mktemp("repository")
    save_proved(root / "proved")
    save_text(root / "plain" / "1" / "model.onnx", PAIR)
    text = "(int64[n, s] ids, int64[n, s] mask) => (float[n, s] y) { size = Shape <start = 1> (ids) last = Squeeze (size)"
    text += " places = Range (zero, last, one) rows = Gather (table, places) z = Mul (ids, mask) f = Cast <to = 1> (z)"
    text += " y = Add (f, rows) }"
    path = root / "positions" / "1" / "model.onnx"
    save_text(path, text, table=np.ones(64, np.float32), zero=np.int64(0), one=np.int64(1))
    save_text(root / "picture" / "1" / "model.onnx", "(float[n, 3, h, w] x) => (float[n, 3, h, w] y) { y = Relu (x) }")
    fives = "(float[n, s] a) => (float[n, 2] y) { y = MatMul (a, w) }"
    save_text(root / "fives" / "1" / "model.onnx", fives, w=np.ones((5, 2), np.float32))
    with controlled_server(root, ControlMode.NONE) as running:
        yield running


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        (["proved"], "sizes of the samples that the model was proved on: --shape tokens:7 --shape mask:7"),
        (["plain"], "the model takes any size, and bench took: --shape tokens:128 --shape mask:128"),
        (["plain", "--shape", "tokens:9"], "sizes of the other inputs: --shape mask:9"),
        (["plain", "--input", "mask=[[1,1,1]]"], "sizes of the other inputs: --shape tokens:3"),
        (["positions"], "the model takes any size, and bench took: --shape ids:16 --shape mask:16"),
        (["picture"], "the model takes any size, and bench took: --shape x:3,224,224"),
    ],
)
def test_the_first_try_measures_and_says_the_sizes(
    server: RunningServer, capsys: pytest.CaptureFixture[str], arguments: list[str], note: str
) -> None:
    found = figures(server, capsys, *arguments, *ONE_LEVEL)
    assert [(level["requests"], level["errors"]) for level in found["levels"]] == [(4, 0)]
    assert found["notes"] == [f"{note} (the option sets others)"]


def test_compared_models_get_the_same_sizes(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(server, capsys, "proved", "--against", "plain", "--rounds", "1", *ONE_LEVEL)
    (difference,) = found["differences"]
    assert {one["max_abs"] for one in difference["outputs"]} == {0}


def test_a_model_that_refuses_usual_sizes_gets_one_error_with_the_command(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("fives", "--address", server.address) == 2
    error = capsys.readouterr().err
    assert "give the sizes, each N a number: halfserve bench fives --shape a:N" in error
    assert error.count("\n") == 1
    assert figures(server, capsys, "fives", "--shape", "a:5", *ONE_LEVEL)["notes"] == []


def test_clients_read_the_shapes_of_a_models_samples(tmp_path: Path) -> None:
    save_proved(tmp_path / "m")
    (files,) = find_models(tmp_path)
    parameters = loader().load(files).config.parameters
    assert json.loads(parameters["halfserve.sample_shapes"].string_value) == {"tokens": [7], "mask": [7]}
