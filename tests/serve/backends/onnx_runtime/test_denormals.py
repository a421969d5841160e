"""Mostly in processes of their own: what counts is the first session of a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from protos.model_config_pb2 import ModelConfig
from serve.engine.backend import DevicePlacement
from tests.models import save_mlp
from tests.serve.backends.loading import load_backend

PROGRAM = """
import sys, threading
from pathlib import Path
import numpy as np
from protos.model_config_pb2 import ModelConfig
from serve.engine.backend import DevicePlacement
from tests.serve.backends.loading import load_backend

def keeps_subnormals():
    return bool(np.float32(1e-40) * np.float32(1) > 0)

path, flushes, seen = Path(sys.argv[1]), sys.argv[2:], []
for flush in flushes:
    config = ModelConfig()
    config.parameters["session.set_denormal_as_zero"].string_value = flush
    load_backend(path, DevicePlacement(use_gpu=False, threads=2), config)
    seen.append(keeps_subnormals())
    thread = threading.Thread(target=lambda: seen.append(keeps_subnormals()))
    thread.start()
    thread.join()
print(all(seen))
"""


@pytest.mark.parametrize("flushes", [["1"], ["1", "0"], ["0", "1"], ["1", "1"]], ids="-".join)
def test_a_model_that_flushes_subnormals_does_so_to_nobody_else(tmp_path: Path, flushes: list[str]) -> None:
    asking = [sys.executable, "-c", PROGRAM, str(save_mlp(tmp_path / "m.onnx")), *flushes]
    done = subprocess.run(asking, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("True", 0), done.stderr


@pytest.mark.parametrize(("threads", "warns"), [("1", True), ("2", False)])
def test_a_wish_that_one_thread_cannot_fulfil_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, threads: str, warns: bool
) -> None:
    config = ModelConfig()
    config.parameters["session.set_denormal_as_zero"].string_value = "1"
    config.parameters["intra_op_thread_count"].string_value = threads
    load_backend(save_mlp(tmp_path / "m.onnx"), DevicePlacement(use_gpu=False), config)
    assert ("set_denormal_as_zero has no effect with one thread; set intra_op" in caplog.text) is warns
