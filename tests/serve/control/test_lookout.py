"""What is there is told while a model is being loaded, however long that takes."""

from __future__ import annotations

import threading
from pathlib import Path

import tritonclient.grpc as triton

from protos.model_config_pb2 import ModelConfig
from serve.backends.onnx_runtime.backend import OnnxRuntime, OnnxRuntimeBackend
from serve.control.loader import Loader
from serve.control.model_control import ModelControl
from serve.control.options import ControlMode, ControlOptions
from serve.engine.backend import ModelInterface, Placement
from serve.engine.configuration.config import Defaults
from tests.models import save_mlp
from tests.serve.running_server import running_server

WAIT_S = 20.0


class HeldRuntime(OnnxRuntime):
    """Loads nothing until `release` is set; `entered` is set when it is to."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.release = threading.Event(), threading.Event()

    def load(self, path: Path, interface: ModelInterface, placement: Placement, config: ModelConfig) -> OnnxRuntimeBackend:
        self.entered.set()
        assert self.release.wait(WAIT_S)
        return super().load(path, interface, placement, config)


def test_the_index_does_not_wait_for_a_load(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_mlp(tmp_path / name / "1" / "model.onnx")
    runtime = HeldRuntime()
    loader = Loader(runtime=runtime, placement=Placement(use_gpu=False, threads=1), defaults=Defaults(), warm_up_budget_s=5.0)

    def load(address: str) -> None:
        with triton.InferenceServerClient(address) as client:
            client.load_model("a")

    with running_server(list) as server, triton.InferenceServerClient(server.address) as client:
        control = server.call(lambda: ModelControl(server.core, tmp_path, loader, ControlOptions(mode=ControlMode.EXPLICIT)))
        server.run(control.start())
        loading = threading.Thread(target=load, args=[server.address])
        loading.start()
        try:
            assert runtime.entered.wait(WAIT_S)
            save_mlp(tmp_path / "c" / "1" / "model.onnx")
            index = client.get_model_repository_index(client_timeout=5).models
            assert [(m.name, m.version, m.state) for m in index] == [
                ("a", "1", "LOADING"),
                ("b", "", "UNAVAILABLE"),
                ("c", "", "UNAVAILABLE"),
            ]
        finally:
            runtime.release.set()
            loading.join(WAIT_S)
            server.call(control.close)
