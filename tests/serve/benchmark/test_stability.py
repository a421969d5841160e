from __future__ import annotations

import pytest

from serve.benchmark.load.order import Tally
from serve.benchmark.stability import is_stable
from tests.serve.benchmark.levels import tally

STEADY = tally([1.0] * 100)


@pytest.mark.parametrize(
    ("windows", "stable"),
    [
        ([STEADY, STEADY], False),
        ([STEADY, STEADY, STEADY], True),
        ([tally([9.0] * 5), STEADY, STEADY, STEADY], True),
        ([STEADY, STEADY, tally([1.0] * 95)], True),
        ([STEADY, STEADY, tally([1.0] * 70)], False),
        ([STEADY, STEADY, tally([1.0] * 50, seconds=1.0)], True),
        ([STEADY, STEADY, tally([1.0] * 98 + [5.0] * 2)], False),
        ([STEADY, STEADY, tally([])], False),
    ],
    ids=["too few", "steady", "steady at last", "nearly", "slower", "shorter", "a tail", "nothing"],
)
def test_three_windows_must_agree(windows: list[Tally], stable: bool) -> None:
    assert is_stable(windows, 99) is stable


def test_the_percentile_is_the_one_asked_for() -> None:
    tail = tally([1.0] * 98 + [5.0] * 2)
    assert is_stable([STEADY, STEADY, tail], 50)
