"""Ensembles and their steps come, change and go, by request and by the repository."""

from __future__ import annotations

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

from halfserve.serve.model_control.control_options import ControlMode
from tests.serve.engine.ensembles.configurations import ensemble, step
from tests.serve.ensemble_folders import CHAIN, save_add, save_ensemble
from tests.serve.model_control.controlled import controlled_server, lines, wait_for
from tests.serve.running_server import RunningServer

READY = ("READY", "")
NOT_SERVED = "the model is not served; load or repair it, or correct model_name"
LATER: dict[str, Any] = {"poll_interval_s": 0.05, "settle_s": 0.05}
CLIENTS = 8


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """`pipe` of `one` and `ten`, and `solo` of `one`."""
    root = tmp_path / "repository"
    save_add(root / "one", 1)
    save_add(root / "ten", 10)
    save_ensemble(root / "pipe", CHAIN)
    save_ensemble(root / "solo", ensemble(step("one", "x=x", "y=out"), input="x:FP32:4", output="out:FP32:4"))
    return root


def state(server: RunningServer) -> dict[str, tuple[str, str]]:
    return {name: (state, reason) for name, _, state, reason in lines(server)}


def ready(server: RunningServer) -> set[str]:
    return {name for name, entry in state(server).items() if entry == READY}


def ask(client: triton.InferenceServerClient, name: str = "pipe") -> float:
    x = triton.InferInput("x", [1, 4], "FP32").set_data_from_numpy(np.zeros((1, 4), np.float32))
    return float(client.infer(name, [x], client_timeout=60).as_numpy("out")[0, 0])


def test_an_ensemble_is_loaded_with_its_steps_and_unloaded_with_those_that_came_with_it(repository: Path) -> None:
    with (
        controlled_server(repository, ControlMode.EXPLICIT) as server,
        triton.InferenceServerClient(server.address) as client,
    ):
        client.load_model("pipe")
        assert ready(server) == {"one", "pipe", "ten"}
        assert ask(client) == 11
        client.load_model("ten")  # it stays, as it was asked for
        client.load_model("solo")
        client.unload_model("pipe", unload_dependents=True)
        assert ready(server) == {"one", "solo", "ten"}  # `solo` needs `one`
        client.unload_model("solo", unload_dependents=True)
        assert ready(server) == {"ten"}
        client.load_model("pipe")
        client.unload_model("pipe")
        assert ready(server) == {"one", "ten"}


def test_steps_of_an_ensemble_of_the_start_are_loaded_too(repository: Path) -> None:
    save_ensemble(repository / "nested", ensemble(step("pipe", "x=x", "out=out"), input="x:FP32:4", output="out:FP32:4"))
    with (
        controlled_server(repository, ControlMode.EXPLICIT, load_at_start=("nested",)) as server,
        triton.InferenceServerClient(server.address) as client,
    ):
        assert ready(server) == {"nested", "one", "pipe", "ten"}
        client.unload_model("nested", unload_dependents=True)
        assert ready(server) == set()


def test_a_load_says_which_step_was_refused_and_why(repository: Path) -> None:
    (repository / "ten" / "1" / "model.onnx").write_bytes(b"this is no model")
    with (
        controlled_server(repository, ControlMode.EXPLICIT) as server,
        triton.InferenceServerClient(server.address) as client,
    ):
        with pytest.raises(InferenceServerException) as refused:
            client.load_model("pipe")
        assert refused.value.message().startswith("model 'pipe' was refused: ten/1/model.onnx: is not")
        assert refused.value.message().endswith(f"; pipe/config.pbtxt: step 2 (model 'ten'): {NOT_SERVED}")
        assert ready(server) == {"one"}


def test_an_ensemble_that_would_become_a_step_of_itself_is_refused(repository: Path) -> None:
    """By the configuration of a load request, which the repository does not show."""
    with (
        controlled_server(repository, ControlMode.EXPLICIT, load_at_start=("solo",)) as server,
        triton.InferenceServerClient(server.address) as client,
    ):
        step_of_itself = """{"platform": "ensemble", "max_batch_size": 8,
            "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [4]}],
            "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [4]}],
            "ensemble_scheduling": {"step": [
                {"model_name": "solo", "input_map": {"x": "x"}, "output_map": {"out": "y"}}]}}"""
        with pytest.raises(InferenceServerException, match="'one' -> 'solo' -> 'one'"):
            client.load_model("one", config=step_of_itself)
        assert ask(client, "solo") == 1


