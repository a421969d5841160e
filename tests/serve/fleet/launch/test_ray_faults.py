"""Ray clusters of several machines: what ends is replaced, groups and config files, and clients notice nothing."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.harness.models import save_models
from halfserve import Client, ModelNotFound, RetryPolicy
from tests.scale import SCALE, scaled
from tests.serve.faults.soaking.clients import ask_affine, ask_flip, clients
from tests.serve.faults.soaking.tally import Tally
from tests.serve.ray_cluster.faults import (
    ANSWERS,
    FAULTS,
    MEMBERS,
    OPTIONS,
    cluster_under_load,
    idle_cluster,
    left_out,
    scale_up,
)
from tests.serve.ray_cluster.machines import SERVER, WAIT_S, Machines, machines, serving, until

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800 * max(1.0, SCALE))]
LOGGER = logging.getLogger(__name__)


def test_clients_notice_no_fault_and_no_rollout(tmp_path: Path) -> None:
    with idle_cluster(tmp_path) as cluster, cluster.clients(4):
        for name in [*(FAULTS.keys() - left_out(cluster))] * scaled(1):
            LOGGER.info("%s: restored after %.1f s", name, FAULTS[name](cluster))
            cluster.wait_for_answers()
    assert cluster.tally.counted().wrong == []


def test_members_follow_the_load_without_a_failed_request(tmp_path: Path) -> None:
    with cluster_under_load(tmp_path) as cluster:
        LOGGER.info("a second member after %.1f s of load, one again %.1f s after its end", *scale_up(cluster))
    assert cluster.tally.counted().wrong == []


def test_what_cannot_run_is_one_line_and_what_serves_serves_on(tmp_path: Path) -> None:
    (tmp_path / "broken" / "model" / "1").mkdir(parents=True)
    (tmp_path / "broken" / "model" / "1" / "model.onnx").write_text("no model")
    with cluster_under_load(tmp_path / "models") as cluster:
        before = cluster.serving()

        def run(path: str, *options: str) -> subprocess.CompletedProcess[str]:
            given = ("--detach", "--first-port", "0", "--replicas", str(MEMBERS - 1), *options)
            return cluster.machines.run("run", str(tmp_path / path), *given, "--", *OPTIONS)

        nowhere = run("nowhere")
        assert (nowhere.returncode, nowhere.stdout, nowhere.stderr.count("\n")) == (1, "", 1)
        assert "nowhere: not found; expected a model repository folder" in nowhere.stderr
        large = run("models", "--cpus", "64", "--wait-seconds", "45")
        assert (large.returncode, large.stdout) == (1, "")
        assert "each takes 64 CPU" in large.stderr
        for command, text in ((("drain", "nobody"), "has no member 'nobody'"), (("load", "nothing"), "has no model 'nothing'")):
            refused = cluster.machines.run(*command)
            assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (1, "", 1)
            assert text in refused.stderr
        until(lambda: cluster.serving() == before, "members from before")  # one may be late with its report
    assert cluster.tally.counted().wrong == []


def members(found: Machines) -> dict[str, str]:
    return {one["id"]: one["grpc_address"] for one in found.status()["members"] if one["state"] == "SERVING"}


def drain(found: Machines, member: str, there: dict[str, str]) -> None:
    """Returns when another member serves in its place."""
    others = [address for one, address in there.items() if one != member]
    found.done("drain", member)
    until(lambda: len(now := serving(others)) == len(there) and member not in now, "another member")


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

        before, tally = members(found), Tally()
        with clients(f"cluster://{','.join(before.values())}", [ask_affine] * 3, tally):
            drain(found, next(iter(before)), before)
            enough = tally.answered().total() + ANSWERS
            until(lambda: tally.answered().total() >= enough, "answers")
    assert tally.counted().wrong == []


GROUP_OPTIONS = ("--first-port", "0", "--", "--warm-up-seconds", "0", "--lame-duck-seconds", "0")


def test_groups_share_a_directory_and_keep_what_was_loaded(tmp_path: Path) -> None:
    save_models(tmp_path)
    random, tally = np.random.default_rng(), Tally()
    with machines([3]) as found:

        def run(name: str, models: str) -> str:
            named = ("--name", name, "--cluster", "house", "--models", models, "--detach")
            return found.done("run", str(tmp_path), *named, *GROUP_OPTIONS)

        run("numbers", "affine, other*")
        printed = run("pictures", "flip")
        address = printed.strip().rpartition(" ")[2]
        with Client(address, timeout_s=WAIT_S, retries=RetryPolicy(retries=8, wait_for_server=True)) as client:
            ask_affine(client, random, tally)
            ask_flip(client, random, tally)
            status = found.status("house")
            assert {one["group"]: one["models"] for one in status["members"]} == {"numbers": ["affine"], "pictures": ["flip"]}
            refused = found.run("load", "steps", "--name", "house")
            assert "no servers of this cluster are for model 'steps'" in refused.stderr
            found.done("unload", "affine", "--name", "house")
            known = address.rpartition("//")[2].split(",")
            before = serving(known)
            found.kill(SERVER)
            until(lambda: len(now := serving(known)) == 1 and not set(now) - set(before), "end of the killed server")
            until(lambda: found.status("house")["members"][1:], "its successor")
            assert not client.is_ready("affine")
            with pytest.raises(ModelNotFound):
                ask_affine(client, random, tally)
            found.done("load", "affine", "--name", "numbers")
            ask_affine(client, random, tally)
            ask_flip(client, random, tally)
        found.done("stop", "--name", "numbers")
        assert [one["group"] for one in found.status("house")["members"]] == ["pictures"]
        found.done("stop", "--name", "pictures")
        assert "has no cluster 'house'" in found.run("status", "--name", "house").stderr
    assert tally.counted().wrong == []
