"""Members, each a real server with its agent, and a real controller."""

from __future__ import annotations

import os
import re
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from halfserve import Client, InvalidRequest, ModelNotFound, ServerUnavailable
from halfserve.serve.fleet.agent.agent import Agent, AgentError
from tests.models import save_mlp, save_picky
from tests.serve.fleet.local_cluster import ONCE, WAIT_S, LocalCluster, Watch, local_cluster

T = TypeVar("T")
X = np.ones((1, 64), np.float16)


@pytest.fixture(scope="module")
def cluster(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    repository = tmp_path_factory.mktemp("repository")
    save_mlp(repository / "mlp" / "1" / "model.onnx")
    save_picky(repository / "picky" / "1" / "model.onnx")
    with local_cluster(folder, repository) as made:
        made.start(2)
        yield made


def agree(cluster: LocalCluster, ask: Callable[[Client], T]) -> T:
    """What each member answers: it must be the same."""
    answers = [ask(cluster.client(agent)) for agent in cluster.agents]
    assert all(answer == answers[0] for answer in answers), answers
    return answers[0]


def infer(cluster: LocalCluster, count: int, model: str = "mlp") -> None:
    for agent in cluster.agents:
        client = cluster.client(agent)
        for _ in range(count):
            client.infer(model, {"x": X} if model == "mlp" else {"i": np.zeros((1, 1), np.int64)})


def rows(client: Client, model: str = "mlp") -> int:
    (counters,) = client.statistics(model)
    assert counters.inference_stats.success.count == counters.execution_count
    return int(counters.inference_count)


def states(client: Client) -> dict[str, str]:
    return {one.name: one.state for one in client.models()}


def metric(agent: Agent, name: str) -> float:
    """The sum of a metric's samples."""
    with urllib.request.urlopen(f"http://{agent.metrics_address}/metrics", timeout=WAIT_S) as answer:
        return sum(map(float, re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", answer.read().decode(), re.MULTILINE)))


def test_every_member_answers_for_all(cluster: LocalCluster) -> None:
    before = agree(cluster, rows)
    infer(cluster, 2)
    assert agree(cluster, rows) == before + 4
    assert metric(cluster.agents[0], "nv_inference_count") >= before + 4
    assert metric(cluster.agents[1], "halfserve_processes") == 2
    assert agree(cluster, states) == {"mlp": "READY", "picky": "READY"}
    assert not agree(cluster, lambda client: client.is_ready("nothing"))


def test_a_model_is_unloaded_and_loaded_everywhere_and_its_counters_go_on(cluster: LocalCluster) -> None:
    first, second = (cluster.client(agent) for agent in cluster.agents)
    infer(cluster, 1, "picky")
    before = agree(cluster, lambda client: rows(client, "picky"))
    first.unload_model("picky")
    assert agree(cluster, states) == {"mlp": "READY", "picky": "UNAVAILABLE"}
    for client in (first, second):
        assert not client.is_ready("picky")
        with pytest.raises(ModelNotFound, match="'picky' is not served"):
            client.infer("picky", {"i": np.zeros((1, 1), np.int64)})
    second.load_model("picky")
    second.load_model("picky")
    infer(cluster, 1, "picky")
    assert agree(cluster, lambda client: rows(client, "picky")) == before + 2
    with pytest.raises(ModelNotFound, match="no model 'nothing'"):
        first.load_model("nothing")


def test_requests_in_flight_count_when_their_model_is_loaded_again(cluster: LocalCluster) -> None:
    before = agree(cluster, rows)
    sent: list[int] = []
    over = threading.Event()

    def send(agent: Agent) -> None:
        client = cluster.client(agent)
        count = 0
        while not over.is_set() or not count:
            client.infer("mlp", {"x": X})
            count += 1
        sent.append(count)

    threads = [threading.Thread(target=send, args=(agent,)) for agent in cluster.agents]
    for thread in threads:
        thread.start()
    for _ in range(3):
        cluster.client(cluster.agents[0]).load_model("mlp")
    over.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert agree(cluster, rows) == before + sum(sent)


def test_a_server_that_is_killed_leaves_the_directory_and_its_counters_stay(cluster: LocalCluster) -> None:
    before = agree(cluster, rows)
    with Watch(cluster.agents[0]) as watch:
        (killed,) = cluster.start(1)
        found = watch.until(lambda found: found.get(killed.address) == {"mlp", "picky"})
        assert set(found) == {agent.address for agent in cluster.agents}
        infer(cluster, 2)
        assert agree(cluster, rows) == before + 6
        cluster.client(killed).infer("mlp", {"x": X})
        os.kill(killed.pid, signal.SIGKILL)
        watch.until(lambda found: killed.address not in found)
    with pytest.raises(AgentError, match="has ended: SIGKILL"):
        killed.check()
    cluster.stop(killed)
    assert agree(cluster, rows) == before + 7


def test_a_member_that_is_drained_ends_and_its_counters_stay(cluster: LocalCluster) -> None:
    (leaving,) = cluster.start(1)
    infer(cluster, 2)
    before = agree(cluster, rows)
    with Watch(cluster.agents[0]) as watch:
        watch.until(lambda found: leaving.address in found)
        cluster.drain(leaving)
        watch.until(lambda found: leaving.address not in found)
    cluster.stop(leaving)
    with pytest.raises(AgentError, match="has ended: exit code 0"):
        leaving.check()
    assert agree(cluster, rows) == before
    assert metric(cluster.agents[0], "halfserve_processes") == 2


def test_log_and_trace_settings_hold_for_all_members_and_those_that_join(cluster: LocalCluster) -> None:
    client = cluster.client(cluster.agents[0])
    client.log_settings(log_verbose_level=1)
    client.trace_settings("picky", trace_rate="7")
    with pytest.raises(InvalidRequest, match="log_verbose_level"):
        client.log_settings(log_verbose_level=-1)
    (joined,) = cluster.start(1)
    assert agree(cluster, lambda one: one.log_settings()["log_verbose_level"]) == 1
    assert agree(cluster, lambda one: one.trace_settings("picky")["trace_rate"]) == ["7"]
    cluster.stop(joined)


def test_inference_goes_on_without_a_controller_and_its_successor_knows_all(cluster: LocalCluster) -> None:
    infer(cluster, 2)
    before = agree(cluster, rows)
    old, cluster.link.controller = cluster.link.controller, None
    infer(cluster, 2)
    client = cluster.client(cluster.agents[0], ONCE)
    with pytest.raises(ServerUnavailable, match="the cluster's controller cannot be reached now.* inference goes on"):
        client.models()
    assert client.is_ready()
    cluster.replace_controller()
    assert cluster.link.controller is not old
    assert agree(cluster, rows) == before + 4
    assert agree(cluster, states) == {"mlp": "READY", "picky": "READY"}
