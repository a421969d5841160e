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
from halfserve.serve.model_control.options import ControlMode
from tests.serve.backends.python.python_models import save_python_model
from tests.serve.backends.python.test_python_models import infer
from tests.serve.model_control.controlled import control
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
        controlling = server.call(lambda: control(server.core, root, ControlMode.EXPLICIT, runtimes, load_limit_s=15.0))
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
