"""What holds for several servers that answer as one, be they processes of one machine or members of a cluster."""

from __future__ import annotations

import json

import numpy as np
import pytest

from halfserve import Client, InvalidRequest, ModelNotFound
from tests.serve.fleet.fleet import Fleet, infer, rows, states

NUMBER = np.zeros((1, 1), np.int64)


@pytest.fixture(params=["two_processes", "cluster"])
def fleet(request: pytest.FixtureRequest) -> Fleet:
    found: Fleet = request.getfixturevalue(request.param)
    return found


def test_counters_and_metrics_are_sums(fleet: Fleet) -> None:
    before = fleet.agree(rows)
    sent = [len([infer(client) for _ in range(number)]) for number, client in enumerate(fleet.clients, 1)]
    assert fleet.agree(rows) == before + sum(sent)
    listed = json.loads(fleet.page("http_port", "/v2/models/stats"))["model_stats"]
    assert [one["inference_count"] for one in listed if one["name"] == "mlp"] == [before + sum(sent)]
    assert fleet.metric("nv_inference_count") >= before + sum(sent)
    assert fleet.metric("halfserve_processes") == 2


def test_a_model_is_unloaded_and_loaded_everywhere(fleet: Fleet) -> None:
    first, second = fleet.clients[:2]
    first.unload_model("picky")
    assert fleet.agree(states) == {"mlp": "READY", "picky": "UNAVAILABLE"}
    assert not fleet.agree(lambda client: client.is_ready("picky"))
    for client in fleet.clients:
        with pytest.raises(ModelNotFound, match="'picky'"):
            client.infer("picky", {"i": NUMBER})
    second.load_model("picky")
    assert fleet.agree(states) == {"mlp": "READY", "picky": "READY"}
    assert fleet.agree(lambda client: client.is_ready("picky"))
    assert fleet.page("http_port", "/v2/models/picky/ready") == "", "its status says that it is ready"
    for client in fleet.clients:
        client.infer("picky", {"i": NUMBER})
    with pytest.raises(ModelNotFound, match="no model 'nothing'"):
        first.load_model("nothing")


def test_a_config_of_a_load_request_is_kept_by_new_servers_too(fleet: Fleet) -> None:
    def most_rows(client: Client) -> int:
        size: int = client.model_config("mlp").max_batch_size
        return size

    before = fleet.agree(most_rows)
    fleet.clients[0].load_model("mlp", config={"max_batch_size": 3})
    fleet.clients[-1].load_model("mlp")
    assert fleet.agree(most_rows) == 3
    fleet.lose_one(infer)
    assert fleet.agree(most_rows) == 3
    fleet.clients[0].unload_model("mlp")
    fleet.clients[-1].load_model("mlp")
    assert fleet.agree(most_rows) == before


def test_settings_hold_everywhere(fleet: Fleet) -> None:
    fleet.clients[0].log_settings(log_verbose_level=1)
    assert fleet.agree(lambda client: client.log_settings()["log_verbose_level"]) == 1
    fleet.clients[-1].trace_settings("picky", trace_rate="7")
    assert fleet.agree(lambda client: client.trace_settings("picky")["trace_rate"]) == ["7"]


def test_a_refused_setting_changes_nothing_anywhere(fleet: Fleet) -> None:
    def level(client: Client) -> object:
        return client.log_settings()["log_verbose_level"]

    before = fleet.agree(level)
    with pytest.raises(InvalidRequest, match="log_verbose_level is 'loud'"):
        fleet.clients[0].log_settings(log_verbose_level="loud")
    assert fleet.agree(level) == before


def test_sums_are_over_the_living_and_a_new_server_knows_what_a_killed_one_knew(fleet: Fleet) -> None:
    before, asked = fleet.agree(rows), list[Client]()

    def ask(client: Client) -> None:
        infer(client)
        asked.append(client)

    fleet.clients[0].log_settings(access_log_every=9)
    fleet.lose_one(ask)
    assert fleet.agree(rows) < before + len(asked)
    assert fleet.metric("halfserve_processes") == 2
    assert fleet.agree(states) == {"mlp": "READY", "picky": "READY"}
    assert fleet.agree(lambda client: client.log_settings()["access_log_every"]) == 9
    for client in fleet.clients:
        infer(client)
