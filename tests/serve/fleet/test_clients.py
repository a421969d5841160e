"""Clients of a whole cluster: joins, drains, kills and a new controller under load, no answer lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from halfserve import Client, RetryPolicy
from tests.models import save_mlp
from tests.serve.faults.server_process import under_load
from tests.serve.fleet.fleet import WAIT_S
from tests.serve.fleet.local_cluster import Watch, local_cluster

ASKERS = 4


@pytest.mark.long
def test_what_happens_to_members_is_unseen_under_load(folder: Path, tmp_path: Path) -> None:
    save_mlp(tmp_path / "mlp" / "1" / "model.onnx")
    with local_cluster(folder, tmp_path) as cluster:
        leaving, killed, _ = cluster.start(3)
        with under_load([f"cluster://{killed.address}"], askers=ASKERS, streams=0, retry=RetryPolicy(retries=3)) as load:
            (joined,) = cluster.start(1)
            with Watch(joined) as watch:
                watch.until(lambda found: "mlp" in found.get(joined.address, ()))
                load.wait_for_more(100)
                cluster.stop(leaving)
                load.wait_for_more(100)
                os.kill(killed.pid, signal.SIGKILL)
                watch.until(lambda found: killed.address not in found)
                load.wait_for_more(100)
            cluster.replace_controller()
            load.wait_for_more(100)
        with Client(f"cluster://{joined.address}", timeout_s=WAIT_S) as client:
            (counters,) = client.statistics("mlp")
        assert 0 < counters.inference_stats.success.count <= load.answers + ASKERS
