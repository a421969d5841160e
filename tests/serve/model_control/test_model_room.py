"""Models make room for others: what was used longest ago goes, and what is in use, pinned or needed by others stays."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntime, OnnxRuntimeBackend
from halfserve.serve.engine.backend import DevicePlacement, ModelInterface
from halfserve.serve.engine.inference_core import ON_DEMAND
from halfserve.serve.engine.tensors import Tensors
from halfserve.serve.model_control import load_memory
from halfserve.serve.model_control.control_options import ControlMode
from halfserve.serve.model_control.load_memory import needed_bytes
from tests.models import save_mlp
from tests.serve.engine.sequences.scene import sum_model
from tests.serve.ensemble_folders import CHAIN, save_add, save_ensemble
from tests.serve.model_control.controlled import HeldRuntime, ask, controlled_server, lines
from tests.serve.model_control.test_load_on_demand import RESTS, figure, pin, refusal
from tests.serve.running_server import WAIT_S, RunningServer
from tests.serve.test_sequences import step

NAMES = ("a", "b", "c")
NOT_WARM = 'parameters { key: "halfserve.warm_up" value { string_value: "off" } }'  # no batch is known to be short


class HeldCompute(OnnxRuntime):
    """Batches of the model `name` wait for `release` once `holds` is set; `entered` is set when one waits."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self.holds, self.entered, self.release = threading.Event(), threading.Event(), threading.Event()

    def load(
        self, path: Path, interface: ModelInterface, placement: DevicePlacement, config: ModelConfig
    ) -> OnnxRuntimeBackend:
        backend = super().load(path, interface, placement, config)
        run = backend.run  # (of a frozen dataclass)

        def held(inputs: Tensors) -> Tensors:
            if self.holds.is_set():
                self.entered.set()
                assert self.release.wait(WAIT_S)
            return run(inputs)

        if config.name == self._name:
            object.__setattr__(backend, "run", held)
        return backend


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name in NAMES:
        save_mlp(tmp_path / name / "1" / "model.onnx")
    return tmp_path


def size(repository: Path, name: str = "a") -> int:
    return needed_bytes(repository / name / "1" / "model.onnx", 1)


@contextmanager
def bounded(
    repository: Path, models: float = 0, **options: Any
) -> Iterator[tuple[RunningServer, triton.InferenceServerClient]]:
    """A server with room for so many models of the repository, 0 for no bound."""
    most = int(models * size(repository)) if models else 0
    with (
        controlled_server(repository, ControlMode.NONE, on_demand=True, max_loaded_bytes=most, **options) as server,
        triton.InferenceServerClient(server.address) as client,
    ):
        yield server, client


def served(server: RunningServer) -> list[str]:
    return [name for name, _, state, _ in lines(server) if state == "READY"]


def test_what_was_used_longest_ago_makes_room(repository: Path, caplog: pytest.LogCaptureFixture) -> None:
    with bounded(repository, 2.5) as (server, client), caplog.at_level("DEBUG", "halfserve.serve.model_control"):
        expected = ask(client, "a")
        for name, left in (("b", ["a", "b"]), ("a", ["a", "b"]), ("c", ["a", "c"]), ("b", ["b", "c"])):
            assert ask(client, name) == expected
            assert served(server) == left
        assert ("a", "1", *RESTS) in lines(server)
        assert figure(server, "loaded_model_bytes") == 2 * size(repository)
        assert (figure(server, "models_unloaded_for_room_total"), figure(server, "demand_loads_total")) == (2, 4)
        levels = {record.getMessage().split(" in ")[0]: record.levelname for record in caplog.records}
        assert levels["b: unloaded to make room for c"] == "DEBUG"  # a load writes one line
        assert levels["c/1: loaded and tried out"] == "INFO"


