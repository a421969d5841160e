"""Python models that load, unload and ask for other models, with models that come and go."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from halfserve.serve.backends.runtimes import Runtimes
from halfserve.serve.engine.backend import Trust
from halfserve.serve.engine.model_calls import ModelCalls
from halfserve.serve.model_control.control_options import ControlMode
from tests.models import save_mlp
from tests.serve.backends.python.python_models import X_TO_Y, save_python_model
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
# The first copy waits in its initialize until a second one is in its own.
MEETS = """
import os

class TritonPythonModel:
    def initialize(self, args):
        place = "PLACE"
        try:
            os.mkdir(place + ".first")
        except FileExistsError:
            open(place, "rb").close()
        else:
            open(place, "wb").close()

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([7], np.float32))])]
"""


@contextmanager
def explicit_server(root: Path, **options: Any) -> Iterator[RunningServer]:
    """A server whose models are loaded by request."""
    runtimes = Runtimes(trust=Trust(python_models=True))
    with running_server(list) as server:
        controlling = server.call(
            lambda: control(server.core, root, ControlMode.EXPLICIT, runtimes, load_limit_s=15.0, uploads=True, **options)
        )
        server.call(lambda: runtimes.connect(ModelCalls(server.core)))
        try:
            server.run(controlling.start())
            yield server
        finally:
            server.call(controlling.close)


@pytest.mark.parametrize("at_start", [True, False])
def test_models_load_at_the_same_time_beside_one_that_fails(tmp_path: Path, at_start: bool) -> None:
    os.mkfifo(tmp_path / "place")
    for name in ("a", "b"):
        save_python_model(tmp_path / "models", name, MEETS.replace("PLACE", str(tmp_path / "place")))
    save_python_model(tmp_path / "models", "broken", "raise ValueError('broken')")
    options = {"load_at_start": ("*",), "keep_going": True} if at_start else {}
    with (
        explicit_server(tmp_path / "models", load_threads=2, **options) as server,
        InferenceServerClient(server.address) as client,
        ThreadPoolExecutor(2) as pool,
    ):
        if not at_start:
            list(pool.map(client.load_model, ("a", "b")))
        assert [infer(client, name, np.ones(1, np.float32)) for name in ("a", "b")] == [[7], [7]]
        assert not client.is_model_ready("broken")


def test_copies_of_a_python_model_load_at_the_same_time(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "place")
    code = MEETS.replace("PLACE", str(tmp_path / "place"))
    save_python_model(tmp_path / "models", "twins", code, f"{X_TO_Y}\ninstance_group [{{ count: 2 kind: KIND_CPU }}]")
    with explicit_server(tmp_path / "models") as server, InferenceServerClient(server.address) as client:
        client.load_model("twins")
        assert infer(client, "twins", np.ones(1, np.float32)) == [7]


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
