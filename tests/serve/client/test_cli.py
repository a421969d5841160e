"""`halfserve infer` and `halfserve models`, through the command's own entry."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest

from halfserve.cli import main
from halfserve.protos import inference_pb2 as pb
from tests.serve.client.scripted_server import ScriptedServer
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
    assert err.splitlines() == ["x: converted from float32 to FP16", "x: added the batch dimension, [64] is sent as [1, 64]"]


@pytest.mark.parametrize(
    "arguments",
    [
        "models",
        pytest.param("models mlp", marks=pytest.mark.long),
        pytest.param("infer mlp --input FILE", marks=pytest.mark.long),
        "bench mlp --seconds 0.1 --concurrency 1",
    ],
)
def test_a_closed_output_pipe_is_no_error(server: RunningServer, digits: Path, arguments: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    words = arguments.replace("FILE", f"x={digits}").split()
    with os.fdopen(writer, "wb") as gone:
        done = subprocess.run(
            [sys.executable, "-m", "halfserve", *words, "--address", server.address],
            stdout=gone,
            stderr=subprocess.PIPE,
            text=True,
            timeout=500,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_infer_answers_machines_with_one_object(server: RunningServer, run: Run, digits: Path, tmp_path: Path) -> None:
    arguments = ("infer", "mlp", "--address", server.address, "--input", f"x={digits}", "--version", "1", "--json")
    code, out, _ = run(*arguments, "--output-file", str(tmp_path / "out.npz"))
    answer = json.loads(out)
    assert (code, answer["model"], answer["version"]) == (0, "mlp", "1")
    y = answer["outputs"]["y"]
    assert (y["datatype"], y["shape"], y["argmax"]) == ("FP16", [1, 10], [int(np.argmax(y["data"]))])
    with np.load(tmp_path / "out.npz") as arrays:
        np.testing.assert_array_equal(arrays["y"], np.array(y["data"], np.float16), strict=True)
    code, out, _ = run(*arguments, "--output-file", str(tmp_path / "out.json"))
    assert (code, json.loads((tmp_path / "out.json").read_text())) == (0, json.loads(out))


def test_infer_shows_the_times_of_a_request(server: RunningServer, run: Run, digits: Path) -> None:
    arguments = ("infer", "mlp", "--address", server.address, "--input", f"x={digits}", "--timings")
    code, out, _ = run(*arguments)
    shown = [line.partition(": ")[0] for line in out.splitlines() if line.startswith("halfserve.")]
    assert (code, sorted(shown)) == (0, ["halfserve.compute_ms", "halfserve.queue_ms", "halfserve.total_ms"])
    rows = ("--input", "x=[[1]]".replace("1", ",".join("1" * 64)), "--stream")
    code, out, _ = run(*arguments[:4], *rows, "--timings")
    assert (code, sorted(json.loads(out)["parameters"])) == (0, sorted(shown))


def test_nan_and_infinity_become_json_strings(server: RunningServer, run: Run) -> None:
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
        (["infer", "mlp", "--input", "x=[1]", "--output-file", "y.csv"], 2, "expected a name that ends in .npz or .json"),
        (["infer", "unbatched", "--input", "x=[1, 2, 3]", "--output", "z"], 1, "has no output 'z'; its outputs are: y"),
        (["infer", "mlp", "--input", "x=[1]", "--parameter", "p"], 2, "--parameter p: expected NAME=VALUE"),
        (["infer", "mlp", "--input", "x=[1]", "--header", "a"], 2, "--header a: expected NAME:VALUE"),
        (["infer", "mlp", "--input", "x=[1]", "--header", "grpc-a:b"], 2, "metadata 'grpc-a': expected a name"),
        (["infer", "mlp", "--input", "x=[1]", "--token-file", "none"], 2, "--token-file none: cannot be read: No such file"),
        (["infer", "mlp", "--input", "x=[1]", "--tls-key", "none"], 2, "TLS has a client key without its certificate"),
        (["infer", "mlp", "--input", "x=[1]", "--stream", "--output-file", "y.npz"], 2, "--output-file holds one answer"),
        (["infer", "mlp", "--input", "x=[1]", "--stream", "--shared-memory"], 2, "--shared-memory is for single requests"),
        (["infer", "mlp", "--input", "-", "--input", "x=[1]", "--stream"], 2, "lines of JSON hold all inputs of a request"),
        (["infer", "mlp", "--input", "no.jsonl", "--stream"], 2, "--input no.jsonl: there is no file no.jsonl"),
        (["infer", "mlp", "--input", "x=-", "--input", "y=@-"], 2, "standard input can be read once"),
        (["models", "nope"], 1, "the server's repository has no model 'nope'"),
        (["models", "--config", "c.json"], 2, "--config is for one --load; give both, once"),
        (["models", "--load", "mlp", "--config", "no.json"], 2, "--config no.json: cannot be read: "),
        (["models", "--load", "\udcff"], 1, "a model's name must be text that UTF-8 can encode, not '\\udcff'"),
        (["models", "--unload", "m", "--load", "m"], 2, "--load and --unload both name 'm'; --load alone loads a model again"),
        (["models", "--unload", "\udcff"], 1, "a model's name must be text that UTF-8 can encode, not '\\udcff'"),
        (["models", "--address", "\udcff:1"], 2, "the address must be text that UTF-8 can encode, not '\\udcff:1'"),
        (["models", "nope", "--wait", "0.05"], 1, "model 'nope' was not ready within"),
        (["models", "--address", "nonsense"], 2, "the address must be HOST:PORT"),
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


def given_on_stdin(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))


def test_standard_input_holds_all_inputs(server: RunningServer, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    given_on_stdin(monkeypatch, json.dumps({"x": [0.5] * 64}).encode())
    code, out, _ = run("infer", "mlp", "--address", server.address, "--input", "-", "--json")
    assert code == 0
    assert json.loads(out)["outputs"]["y"]["shape"] == [1, 10]


def test_the_best_classes(server: RunningServer, run: Run, digits: Path) -> None:
    arguments = ("--input", f"x={digits}", "--output", "y", "--top-k", "2", "--priority", "0", "--parameter", "a=1", "--json")
    code, out, _ = run("infer", "mlp", "--address", server.address, *arguments)
    assert code == 0
    y = json.loads(out)["outputs"]["y"]
    assert (y["datatype"], y["shape"]) == ("BYTES", [1, 2])


def test_large_inputs_through_shared_memory(sharing: RunningServer, run: Run, digits: Path) -> None:
    code, out, _ = run("infer", "mlp", "--address", sharing.address, "--input", f"x={digits}", "--shared-memory", "--json")
    assert code == 0
    assert json.loads(out)["outputs"]["y"]["shape"] == [1, 10]


def test_a_stream_answers_line_by_line(
    server: RunningServer, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    requests = [{"x": [0.5] * 64}, {"x": [[1.0] * 64] * 2}, {"x": [1]}, {"inputs": [{"name": "x", "data": [1.0] * 64}]}]
    lines = "\n\n".join(json.dumps(request) for request in requests)
    given_on_stdin(monkeypatch, lines.encode())
    code, out, _ = run("infer", "mlp", "--address", server.address, "--input", "-", "--stream", "--in-flight", "2")
    answers = [json.loads(line) for line in out.splitlines()]
    assert code == 1  # one of them failed
    assert [answer["index"] for answer in answers] == [0, 1, 2, 3]
    assert [answer.get("code") for answer in answers] == [None, None, "INVALID_ARGUMENT", None]
    assert answers[1]["outputs"]["y"]["shape"] == [2, 10]
    (tmp_path / "r.jsonl").write_text(lines)
    code, out, _ = run("infer", "mlp", "--address", server.address, "--input", f"{tmp_path}/r.jsonl", "--stream", "--json")
    assert (code, json.loads(out)) == (1, {"model": "mlp", "answers": answers, "failed": 1})


def test_a_stream_sends_the_rows_of_an_array(server: RunningServer, run: Run, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((5, 64), np.float32))
    arguments = ("--input", f"x={tmp_path}/x.npy", "--stream", "--rows", "2", "--json")
    code, out, err = run("infer", "mlp", "--address", server.address, *arguments)
    assert (code, err) == (0, "x: converted from float32 to FP16\n")
    assert [answer["outputs"]["y"]["shape"] for answer in json.loads(out)["answers"]] == [[2, 10], [2, 10], [1, 10]]


@pytest.mark.parametrize(
    ("line", "text"), [(b"[1]", "expected a JSON object such as {'x': [...]}"), (b'{"\xff": 1}', "expected JSON in UTF-8")]
)
def test_a_line_that_is_no_request_ends_the_stream(
    server: RunningServer, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: bytes, text: str
) -> None:
    content = json.dumps({"x": [[0.5] * 64]}).encode() + b"\n" + line + b"\n"
    given_on_stdin(monkeypatch, content)
    (tmp_path / "r.jsonl").write_bytes(content)
    for given, name in (("-", "standard input"), (f"{tmp_path}/r.jsonl", f"{tmp_path}/r.jsonl")):
        code, out, err = run("infer", "mlp", "--address", server.address, "--input", given, "--stream")
        assert (code, len(out.splitlines())) == (2, 1)
        assert err == f"halfserve infer: --input {name}, line 2: {text}\n"


@pytest.mark.parametrize("seconds", ["inf", "1e12", "0"])
def test_watch_intervals_are_finite(server: RunningServer, run: Run, seconds: str) -> None:
    code, out, err = run("models", "mlp", "--address", server.address, "--watch", "--every", seconds)
    assert (code, out) == (2, "")
    assert "Invalid value for '--every'" in err


def test_models_by_name(server: RunningServer, run: Run) -> None:
    code, out, _ = run("models", "mlp", "--wait", "10", "--address", server.address, "--json")
    assert code == 0
    assert {model["name"] for model in json.loads(out)["models"]} == {"mlp"}


def test_loads_and_unloads(scripted: ScriptedServer, run: Run, tmp_path: Path) -> None:
    scripted.answers |= {
        "RepositoryModelLoad": [pb.RepositoryModelLoadResponse()],
        "RepositoryModelUnload": [pb.RepositoryModelUnloadResponse()],
        "RepositoryIndex": [pb.RepositoryIndexResponse()],
        "ModelReady": [pb.ModelReadyResponse(), pb.ModelReadyResponse(ready=True)],
    }
    (tmp_path / "c.json").write_text('{"max_batch_size": 4}')
    options = ("--load", "m", "--config", f"{tmp_path}/c.json", "--wait", "10", "--unload", "old", "--json")
    code, out, _ = run("models", "--address", scripted.address, *options)
    assert (code, json.loads(out)) == (0, {"models": []})
    methods = [method for method, _, _ in scripted.calls]
    assert methods == ["RepositoryModelLoad", "RepositoryModelUnload", "ModelReady", "ModelReady", "RepositoryIndex"]


def test_watches(server: RunningServer, run: Run) -> None:
    options = ("--address", server.address, "--watch", "--every", "0.01", "--times", "2")
    code, out, _ = run("models", "mlp", *options, "--json")
    looks = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [[model["version"] for model in look["models"]] for look in looks] == [["1", "3"], ["1", "3"]]
    assert run("models", *options)[0] == 0
