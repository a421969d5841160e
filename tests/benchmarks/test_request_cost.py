"""The program that says where a request's microseconds go."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import request_cost
from halfserve.compiled_build import SWITCH, build_in_use
from tests.models import save_mlp

pytestmark = pytest.mark.long


def test_the_places_that_it_names_are_there() -> None:
    assert [place for place in request_cost.ROOMS if not Path(request_cost.SERVE, place).exists()] == []


def told_with(build: str, model: Path) -> str:
    """What the program prints in a process of its own, which runs that build.

    In the first rounds another thread, which no profile sees, may compute all batches."""
    command = [sys.executable, "-m", "benchmarks.request_cost", str(model), "--in-flight", "4", "--rounds", "400"]
    return subprocess.run(command, env={**os.environ, SWITCH: build}, capture_output=True, text=True, check=True).stdout


def test_each_room_of_the_sources_has_its_share(tmp_path: Path) -> None:
    told = told_with("0", save_mlp(tmp_path / "mlp.onnx"))
    assert "us a request, 4 at a time (median of 400 rounds, plain build)" in told
    assert [room for room in request_cost.ROOMS.values() if room not in told] == []


@pytest.mark.skipif(build_in_use().name != "compiled", reason="needs the compiled hot path")
def test_of_the_compiled_build_it_tells_the_whole(tmp_path: Path) -> None:
    told = told_with("1", save_mlp(tmp_path / "mlp.onnx"))
    assert "us a request, 4 at a time (median of 400 rounds, compiled build)" in told
    assert f"set {SWITCH}=0" in told


def test_it_tells_what_the_second_step_of_an_ensemble_adds() -> None:
    command = [sys.executable, "-m", "benchmarks.request_cost", "--ensemble", "--in-flight", "4", "--rounds", "4"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [line.split(maxsplit=1)[1] for line in told.splitlines()] == [
        *(f"us a request  {name}" for name in ("first", "pipeline", "second")),
        "us for the second step, its model included",
    ]
