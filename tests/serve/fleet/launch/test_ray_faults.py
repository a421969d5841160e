"""A Ray cluster of several machines under load: what ends is replaced, and clients notice nothing."""

from __future__ import annotations

import logging
import subprocess
from pathlib import Path

import pytest

from tests.scale import SCALE, scaled
from tests.serve.ray_cluster.faults import FAULTS, MEMBERS, OPTIONS, cluster_under_load, idle_cluster, left_out, scale_up
from tests.serve.ray_cluster.machines import until

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
