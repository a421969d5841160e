"""What the demo says when it cannot go on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from examples.digits import demo
from examples.digits.demo import DemoError
from serve.benchmark.errors import BenchmarkArgumentError


def test_a_step_that_fails_ends_the_demo_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where a folder must go")
    command = [sys.executable, "-m", "halfserve", "demo", "--out", str(tmp_path / "runs" / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("halfserve demo: ")
    assert "Traceback" not in done.stderr


def test_a_wrong_option_is_found_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkArgumentError, match="expected numbers above 0 with commas between"):
        demo.demo(out=tmp_path / "demo", concurrency="1,none")
    assert not (tmp_path / "demo").exists()


def test_a_failing_command_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failing = ["train", "no.such.module:model", "--data", "x:y", "--out", str(tmp_path / "run")]
    monkeypatch.setattr(demo, "_train", lambda files, epochs: failing)
    with pytest.raises(DemoError, match="'halfserve train' failed; its message is above"):
        demo.demo(out=tmp_path / "demo", epochs=1)
