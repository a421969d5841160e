"""Small versions of `benchmarks.cluster_simulation`."""

from __future__ import annotations

import pytest

from benchmarks.cluster_simulating.day import ours, rays, simulate
from benchmarks.cluster_simulation import MIB, measure, place_models


def test_our_policy_misses_fewer_deadlines_with_as_many_members() -> None:
    pytest.importorskip("ray.serve")
    mine, theirs = simulate(ours(), hours=2.5), simulate(rays(1.4), hours=2.5)
    assert mine.member_hours < 1.1 * theirs.member_hours
    assert mine.missed < theirs.missed / 2


def test_every_request_is_answered_and_counted_while_members_come_and_go() -> None:
    phases = place_models(models=20, per_member=8, phase_s=20.0)
    assert [phase.lost for phase in phases] == [0] * len(phases)
    assert all(phase.counted for phase in phases)
    assert all(phase.largest <= 9 * 50 * MIB for phase in phases)
    assert [phase.loads for phase in phases if phase.name == "steady"] == [0]


def test_many_members_are_known_to_each_other_after_replacements() -> None:
    assert measure(30, models=3, seconds=5.0).members == 30
