"""Members, each a real server with its agent, and a real controller."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from halfserve import ServerUnavailable
from halfserve.serve.fleet.agent.agent import Agent
from halfserve.serve.fleet.agent.server_process import AgentError
from tests.serve.fleet.fleet import WAIT_S, infer, rows, states
from tests.serve.fleet.local_cluster import ONCE, LocalCluster, Watch


def infer_all(cluster: LocalCluster, count: int) -> None:
    for client in cluster.clients:
        for _ in range(count):
            infer(client)


def test_counters_of_a_model_go_on_when_it_is_unloaded_and_loaded(cluster: LocalCluster) -> None:
    first, second = cluster.clients
    number = {"i": np.zeros((1, 1), np.int64)}
    first.infer("picky", number)
    before = cluster.agree(lambda client: rows(client, "picky"))
    first.unload_model("picky")
    second.load_model("picky")
    second.load_model("picky")
    second.infer("picky", number)
    assert cluster.agree(lambda client: rows(client, "picky")) == before + 1


def test_requests_in_flight_count_when_their_model_is_loaded_again(cluster: LocalCluster) -> None:
    before = cluster.agree(rows)
    sent: list[int] = []
    over = threading.Event()

    def send(agent: Agent) -> None:
        client = cluster.client(agent)
        count = 0
        while not over.is_set() or not count:
            infer(client)
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
    assert cluster.agree(rows) == before + sum(sent)


def test_a_member_that_is_drained_ends_and_its_counters_stay(cluster: LocalCluster) -> None:
    (leaving,) = cluster.start(1)
    infer_all(cluster, 2)
    before = cluster.agree(rows)
    with Watch(cluster.agents[0]) as watch:
        watch.until(lambda found: leaving.address in found)
        cluster.drain(leaving)
        watch.until(lambda found: leaving.address not in found)
    cluster.stop(leaving)
    with pytest.raises(AgentError, match="has ended: exit code 0"):
        leaving.check()
    assert cluster.agree(rows) == before
    assert cluster.metric("halfserve_processes") == 2


def test_settings_hold_for_members_that_join(cluster: LocalCluster) -> None:
    client = cluster.client(cluster.agents[0])
    client.log_settings(access_log_every=5)
    client.trace_settings("picky", trace_rate="8")
    (joined,) = cluster.start(1)
    assert cluster.client(joined).log_settings()["access_log_every"] == 5
    assert cluster.client(joined).trace_settings("picky")["trace_rate"] == ["8"]
    cluster.stop(joined)


def test_inference_goes_on_without_a_controller_and_its_successor_knows_all(cluster: LocalCluster) -> None:
    infer_all(cluster, 2)
    before = cluster.agree(rows)
    old, cluster.link.controller = cluster.link.controller, None
    infer_all(cluster, 2)
    client = cluster.client(cluster.agents[0], ONCE)
    with pytest.raises(ServerUnavailable, match="the cluster's controller cannot be reached now.* inference goes on"):
        client.models()
    assert client.is_ready()
    cluster.replace_controller()
    assert cluster.link.controller is not old
    assert cluster.agree(rows) == before + 4
    assert cluster.agree(states) == {"mlp": "READY", "picky": "READY"}
