"""The program that compares numbers of processes, run on little."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import processes
from tests.models import save_mlp


@pytest.mark.long
def test_processes_are_compared_by_what_they_spend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    processes.main(save_mlp(tmp_path / "m.onnx"), counts="1,2", starts=1, rounds=2, seconds=0.3, as_json=True)
    medians = json.loads(capsys.readouterr().out)["medians"]
    assert medians.keys() == {"1", "2"}
    assert all(row["request_us"] > 0 and row["per_second"] > 0 and row["memory_mib"] > 50 for row in medians.values())
    assert medians["1"]["busiest_share"] > medians["2"]["busiest_share"] >= 0.45
