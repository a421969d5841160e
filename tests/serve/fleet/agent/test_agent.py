"""Members, each a real server with its agent, and a real controller."""

from __future__ import annotations

import pytest

from halfserve import ServerUnavailable
from halfserve.serve.fleet.agent.server_process import AgentError
from tests.serve.fleet.fleet import infer, rows, states
from tests.serve.fleet.local_cluster import ONCE, LocalCluster, Watch


def infer_all(cluster: LocalCluster, count: int) -> None:
    for client in cluster.clients:
        for _ in range(count):
            infer(client)


def test_a_member_that_is_drained_ends(cluster: LocalCluster) -> None:
    (leaving,) = cluster.start(1)
    with Watch(cluster.agents[0]) as watch:
        watch.until(lambda found: leaving.address in found)
        cluster.drain(leaving)
        watch.until(lambda found: leaving.address not in found)
    cluster.stop(leaving)
    with pytest.raises(AgentError, match="has ended: exit code 0"):
        leaving.check()
    assert cluster.metric("halfserve_processes") == 2


def test_the_wanted_state_holds_for_members_that_join(cluster: LocalCluster) -> None:
    client = cluster.client(cluster.agents[0])
    client.log_settings(access_log_every=5)
    client.trace_settings("picky", trace_rate="8")
    client.unload_model("picky")
    (joined,) = cluster.start(1)
    assert cluster.client(joined).log_settings()["access_log_every"] == 5
    assert cluster.agree(states) == {"mlp": "READY", "picky": "UNAVAILABLE"}
    assert not cluster.client(joined).is_ready("picky")
    client.load_model("picky")
    assert cluster.agree(lambda one: one.is_ready("picky"))
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
