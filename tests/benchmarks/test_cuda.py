"""The program for a GPU, run on little: on the CPU, and with ONNX Runtime's CUDA provider on the emulated device."""

from __future__ import annotations

import math
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from benchmarks import cuda, cuda_faults
from benchmarks.converters.prediction import Errors
from benchmarks.cuda_device.bundle import write_models
from benchmarks.cuda_device.networks import Network, networks_of
from benchmarks.cuda_device.one_architecture import MAGIC, fat_binaries, keep_one
from halfserve.serve.engine.backend import DevicePlacement
from halfserve.serve.engine.errors import BackendError
from tests.export.conversions.cases import cases
from tests.serve.cuda_emulator.library import make_device

pytestmark = pytest.mark.long


def tables(text: str) -> dict[str, list[list[str]]]:
    """The rows of each table, by the last of its headings; of several alike, by the one before it."""
    found: dict[str, list[list[str]]] = {}
    for block in text.split("\n\n")[1:]:
        if block.startswith("verdict: "):
            continue
        headings, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.strip().splitlines()]
        assert all(len(row) == len(headings) for row in rows)
        found[headings[-1] if headings[-1] not in found else headings[-2]] = rows
    return found


@pytest.mark.timeout(1200)
def test_all_is_measured_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    parts = "accuracy,served"
    cuda.main(device="cpu", models="resnet", only=parts, sizes="1", seconds=0.5, threads=1, tiny=True)
    out = capsys.readouterr().out
    assert "verdict: resnet fp32 alone " in out
    found = tables(out)
    assert found.keys() == {"nodes", "p99 ms"}
    exact, half = found["nodes"]
    assert exact[:4] == ["resnet", "fp32", "fp32", "0.0e+00"]
    assert half[:3] == ["resnet", "fp16", "fp32 (the fp16 model, upcast)"]
    assert all(1e-5 < float(error) < 1e-2 for error in half[3:5]), "of the runtime, and of the simulation"
    ways = ["alone", "gRPC", "system memory"]
    assert [row[1:4] for row in found["p99 ms"]] == [[file, "1", way] for file in ("fp32", "fp16") for way in ways]
    assert all(float(row[4]) > 0 for row in found["p99 ms"])


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


@pytest.mark.timeout(900)
def test_the_steps_end_with_their_verdicts(tmp_path: Path) -> None:
    device = tmp_path / "device"
    device.mkdir()
    make_device(device)
    steps, script = ["doctor", "kernels", "nothing", "rounding"], Path(cuda.__file__).with_name("gpu.sh")
    paths = {"LD_LIBRARY_PATH": str(device), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment = {**os.environ, **paths, "SLOWER": "20"}
    ran = subprocess.run([script, tmp_path, *steps], env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert ran.returncode == 1, "one step failed"
    verdicts = ran.stdout.splitlines()[-4:]
    assert [line.partition(",")[0] for line in verdicts] == steps
    assert verdicts[0].endswith(": Serving works here, on 1 CUDA device(s) and the CPU.")
    assert "MatMul WRONG" in verdicts[1], "kernels of the emulated device do nothing"
    assert verdicts[2].endswith(" (exit status 2): there is no step nothing")
    assert "use_tf32=0" in (tmp_path / "rounding.txt").read_text()
    assert (tmp_path / "verdicts.txt").read_text().splitlines() == verdicts
    environment["LIMIT_S"] = "0"
    late = subprocess.run(
        [script, tmp_path, "doctor"], env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert late.returncode == 1
    assert re.fullmatch(r"doctor, \d+ s \(exit status 124\): no time was left", late.stdout.splitlines()[-1])
    assert (tmp_path / "doctor.txt").read_text() == "no time was left\n", "the step did not begin"
    without = subprocess.run([script], capture_output=True, text=True, timeout=500, check=False)
    assert (without.returncode, without.stderr.count("\n")) == (2, 1)


def test_networks_travel_without_their_weights(tmp_path: Path) -> None:
    write_models(tmp_path / "models", tiny=True)
    device, whole = tmp_path / "device", tmp_path / "whole"
    device.mkdir()
    whole.mkdir()
    make_device(device)
    networks_of(tmp_path / "models", whole, ["resnet"], tiny=True)
    for path in whole.iterdir():
        assert path.stat().st_size > 2 * (tmp_path / "models" / path.name).stat().st_size
    for check, words in (("placement", "CPUExecutionProvider=1"), ("shapes", "use_tf32=0 ")):
        command = [sys.executable, "-m", "benchmarks.cuda_device.checks", check, "--models", str(tmp_path / "models"), "--tiny"]
        environment = {**os.environ, "LD_LIBRARY_PATH": str(device)}
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
        assert ran.returncode == 0, ran.stderr
        assert words in ran.stdout.splitlines()[-1]


def test_a_provider_keeps_the_code_of_one_architecture() -> None:
    def entry(architecture: int, code: bytes) -> bytes:
        head = struct.pack("<HHIQ", 2, 257, 64, len(code)).ljust(28, b"\0") + struct.pack("<I", architecture)
        return head.ljust(64, b"\0") + code

    def binary(*entries: bytes) -> bytes:
        return struct.pack("<IHHQ", MAGIC, 1, 16, sum(map(len, entries))) + b"".join(entries)

    both = binary(entry(80, b"eighty"), entry(90, b"ninety"))
    alone = binary(entry(90, b"only for ninety"))
    program = bytearray(b"before" + both + b"between" + alone + b"after" + MAGIC.to_bytes(4, "little"))
    length = len(program)
    assert keep_one(program) == 1
    assert (len(program), program.count(b"eighty"), program.count(b"only for ninety")) == (length, 0, 0)
    assert program.count(entry(90, b"ninety")) == 2, "what is for sm_90 alone becomes the smallest code"
    assert [len(each.entries) for each in fat_binaries(program)] == [2, 1]
    with pytest.raises(ValueError, match="no code for sm_70"):
        keep_one(program, 70)


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
        cuda.main(device="cpu", models="resnet", only="accuracy,served", sizes="1", seconds=0.01, threads=1, tiny=True)
    assert ended.value.exit_code == 1
    out, err = capsys.readouterr()
    found = tables(out)
    assert found["file"] == [["resnet", "fp32"]], "what was measured before stays"
    assert len(found["p99 ms"]) == 6
    assert err.startswith("accuracy of resnet ended early: BackendError: out of memory\n")
