"""Several servers that load models on demand, each by itself, and answer as one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from halfserve import Client
from halfserve.serve.engine.inference_core import ON_DEMAND
from tests.serve.fleet.fleet import Fleet, X, rows
from tests.serve.fleet.local_cluster import local_cluster
from tests.serve.fleet.local_processes import processes

RESTING = {"mlp": ("UNAVAILABLE", ON_DEMAND), "picky": ("UNAVAILABLE", ON_DEMAND)}


@contextmanager
def members(kind: str, repository: Path) -> Iterator[Fleet]:
    if kind == "processes":
        with processes(repository, "--load-on-demand", "--warm-up-seconds", "0") as two:
            yield two
        return
    with TemporaryDirectory() as name, local_cluster(Path(name), repository) as cluster:
        cluster.start(2, "--load-on-demand")
        yield cluster


def index(client: Client) -> dict[str, tuple[str, str]]:
    return {one.name: (one.state, one.reason) for one in client.models()}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["processes", "cluster"])
def test_members_load_by_themselves_and_answer_as_one(two_models: Path, kind: str) -> None:
    with members(kind, two_models) as fleet:
        assert fleet.agree(index) == RESTING
        assert fleet.metric("halfserve_demand_loads_total") == 0
        first = fleet.clients[0]
        assert first.infer("mlp", {"x": X})["y"].shape[0] == 1
        assert fleet.metric("halfserve_demand_loads_total") == 1
        assert all(client.is_ready("mlp") and client.is_ready("picky") for client in fleet.clients)
        loaded = RESTING | {"mlp": ("READY", "")}
        while fleet.agree(index) != loaded:  # members of a cluster report twice a second
            assert fleet.agree(index) in (RESTING, loaded)
        assert fleet.agree(rows) == fleet.metric("nv_inference_count") == 1
