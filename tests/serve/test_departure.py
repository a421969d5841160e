from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import save_counter

ROOT = Path(__file__).parents[2]
# A runtime that computes for minutes on a thread that nobody can end, in a process that is done.
PROGRAM = """
import sys, threading
import numpy as np, onnxruntime
from serve.departure import leave_threads_behind
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
begun = threading.Event()
def compute():
    begun.set()
    session.run(None, {"n": np.array([int(sys.argv[2])])})
thread = threading.Thread(target=compute, daemon=True)
thread.start()
begun.wait()
print("served", end="")
leave_threads_behind(3)
thread.join()
"""


@pytest.mark.parametrize(("steps", "code"), [(1_000_000_000, 3), (1, 0)], ids=["stuck", "done"])
def test_a_thread_inside_a_runtime_does_not_make_the_end_a_crash(tmp_path: Path, steps: int, code: int) -> None:
    model = save_counter(tmp_path / "model.onnx")
    command = [sys.executable, "-c", PROGRAM, str(model), str(steps)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "served", "")
