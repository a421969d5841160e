"""Models that hang, fail, lose their device or run out of memory, in a real process, while others use another model."""

from __future__ import annotations

import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from serve.client import InferenceClient, InferenceClientError, ServerUnavailable
from tests.serve.faults.conftest import ROW_MB, SPAN_S
from tests.serve.faults.load import Load
from tests.serve.faults.processes import ServerProcess

FAR = 1_500_000  # about a microsecond a step
MB = 2**20


def count_to(client: InferenceClient, n: int) -> list[int]:
    return [int(value) for value in client.infer("counter", {"n": np.array([n])})["y"]]


def answers_again(client: InferenceClient) -> bool:
    try:
        return count_to(client, 5) == [5]
    except ServerUnavailable:
        return False


def test_a_model_that_hangs_is_given_up_and_comes_back(mad_process: ServerProcess, load: Load, client: InferenceClient) -> None:
    assert count_to(client, 7) == [7]
    with pytest.raises(ServerUnavailable, match=f"did not answer within its {SPAN_S} s and is being restarted"):
        count_to(client, FAR)
    mad_process.until(lambda: answers_again(client), client.is_live)
    assert "counter/1 instance 0: is up again" in mad_process.error_text()


def test_a_model_whose_file_is_gone_when_it_hangs_is_back_when_the_file_is(
    mad_process: ServerProcess, load: Load, client: InferenceClient
) -> None:
    file = mad_process.repository / "counter" / "1" / "model.onnx"
    elsewhere = file.with_name("elsewhere")
    file.rename(elsewhere)
    try:
        with pytest.raises(ServerUnavailable, match="did not answer"):
            count_to(client, FAR)
        for _ in range(2):  # one that comes before the first try to load it, and one that comes after
            with pytest.raises(
                ServerUnavailable, match="cannot be loaded anew just now .*; try again later, or on another replica"
            ):
                count_to(client, 5)
    finally:
        elsewhere.rename(file)
    mad_process.until(lambda: answers_again(client), client.is_live)


def test_only_the_poisoned_requests_of_a_batch_fail(load: Load, client: InferenceClient) -> None:
    def pick(index: int) -> float | str:
        try:
            return float(client.infer("picky", {"i": np.array([[index]])})["y"][0, 0])
        except InferenceClientError as error:
            return error.code

    indices = [0, 1, 9, 1, 0, 9, 0, 1] * 5
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(pick, indices)) == [{0: 10.0, 1: 20.0}.get(index, "INTERNAL") for index in indices]


def test_a_lost_device_is_loaded_anew_and_costs_others_nothing(
    mad_process: ServerProcess, load: Load, client: InferenceClient
) -> None:
    assert client.infer("fragile", {"i": np.array([[1]])})["y"].tolist() == [[20]]
    with pytest.raises(ServerUnavailable, match="the device failed while it computed this request"):
        client.infer("fragile", {"i": np.array([[-1]])})
    assert client.infer("fragile", {"i": np.array([[0]])})["y"].tolist() == [[10]]
    assert "fragile/1 instance 0: is up again" in mad_process.error_text()


def test_a_batch_that_memory_does_not_hold_is_computed_in_pieces(
    mad_process: ServerProcess, load: Load, client: InferenceClient
) -> None:
    pid = mad_process.process.pid
    x = np.arange(16, dtype=np.float32).reshape(16, 1)
    load.wait_for_more()
    before = resource.prlimit(pid, resource.RLIMIT_AS)
    try:
        limit(pid, 10 * ROW_MB * MB, before[1])
        assert client.infer("hungry", {"x": x})["y"].tolist() == x.tolist()
    finally:
        resource.prlimit(pid, resource.RLIMIT_AS, before)
    assert "hungry/1 instance 0: out of memory with 16 rows at once; it computes at most 8 now" in mad_process.error_text()
    assert client.infer("hungry", {"x": x})["y"].tolist() == x.tolist()


def limit(pid: int, spare_bytes: int, hard: int) -> None:
    """Let a process have so much more address space than it has."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    resource.prlimit(pid, resource.RLIMIT_AS, (pages * resource.getpagesize() + spare_bytes, hard))
