"""A Ray cluster of several machines under load: what ends is replaced, and clients notice nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.clustering.faults import FAULTS, cluster_under_load, scale_up

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


def test_clients_notice_no_fault_and_no_rollout(tmp_path: Path) -> None:
    with cluster_under_load(tmp_path) as cluster:
        for cause in FAULTS.values():
            cause(cluster)
            cluster.wait_for_answers()
    assert cluster.tally.counted().wrong == []


def test_members_follow_the_load_without_a_failed_request(tmp_path: Path) -> None:
    with cluster_under_load(tmp_path) as cluster:
        scale_up(cluster)
    assert cluster.tally.counted().wrong == []
