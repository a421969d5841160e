"""A load that hangs is given up, and does not keep others from being loaded."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from protos.model_config_pb2 import ModelConfig
from serve.backends.onnx_runtime.backend import OnnxRuntime, OnnxRuntimeBackend
from serve.control import switch
from serve.control.loader import Loader
from serve.control.model_control import ModelControl
from serve.control.options import ControlMode, ControlOptions
from serve.engine.backend import ModelInterface, Placement
from serve.engine.configuration.config import Defaults
from tests.models import save_mlp
from tests.serve.control.controlled import lines
from tests.serve.running_server import running_server

WAIT_S = 20.0


class StuckRuntime(OnnxRuntime):
    """Never comes back from loading "stuck" until `release` is set; `ended` is set when it has."""

    def __init__(self) -> None:
        super().__init__()
        self.release, self.ended = threading.Event(), threading.Event()

    def load(self, path: Path, interface: ModelInterface, placement: Placement, config: ModelConfig) -> OnnxRuntimeBackend:
        if config.name == "stuck":
            assert self.release.wait(WAIT_S)
            self.ended.set()
        return super().load(path, interface, placement, config)


@pytest.mark.parametrize("stuck", ["made_of", "find_model"])
def test_files_that_cannot_be_looked_at_in_time_are_not_in_the_others_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stuck: str
) -> None:
    """As those of a file server that has gone."""
    for name in ("stuck", "well"):
        save_mlp(tmp_path / name / "1" / "model.onnx")
    release, real = threading.Event(), getattr(switch, stuck)

    def look(*arguments: Any, **options: Any) -> Any:
        assert "stuck" not in str(arguments) or release.wait(WAIT_S)
        return real(*arguments, **options)

    monkeypatch.setattr(switch, stuck, look)
    placement = Placement(use_gpu=False, threads=1)
    loader = Loader(runtime=OnnxRuntime(), placement=placement, defaults=Defaults(), warm_up_budget_s=5.0)
    options = ControlOptions(mode=ControlMode.EXPLICIT, load_limit_s=0.2)
    with running_server(list) as server, triton.InferenceServerClient(server.address) as client:
        control = server.call(lambda: ModelControl(server.core, tmp_path, loader, options))
        try:
            server.run(control.start())
            with pytest.raises(InferenceServerException, match=r"stuck: its files were not looked at within 0\.2 s"):
                client.load_model("stuck", client_timeout=WAIT_S)
            client.load_model("well", client_timeout=WAIT_S)
            assert client.is_model_ready("well")
        finally:
            release.set()
            server.call(control.close)


def test_a_load_that_hangs_is_refused_and_others_go_on(tmp_path: Path) -> None:
    for name in ("stuck", "well"):
        save_mlp(tmp_path / name / "1" / "model.onnx")
    runtime = StuckRuntime()
    loader = Loader(runtime=runtime, placement=Placement(use_gpu=False, threads=1), defaults=Defaults(), warm_up_budget_s=5.0)
    options = ControlOptions(mode=ControlMode.EXPLICIT, load_limit_s=0.2)
    with running_server(list) as server, triton.InferenceServerClient(server.address) as client:
        control = server.call(lambda: ModelControl(server.core, tmp_path, loader, options))
        try:
            server.run(control.start())
            with pytest.raises(InferenceServerException, match=r"within 0\.2 s \(--load-seconds\), and is given up"):
                client.load_model("stuck", client_timeout=WAIT_S)
            client.load_model("well", client_timeout=WAIT_S)
            assert client.is_model_ready("well")
            runtime.release.set()
            assert runtime.ended.wait(WAIT_S)
            client.load_model("well", client_timeout=WAIT_S)
            assert [line[:3] for line in lines(server)] == [("stuck", "1", "UNAVAILABLE"), ("well", "1", "READY")]
            tensor = triton.InferInput("x", [1, 64], "FP16")
            tensor.set_data_from_numpy(np.ones((1, 64), np.float16))
            assert client.infer("well", [tensor]).as_numpy("y") is not None
        finally:
            runtime.release.set()
            server.call(control.close)
