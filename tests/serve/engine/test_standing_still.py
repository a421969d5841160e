"""A process that stands still, with all that it computes, and goes on: on a virtual clock, see `simulation`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve.engine.queueing.batch_limits import BatchLimits
from tests.serve.engine.simulation import Simulation, linear, poisson

FIXED, PER_ROW, MAX_ROWS = 0.02, 0.001, 16
PEAK = MAX_ROWS / (FIXED + PER_ROW * MAX_ROWS)  # requests a second, of one instance
TARGET_S, STILL_S, AFTER_S = 0.2, 60.0, 3.0


@pytest.mark.parametrize(("instances", "at"), [(1, 1.0), (8, 6.0)], ids=["early", "everywhere"])
def test_a_minute_in_which_all_stood_still_makes_batches_no_smaller(instances: int, at: float) -> None:
    usual = linear(FIXED, PER_ROW)

    def cost(rows: int, now: float) -> float:
        takes = usual(rows, now)
        return takes + STILL_S if now < at <= now + takes else takes

    clients = poisson(instances * PEAK * 0.6, at + AFTER_S)
    moved = [client if client.at < at else replace(client, at=client.at + STILL_S) for client in clients]
    limits = BatchLimits(max_rows=MAX_ROWS, latency_target_s=TARGET_S)
    outcomes = Simulation(limits, cost, instances=instances).run(moved)
    after = [outcome.kind for outcome in outcomes if outcome.client.at >= at + STILL_S]
    assert len(after) > AFTER_S * PEAK / 2
    assert set(after) == {"answered"}
