"""Python models that load, unload and ask for other models, with models that come and go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from halfserve.serve.backends.runtimes import Runtimes
from halfserve.serve.engine.backend import Trust
from halfserve.serve.engine.model_calls import ModelCalls
from halfserve.serve.model_control.control_options import ControlMode
from tests.models import save_mlp
from tests.serve.backends.python.python_models import save_python_model
from tests.serve.backends.python.test_python_models import infer
from tests.serve.model_control.controlled import ask, control
from tests.serve.running_server import RunningServer, running_server

LOADS = """
class TritonPythonModel:
    def initialize(self, args):
        pb_utils.load_model("NAME")
        self.is_ready = pb_utils.is_model_ready("NAME")

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([self.is_ready], np.float32))])]
"""
COMPLETES = """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        pb_utils.load_model("twice")
        pb_utils.Logger.log_info("completed")
        return config

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([5], np.float32))])]
"""


@contextmanager
def explicit_server(root: Path) -> Iterator[RunningServer]:
    """A server whose models are loaded by request."""
    runtimes = Runtimes(trust=Trust(python_models=True))
    with running_server(list) as server:
        controlling = server.call(
            lambda: control(server.core, root, ControlMode.EXPLICIT, runtimes, load_limit_s=15.0, uploads=True)
        )
        server.call(lambda: runtimes.connect(ModelCalls(server.core)))
        try:
            server.run(controlling.start())
            yield server
        finally:
            server.call(controlling.close)


@pytest.mark.parametrize(("name", "answer"), [("loads", 1), ("outer", 1), ("completes", 5)])
def test_a_model_loads_another_one_while_it_is_loaded(tmp_path: Path, name: str, answer: float) -> None:
    save_python_model(tmp_path, "twice")
    save_python_model(tmp_path, "loads", LOADS.replace("NAME", "twice"))
    save_python_model(tmp_path, "outer", LOADS.replace("NAME", "loads"))
    save_python_model(tmp_path, "completes", COMPLETES)
    with explicit_server(tmp_path) as server, InferenceServerClient(server.address) as client:
        client.load_model(name)
        assert infer(client, name, np.ones(1, np.float32)) == [answer]
        assert infer(client, "twice", np.ones(1, np.float32)) == [2]


def test_a_model_that_is_not_loaded_is_not_ready_and_stays_unloaded(tmp_path: Path) -> None:
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            pb_utils.unload_model("twice")
            pb_utils.load_model("twice")
            pb_utils.unload_model("twice")
            while pb_utils.is_model_ready("twice"):
                pass
            pb_utils.unload_model("twice")
            is_ready = pb_utils.is_model_ready("twice") or pb_utils.is_model_ready("unknown")
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([is_ready], np.float32))])]
    """
    save_python_model(tmp_path, "twice")
    save_python_model(tmp_path, "asks", code)
    with explicit_server(tmp_path) as server, InferenceServerClient(server.address) as client:
        client.load_model("asks")
        assert infer(client, "asks", np.ones(1, np.float32)) == [0]


def test_a_model_loads_another_one_from_files_of_its_own(tmp_path: Path) -> None:
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            with open("PATH", "rb") as file:
                files = {"file:2/model.onnx": file.read(), "file:empty.txt": b""}
            refused = 0
            for config, wrong in (("", files), ("{}", {"2/model.onnx": b""}), ("{}", {"file:1/model.py": b""})):
                try:
                    pb_utils.load_model("new", config, wrong)
                except pb_utils.TritonModelException:
                    refused += 1
            pb_utils.load_model("new", files=files, config='{"max_batch_size": 3}')
            is_ready = pb_utils.is_model_ready("new", "2")
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([refused + 10 * is_ready], np.float32))])]
    """
    save_python_model(tmp_path / "models", "loads", code.replace("PATH", str(save_mlp(tmp_path / "new.onnx"))))
    with explicit_server(tmp_path / "models") as server, InferenceServerClient(server.address) as client:
        client.load_model("loads")
        assert infer(client, "loads", np.ones(1, np.float32)) == [13]
        assert client.get_model_config("new").config.max_batch_size == 3
        ask(client, "new")


@pytest.mark.parametrize(("name", "other"), [("loads", "loads"), ("loads", "back")])
def test_models_that_load_each_other_while_loaded_are_refused(tmp_path: Path, name: str, other: str) -> None:
    save_python_model(tmp_path, "loads", LOADS.replace("NAME", other))
    save_python_model(tmp_path, "back", LOADS.replace("NAME", "loads"))
    with (
        explicit_server(tmp_path) as server,
        InferenceServerClient(server.address) as client,
        pytest.raises(InferenceServerException, match="in its initialize, which waits for .* itself"),
    ):
        client.load_model(name)