def test_a_model_with_requests_stays_and_the_load_waits_for_it(repository: Path) -> None:
    runtime = HeldCompute("a")
    (repository / "a" / "config.pbtxt").write_text(NOT_WARM)
    with bounded(repository, 1.5, runtime=runtime) as (server, client), ThreadPoolExecutor(2) as pool:
        expected = ask(client, "a")
        runtime.holds.set()
        computing = pool.submit(ask, client, "a")
        try:
            assert runtime.entered.wait(WAIT_S)
            assert refusal(client, "b", timeout_us=200_000)[0] == "DEADLINE_EXCEEDED"
            assert served(server) == ["a"]
            waiting = pool.submit(ask, client, "b")
            server.until(lambda: server.core.figures.readings["halfserve_demand_waiting_requests"].read() == 1)
        finally:
            runtime.release.set()
        assert (computing.result(WAIT_S), waiting.result(WAIT_S)) == (expected, expected)
        assert served(server) == ["b"]


def test_loads_that_wait_for_their_turn_unload_nothing_yet(repository: Path) -> None:
    coming = ("w", "x", "y", "z")
    for name in coming:
        save_mlp(repository / name / "1" / "model.onnx")
    runtime = HeldRuntime(*coming)
    with bounded(repository, 3.5, runtime=runtime) as (server, client), ThreadPoolExecutor(len(coming)) as pool:
        expected = [ask(client, name) for name in NAMES]
        try:
            waiting = [pool.submit(ask, client, name) for name in coming]
            server.until(lambda: server.core.figures.readings["halfserve_demand_waiting_requests"].read() == len(coming))
            server.until(lambda: len(server.core.models()) == 1)
            assert ask(client, "c") == expected[2]
        finally:
            runtime.release.set()
        assert [one.result(WAIT_S) for one in waiting] == [expected[0]] * len(coming)
        assert figure(server, "demand_loads_total") == len(NAMES) + len(coming)


def test_a_sequence_keeps_its_model_until_it_ends(repository: Path) -> None:
    sum_model(repository)
    room = (size(repository) + size(repository, "sum") - 1) / size(repository)
    with bounded(repository, room) as (server, client):
        assert step(client, 5, 1, start=True) == 1
        assert refusal(client, "a", timeout_us=200_000)[0] == "DEADLINE_EXCEEDED"
        assert step(client, 5, 2, end=True) == 3
        assert ask(client, "a")
        assert served(server) == ["a"]


def test_a_model_that_cannot_fit_is_refused_and_unloads_nothing(repository: Path) -> None:
    (repository / "large" / "1").mkdir(parents=True)
    (repository / "large" / "1" / "model.onnx").write_bytes(b"x" * 3 * size(repository))
    pin(repository / "b")
    with bounded(repository, 1.5) as (server, client):
        for name in ("large", "a"):
            code, text = refusal(client, name)
            assert (code, "pinned models leave" in text, "raise --max-loaded-mib" in text) == ("UNAVAILABLE", True, True)
        assert served(server) == ["b"]
        assert figure(server, "models_unloaded_for_room_total") == 0


def test_steps_stay_as_long_as_their_ensemble_which_goes_first(tmp_path: Path) -> None:
    for name, number in (("one", 1), ("ten", 10), ("a", 5)):
        save_add(tmp_path / name, number)
    save_ensemble(tmp_path / "chain", CHAIN)
    x = triton.InferInput("x", [1, 4], "FP32").set_data_from_numpy(np.zeros((1, 4), np.float32))
    with bounded(tmp_path, 2.5) as (server, client):
        assert client.infer("chain", [x]).as_numpy("out").tolist() == [[11] * 4]
        client.infer("ten", [x])  # leaves `one` as the step that was used longest ago
        assert client.infer("a", [x]).as_numpy("y").tolist() == [[5] * 4]
        assert served(server) == ["a", "ten"]
        assert client.infer("chain", [x]).as_numpy("out").tolist() == [[11] * 4]
        assert served(server) == ["chain", "one", "ten"]
    with bounded(tmp_path, 1.5) as (server, client), pytest.raises(InferenceServerException, match="chain.*try again later"):
        client.infer("chain", [x])


