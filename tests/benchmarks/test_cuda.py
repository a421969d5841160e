"""The program for a GPU, run on little: on the CPU, and with ONNX Runtime's CUDA provider on the emulated device."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import typer

from benchmarks import cuda, cuda_faults
from benchmarks.converters.prediction import Errors
from benchmarks.cuda_device.networks import Network
from halfserve.serve.engine.backend import DevicePlacement
from halfserve.serve.engine.errors import BackendError
from tests.export.conversions.cases import cases
from tests.serve.cuda_emulator.library import make_device

pytestmark = pytest.mark.long


def tables(text: str) -> dict[str, list[list[str]]]:
    """The rows of each table, by the last of its headings; of several alike, by the one before it."""
    found: dict[str, list[list[str]]] = {}
    for block in text.split("\n\n")[1:]:
        headings, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.strip().splitlines()]
        assert all(len(row) == len(headings) for row in rows)
        found[headings[-1] if headings[-1] not in found else headings[-2]] = rows
    return found


@pytest.mark.timeout(1200)
def test_all_is_measured_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    parts = "accuracy,served,limits,lengths,alone,options,memory"
    cuda.main(device="cpu", models="resnet", only=parts, sizes="1", seconds=0.5, threads=1, tiny=True)
    found = tables(capsys.readouterr().out)
    assert found.keys() == {"nodes", "graphs' gain", "gain", "p99 ms", "of alone", "ratio (least to most)"}
    exact, half = found["nodes"]
    assert exact[:4] == ["resnet", "fp32", "fp32", "0.0e+00"]
    assert half[:3] == ["resnet", "fp16", "fp32 (the fp16 model, upcast)"]
    assert all(1e-5 < float(error) < 1e-2 for error in half[3:5]), "of the runtime, and of the simulation"
    assert [row[1:3] for row in found["graphs' gain"]] == [["fp32", "1"], ["fp16", "1"]]
    assert all(row[-2:] == ["-", "-"] for row in found["gain"]), "no memory is locked for the CPU"
    ways = ["alone", "in process", "gRPC", "system memory"]
    assert [row[1:4] for row in found["p99 ms"]] == [[file, "1", way] for file in ("fp32", "fp16") for way in ways]
    assert all(float(row[4]) > 0 for row in found["p99 ms"])
    assert [row[:3] for row in found["of alone"]] == [["resnet", way, "15"] for way in ways[2:]]
    lengths = found["ratio (least to most)"]
    assert [row[:2] for row in lengths] == [[mix, number] for mix in cuda.MIXES for number in ("16", "64")]
    assert all(float(row[2]) > 0 for row in lengths)


def test_predictions_are_compared_with_what_was_found() -> None:
    (cells,) = cuda.predictions("simple", cuda.Plan(placement=DevicePlacement(use_gpu=False), seconds=1, sizes=(1,)))
    assert cells[:4] == ("simple", "14", "100.0%", "100.0%")
    assert cells[-2:] == ("0", "")
    case = next(case for case in cases("light") if case.name == "light_densenet121")
    errors = cuda.compared(case, "CPUExecutionProvider")
    assert 1e-5 < errors.found < 1e-2
    assert errors.ratio == errors.found / max(errors.predicted, 2.0**-11)
    assert [Errors(predicted=math.inf, found=found).ratio for found in (math.inf, 0.5)] == [1.0, 0.0]


@pytest.mark.timeout(1200)
def test_a_server_answers_again_after_each_fault(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        cuda_faults.main(device="cpu")
    assert ended.value.exit_code == 0
    out = capsys.readouterr().out
    assert out.count("out of memory: RESOURCE_EXHAUSTED") == out.count("device lost: INTERNAL") == 2


def test_the_script_goes_on_after_a_step_that_fails(tmp_path: Path) -> None:
    script = Path(cuda.__file__).with_name("gpu.sh")
    ran = subprocess.run([script, tmp_path, "nothing", "nor this"], capture_output=True, text=True, timeout=500, check=False)
    assert (ran.returncode, ran.stderr) == (1, "failed: nothing nor this\n")
    assert (tmp_path / "nor this.txt").read_text() == "there is no step nor this\n"
    without = subprocess.run([script], capture_output=True, text=True, timeout=500, check=False)
    assert (without.returncode, without.stderr.count("\n")) == (2, 1)


def test_without_a_device_it_says_so_and_measures_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "device_count", lambda: 0)
    with pytest.raises(typer.Exit) as ended:
        cuda.main()
    assert ended.value.exit_code == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "no CUDA device" in err


@pytest.mark.parametrize(("models", "only"), [("resnet,vgg", "served"), ("resnet", "served,nothing")])
def test_what_there_is_not_is_named(models: str, only: str) -> None:
    with pytest.raises(typer.BadParameter, match="there is no (vgg|nothing); expected some of "):
        cuda.main(device="cpu", models=models, only=only)


def test_what_fails_costs_no_other_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Network, __: cuda.Plan) -> Iterator[tuple[str, ...]]:
        yield "resnet", "fp32"
        raise BackendError("out of memory")

    monkeypatch.setitem(cuda.TABLES, "accuracy", ("model | file", broken))
    with pytest.raises(typer.Exit) as ended:
        cuda.main(device="cpu", models="resnet", only="accuracy,alone", sizes="1", seconds=0.01, threads=1, tiny=True)
    assert ended.value.exit_code == 1
    out, err = capsys.readouterr()
    found = tables(out)
    assert found["file"] == [["resnet", "fp32"]], "what was measured before stays"
    assert len(found["graphs' gain"]) == 2
    assert err.startswith("accuracy of resnet ended early: BackendError: out of memory\n")


def test_every_option_is_tried_on_a_device(tmp_path: Path) -> None:
    if torch.version.cuda:
        pytest.skip("this torch brings the real CUDA runtime along, which hides the emulated one")
    make_device(tmp_path)
    flags = ["--tiny", "--models", "bert", "--only", "options,memory", "--sizes", "2", "--seconds", "0.01"]
    command = [sys.executable, "-m", "benchmarks.cuda", *flags]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert ran.returncode == 0, ran.stderr
    found = tables(ran.stdout)
    tried = found["error of the default"]
    assert [row[2] for row in tried] == [f"{key}={text}" for key, text in cuda.OPTIONS] * 2
    # With prefer_nhwc the provider computes shapes on the device too, whose kernels do nothing here.
    assert {row[2] for row in tried if row[3] == "-"} <= {"prefer_nhwc=1"}, "the provider knows all of them"
    assert all(float(row[-1]) > 0 for row in found["gain"])
