from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from tests.longest_first import spread


@dataclass(frozen=True)
class Item:
    """What `spread` looks at of a collected test."""

    path: Path
    limit_s: float | None = None

    def get_closest_marker(self, name: str) -> Any:
        assert name == "timeout"
        return None if self.limit_s is None else pytest.mark.timeout(self.limit_s).mark


QUICK = [Item(Path(f"quick_{number}.py")) for number in range(10)]
SOAK, README, DEMO = Item(Path("soak.py"), 360), Item(Path("readme.py"), 300), [Item(Path("demo.py"), 180)] * 2


def test_the_longest_are_at_the_beginning_of_the_workers_shares() -> None:
    items = [*QUICK[:3], *DEMO, *QUICK[3:7], SOAK, *QUICK[7:], README]
    spread(cast("list[pytest.Item]", items), 2)
    assert items == [SOAK, *DEMO, *QUICK[:4], README, *QUICK[4:]]
    assert items.index(README) == len(items) // 2


@pytest.mark.parametrize("workers", [1, 3, 40])
def test_the_others_stay_in_their_order_and_none_is_lost(workers: int) -> None:
    items = [*QUICK, README, *DEMO, SOAK]
    spread(cast("list[pytest.Item]", items), workers)
    assert [item for item in items if item in QUICK] == QUICK
    assert sorted(map(str, items)) == sorted(map(str, [*QUICK, README, *DEMO, SOAK]))


def test_without_long_ones_nothing_moves() -> None:
    items = [*QUICK]
    spread(cast("list[pytest.Item]", items), 2)
    assert items == QUICK
