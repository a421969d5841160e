"""A cluster that Ray's own command deploys from the file that ours prints."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from benchmarks.harness.models import save_models
from halfserve import Client, ClientError, RetryPolicy
from tests.serve.faults.soaking.clients import TIMEOUT_S, ask_affine
from tests.serve.faults.soaking.tally import Tally
from tests.serve.ray_cluster.faults import OPTIONS
from tests.serve.ray_cluster.machines import WAIT_S, Machines, machines, serving, until

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
ENOUGH = 200  # answers


def members(found: Machines) -> dict[str, str]:
    """Addresses of those that serve, by id."""
    return {one["id"]: one["grpc_address"] for one in found.status()["members"] if one["state"] == "SERVING"}


def drain(found: Machines, member: str, there: dict[str, str]) -> None:
    """Returns when another member serves in its place."""
    others = [address for one, address in there.items() if one != member]
    found.done("drain", member)
    until(lambda: len(now := serving(others)) == len(there) and member not in now, "another member")


def keep_asking(address: str, seed: int, stop: threading.Event, tally: Tally) -> None:
    random = np.random.default_rng(seed)
    with Client(address, timeout_s=TIMEOUT_S, retries=RetryPolicy(retries=0)) as client:
        while not stop.is_set():
            try:
                ask_affine(client, random, tally)
            except ClientError as error:
                tally.fault(f"{error.code}: {error}")


def test_a_member_of_a_config_file_drains_without_a_failed_request(tmp_path: Path) -> None:
    save_models(tmp_path / "models")
    with machines([3]) as found:
        options = ("--replicas", "2", "--models", "affine,flip", "--first-port", "0", "--print-serve-config")
        (tmp_path / "serve.yaml").write_text(found.done("run", str(tmp_path / "models"), *options, "--", *OPTIONS))
        environment = {**found.environment(found.nodes[0]), "RAY_ADDRESS": found.address}
        command = [sys.executable, "-m", "ray.serve.scripts", "run", "--non-blocking", str(tmp_path / "serve.yaml")]
        subprocess.run(command, env=environment, capture_output=True, timeout=WAIT_S, check=True)
        until(lambda: not found.run("status").returncode and len(members(found)) == 2, "two members")
        found.done("unload", "flip")
        assert [one["models"] for one in found.status()["members"]] == [["affine"]] * 2
        refused = found.run("scale", "3")
        assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
        assert "was deployed by a config file; change that, and deploy it with `serve deploy`" in refused.stderr

        before, stop, tally = members(found), threading.Event(), Tally()
        address = f"cluster://{','.join(before.values())}"
        threads = [threading.Thread(target=keep_asking, args=(address, seed, stop, tally)) for seed in range(3)]
        for thread in threads:
            thread.start()
        try:
            drain(found, next(iter(before)), before)
            enough = sum(tally.counted().answered.values()) + ENOUGH
            until(lambda: sum(tally.counted().answered.values()) >= enough, "answers")
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert tally.counted().wrong == []
