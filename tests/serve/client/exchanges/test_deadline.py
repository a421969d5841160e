from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from serve.client.errors import DeadlineExceeded, InvalidRequest
from serve.client.exchanges.deadline import LONGEST_S, Deadline, checked_timeout


def test_what_is_left_only_shrinks() -> None:
    deadline = Deadline.after(50.0)
    first, second = (deadline.remaining_s(method="ModelInfer", address="h:1") for _ in range(2))
    assert first is not None
    assert second is not None
    assert 0 < second <= first <= 50


def test_no_limit_stays_no_limit() -> None:
    assert Deadline.after(None).remaining_s(method="ModelInfer", address="h:1") is None


def test_a_call_is_not_sent_when_nothing_is_left() -> None:
    # Less than grpc's own resolution, and than the time that the next line takes.
    deadline = Deadline.after(1e-9)
    with pytest.raises(DeadlineExceeded, match="h:1 did not answer ModelInfer within 1e-09 s"):
        deadline.remaining_s(method="ModelInfer", address="h:1")


@pytest.mark.parametrize(("given", "used"), [(math.inf, None), (1e12, LONGEST_S), (10**30, LONGEST_S), (np.float32(0.5), 0.5)])
def test_any_number_of_seconds_will_do(given: float, used: float | None) -> None:
    assert checked_timeout(given) == used


@pytest.mark.parametrize("timeout_s", [0, -1, math.nan, -math.inf, "5", True, [1]])
def test_a_limit_is_above_zero(timeout_s: Any) -> None:
    with pytest.raises(InvalidRequest, match="timeout_s must be seconds above 0, or None for no limit"):
        checked_timeout(timeout_s)
