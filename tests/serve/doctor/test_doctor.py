"""`halfserve doctor`: on this machine, with broken packages, on the emulated device, and for machines that are not at hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest

from halfserve import nvidia_libraries
from halfserve.serve.doctor.doctor_command import WIDTH, find
from halfserve.serve.doctor.examination import PARTS, examine
from tests.serve.cuda_emulator.library import make_device

CUDA = "CUDAExecutionProvider"
DEVICE = {"name": "a GPU", "compute_capability": "9.0", "memory_bytes": 1 << 36}


def run(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "halfserve", "doctor", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=os.environ | environment)


def machine(**parts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The facts of a machine with a device on which all works, but for the parts given."""
    facts: dict[str, dict[str, Any]] = {
        "packages": {"versions": {"openvino": "2026.4.1"}, "unmet": []},
        "processor": {"fast_halves": ["bf16"]},
        "onnx_runtime": {"version": "1.31.1", "cuda": "13.0", "providers": [CUDA, "CPUExecutionProvider"]},
        "openvino": {},
        "devices": {"on_bus": 1, "kernel_module": "580.65.06", "cuda": "13.0", "devices": [DEVICE]},
        "cuda": {"tried": {"MatMul": "", "Conv": ""}},
    }
    return facts | parts


def test_a_report_fits_a_terminal_and_names_what_serves() -> None:
    done = run()
    assert done.stderr == ""
    for line in done.stdout.splitlines():
        assert len(line) <= WIDTH or " " not in line.partition("  ")[2].strip(), line
    assert f"ONNX Runtime  {ort.__version__}" in done.stdout
    assert ("Serving works here" in done.stdout) is (done.returncode == 0)


def test_json_has_the_facts_of_each_part() -> None:
    done = run("--json")
    found = json.loads(done.stdout)
    assert found.keys() == {"halfserve", "packages", *PARTS, "findings", "works"}
    assert found["works"] is (done.returncode == 0)
    assert "CPUExecutionProvider" in found["onnx_runtime"]["providers"]
    assert found["packages"]["unmet"] == []


@pytest.mark.parametrize(
    ("code", "reason"),
    [("raise ImportError('invalid ELF header')", "ImportError: invalid ELF header"), ("import os; os.abort()", "signal 6")],
)
def test_a_runtime_that_cannot_be_imported_is_a_line_of_the_report(tmp_path: Path, code: str, reason: str) -> None:
    for name in ("onnxruntime", "openvino", "torch"):
        (tmp_path / f"{name}.py").write_text(code)
    done = run(PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    assert (done.returncode, done.stderr) == (1, "")
    assert reason in done.stdout
    assert "pip install --force-reinstall onnxruntime-gpu" in done.stdout
    assert "usable core(s)" in done.stdout, "the other parts are examined"


def test_a_part_that_cannot_be_examined_says_why() -> None:
    assert "KeyError" in examine("no such part")["error"]


def test_what_is_wrong_is_named_with_what_mends_it() -> None:
    def only(**parts: dict[str, Any]) -> tuple[str, str, bool]:
        (finding,) = find(machine(**parts))
        return finding.problem, finding.remedy, finding.is_broken

    assert list(find(machine())) == []
    none = {"on_bus": 0, "kernel_module": "", "devices": [], "reason": "libcuda.so.1: cannot open"}
    assert list(find(machine(devices=none, cuda={}))) == [], "a machine without a device"
    problem, remedy, is_broken = only(devices=none | {"on_bus": 2}, cuda={})
    assert is_broken
    assert "its driver does not work: libcuda.so.1: cannot open" in problem
    assert "driver" in remedy
    problem, remedy, _ = only(devices=machine()["devices"] | {"cuda": "12.8"})
    assert (problem, remedy) == (
        "the driver supports CUDA 12.8, and ONNX Runtime needs CUDA 13",
        "install NVIDIA's driver 580 or newer",
    )
    problem, remedy, _ = only(onnx_runtime={"version": "1.31.1", "cuda": "", "providers": ["CPUExecutionProvider"]})
    assert (problem, remedy.split("; ")[1]) == ("this ONNX Runtime has no CUDA provider", "pip install onnxruntime-gpu")
    lost = "a GPU is required, but libcublas.so.13: no such file; allow the CPU, or add CUDA's libraries: make"
    problem, remedy, is_broken = only(cuda={"tried": {"MatMul": lost, "Conv": ""}})
    assert (problem, is_broken) == ("MatMul is not computed on CUDA: libcublas.so.13: no such file", True)
    assert "make install EXTRAS=cuda" in remedy
    problem, remedy, is_broken = only(packages={"versions": {}, "unmet": []})
    assert (problem.partition(",")[0], is_broken) == ("this processor computes bf16 faster than float32", False)
    assert "EXTRAS=openvino" in remedy
    problem, remedy, is_broken = only(packages={"versions": {"openvino": "2026"}, "unmet": ["numpy>=2.0"]})
    assert (problem, remedy, is_broken) == ("numpy>=2.0 is not installed", "pip install 'numpy>=2.0'", True)


@pytest.mark.long
def test_the_emulated_device_serves_until_cudnn_is_missing(tmp_path: Path) -> None:
    make_device(tmp_path)
    done = run("--json", LD_LIBRARY_PATH=str(tmp_path))
    found = json.loads(done.stdout)
    assert (done.returncode, found["findings"], found["cuda"]["tried"]) == (0, [], {"MatMul": "", "Conv": ""})
    assert found["devices"]["devices"][0]["compute_capability"] == "9.0"
    paths = {library["file"]: library["path"] for library in found["libraries"]["libraries"] if library["is_required"]}
    assert all(Path(path).parent == tmp_path for path in paths.values()), "LD_LIBRARY_PATH comes first"
    (tmp_path / "libcudnn.so.9").unlink()
    done = run(LD_LIBRARY_PATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (1, "")
    assert "Conv is not computed on CUDA" in done.stdout
    assert "EXTRAS=cuda" in done.stdout


def test_libraries_lie_in_packages_of_either_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, (version, package) in enumerate({12: "cublas", 13: "cu13"}.items()):
        folder = tmp_path / str(number) / "nvidia" / package / "lib"
        folder.mkdir(parents=True)
        (folder / f"libcublas.so.{version}").touch()
        monkeypatch.syspath_prepend(folder.parents[2])
        library = next(each for each in nvidia_libraries.nvidia_libraries(version) if each.title == "cuBLAS")
        assert library.path() == folder / library.file
        assert "file too short" in str(library.why_missing())