@contextmanager
def under_load(address: str) -> Iterator[list[float | str]]:
    """Several clients ask `pipe` without a pause; yields their answers and errors as they come."""
    stop, answers = threading.Event(), list[float | str]()

    def work() -> None:
        with triton.InferenceServerClient(address) as client:
            while not stop.is_set():
                try:
                    answers.append(ask(client))
                except InferenceServerException as error:
                    answers.append(f"{error.status()} {error.message()}")

    with ThreadPoolExecutor(CLIENTS) as pool:
        working = [pool.submit(work) for _ in range(CLIENTS)]
        try:
            yield answers
        finally:
            stop.set()
    for one in working:
        one.result()


def test_reloads_of_a_step_under_load_fail_no_request(repository: Path) -> None:
    with (
        controlled_server(repository, ControlMode.EXPLICIT, load_at_start=("pipe",)) as server,
        triton.InferenceServerClient(server.address) as client,
        under_load(server.address) as answers,
    ):
        for number in (20, 30, 40):
            ask(client)
            save_add(repository / "ten", number)
            client.load_model("ten")
            assert ask(client) == number + 1
    assert set(answers) <= {11, 21, 31, 41}
    assert len(answers) > CLIENTS


def test_an_unload_of_a_step_under_load_is_said_and_heals(repository: Path) -> None:
    unavailable = f"StatusCode.UNAVAILABLE the ensemble cannot be computed now: step 2 (model 'ten'): {NOT_SERVED}"
    with (
        controlled_server(repository, ControlMode.EXPLICIT, load_at_start=("pipe",)) as server,
        triton.InferenceServerClient(server.address) as client,
        under_load(server.address) as answers,
    ):
        for _ in range(3):
            assert ask(client) == 11
            client.unload_model("ten")
            assert not client.is_model_ready("pipe")
            assert state(server)["pipe"] == ("UNAVAILABLE", f"step 2 (model 'ten'): {NOT_SERVED}")
            client.load_model("ten")
            assert client.is_model_ready("pipe")
    assert set(answers) <= {11, unavailable}


def test_models_that_come_later_complete_an_ensemble(repository: Path) -> None:
    """In the mode POLL; a step whose interface no longer fits takes the ensemble out until it fits."""
    one, pipe, solo, ten = (("one", "1", *READY), ("pipe", "1", *READY), ("solo", "1", *READY), ("ten", "1", *READY))
    (repository / "ten").rename(repository.parent / "aside")
    with (
        controlled_server(repository, ControlMode.POLL, keep_going=True, **LATER) as server,
        triton.InferenceServerClient(server.address) as client,
    ):
        refused = f"pipe/config.pbtxt: step 2 (model 'ten'): {NOT_SERVED}"
        assert lines(server) == [one, ("pipe", "1", "UNAVAILABLE", refused), solo]
        (repository.parent / "aside").rename(repository / "ten")
        wait_for(server, [one, pipe, solo, ten])
        assert ask(client) == 11
        save_add(repository / "ten", 10, size=5)
        misfit = (
            "step 2 (model 'ten'): input 'x' has shape [-1, 5], but the tensor 't' has shape [-1, 4], as output 'y' of step 1 "
            "(model 'one')"
        )
        wait_for(server, [one, ("pipe", "1", "UNAVAILABLE", misfit), solo, ten])
        save_add(repository / "ten", 20)
        wait_for(server, [one, pipe, solo, ten])
        assert ask(client) == 21


def test_an_ensemble_and_its_steps_that_come_together_are_loaded_in_order(repository: Path) -> None:
    empty = repository.parent / "empty"
    empty.mkdir()
    with controlled_server(empty, ControlMode.POLL, **LATER) as server, triton.InferenceServerClient(server.address) as client:
        for name in ("pipe", "one", "ten"):
            (repository / name).rename(empty / name)
        wait_for(server, [("one", "1", *READY), ("pipe", "1", *READY), ("ten", "1", *READY)])
        assert ask(client) == 11