def test_an_unload_request_for_a_step_fails_no_load_of_its_ensemble(tmp_path: Path) -> None:
    for name, number in (("one", 1), ("ten", 10)):
        save_add(tmp_path / name, number)
    with (tmp_path / "ten" / "config.pbtxt").open("a") as config:
        config.write(NOT_WARM)
    save_ensemble(tmp_path / "chain", CHAIN)
    runtime = HeldCompute("ten")
    x = triton.InferInput("x", [1, 4], "FP32").set_data_from_numpy(np.zeros((1, 4), np.float32))
    with (
        controlled_server(tmp_path, ControlMode.EXPLICIT, on_demand=True, runtime=runtime) as server,
        triton.InferenceServerClient(server.address) as client,
        ThreadPoolExecutor(3) as pool,
    ):
        client.infer("chain", [x])
        runtime.holds.set()
        before = pool.submit(client.infer, "chain", [x])
        try:
            assert runtime.entered.wait(WAIT_S)
            unload = pool.submit(client.unload_model, "one")
            server.until(lambda: not server.core.served("chain"))  # it leaves first, once its request is answered
            after = pool.submit(client.infer, "chain", [x])
            server.until(lambda: server.core.figures.readings["halfserve_demand_waiting_requests"].read() == 1)
            control: Any = server.core.control
            server.until(lambda: control._steps_in_use["one"] > 0)
        finally:
            runtime.release.set()
        assert [one.result(WAIT_S).as_numpy("out").tolist() for one in (before, after)] == [[[11] * 4]] * 2
        unload.result(WAIT_S)


def test_memory_that_is_short_unloads_models_too(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bounded(repository) as (server, client):
        one = size(repository)
        monkeypatch.setattr(load_memory, "available_bytes", lambda: int((2.5 - len(server.core.models())) * one))
        for name in (*NAMES, "a"):
            assert ask(client, name)
        assert served(server) == ["a", "c"]


def test_models_without_requests_are_unloaded_and_come_again(repository: Path, caplog: pytest.LogCaptureFixture) -> None:
    pin(repository / "c")
    with bounded(repository, idle_unload_s=0.2) as (server, client), caplog.at_level("INFO"):
        expected = ask(client, "a")
        server.until(lambda: not server.core.served("a"))
        assert ask(client, "a") == expected
        server.until(lambda: any(one.version == "1" and one.reason == ON_DEMAND for one in server.core.index()))
        shutil.rmtree(repository / "a")
        server.run(server.core.refresh())
        assert ("a", "1", "UNAVAILABLE", "unloaded") in lines(server)
        assert "c" in served(server)
        assert "a: unloaded after 0.2 s without a request" in caplog.messages
        assert figure(server, "models_unloaded_idle_total") >= 1


def test_what_a_load_request_brought_is_not_lost(repository: Path) -> None:
    with (
        controlled_server(
            repository, ControlMode.EXPLICIT, on_demand=True, max_loaded_bytes=int(1.5 * size(repository))
        ) as server,
        triton.InferenceServerClient(server.address) as client,
    ):
        client.load_model("a", config='{"max_batch_size": 3}')
        assert refusal(client, "b", timeout_us=300_000)[0] == "UNAVAILABLE"
        assert client.get_model_config("a").config.max_batch_size == 3
        client.unload_model("a")
        server.until(lambda: server.core.comes_on_demand("b"))
        assert ask(client, "b")
        assert ask(client, "a")
        assert client.get_model_config("a").config.max_batch_size != 3
        assert served(server) == ["a"]


def test_a_model_does_not_wait_for_itself_to_leave(repository: Path) -> None:
    with (
        controlled_server(
            repository, ControlMode.EXPLICIT, on_demand=True, max_loaded_bytes=int(1.5 * size(repository))
        ) as server,
        triton.InferenceServerClient(server.address) as client,
    ):
        assert ask(client, "a")
        save_mlp(repository / "a" / "2" / "model.onnx")
        with pytest.raises(InferenceServerException, match="a/2/model.onnx: takes at least .* try again later, or raise it"):
            client.load_model("a")
        assert client.get_model_config("a").config.name == "a"
        assert [line[:3] for line in lines(server)][:2] == [("a", "1", "READY"), ("a", "2", "UNAVAILABLE")]


def test_clients_lose_nothing_while_models_come_and_go(repository: Path) -> None:
    with bounded(repository, 1.5) as (server, client), ThreadPoolExecutor(6) as pool:
        expected = ask(client, "a")
        answers = list(pool.map(lambda number: ask(client, NAMES[number % 3]), range(60)))
        assert answers == [expected] * 60
        assert figure(server, "loaded_model_bytes") == size(repository)
