"""The memory of all clients together, without any."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfserve.serve.security.memory_budget import MIN_PROGRESS_BYTES, STRANGERS_PART, MemoryBudget, MemoryShare

PATIENCE_S = 5.0
LIMIT = 1600
KNOWN = LIMIT - LIMIT // STRANGERS_PART  # 1500, of which 1125 are free for the taking


class Scene:
    """A budget whose turns of the loop end when a test says so."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.later: list[Callable[[], None]] = []
        self.budget = MemoryBudget(limit, patience_s=PATIENCE_S, soon=self.later.append)
        self.pressed: list[str] = []
        self.gone_on: list[str] = []

    def share(self, name: str, size: int = 0, *, is_known: bool = True) -> MemoryShare:
        share = self.budget.share(
            is_known=is_known, press=lambda: self.pressed.append(name), go_on=lambda: self.gone_on.append(name)
        )
        share.resize(size)
        return share

    def turn(self) -> None:
        later, self.later[:] = list(self.later), []
        for function in later:
            function()


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_no_share_waits_below_three_quarters_of_the_budget(scene: Scene) -> None:
    alone = scene.share("alone", 1125)
    assert alone.goes_on()
    alone.add(1)
    assert alone.is_short


def test_a_share_below_the_level_continues(scene: Scene) -> None:
    large, small = scene.share("large", 1400), scene.share("small", 100)
    assert (large.is_short, small.is_short) == (True, False)
    small.add(100)
    assert (large.is_too_much, small.is_too_much) == (True, False)


def test_many_with_next_to_nothing_do_not_lower_the_level(scene: Scene) -> None:
    for number in range(300):
        scene.share(str(number), 1)
    large, other = scene.share("large", 900), scene.share("other", 300)
    assert other.goes_on()
    assert large.is_short


def test_one_share_at_a_time_has_priority(scene: Scene) -> None:
    first, second = scene.share("first", 600), scene.share("second", 600)
    assert first.goes_on()
    assert not second.goes_on()
    first.add(5000)
    assert first.goes_on()
    first.step_back()
    scene.turn()
    assert scene.gone_on == ["second"]
    assert not first.goes_on()


def test_waiting_shares_continue_when_memory_is_free(scene: Scene) -> None:
    first, second, third = (scene.share(name, 500) for name in ("first", "second", "third"))
    assert [first.goes_on(), second.goes_on(), third.goes_on()] == [True, False, False]
    first.close()
    scene.turn()
    assert sorted(scene.gone_on) == ["second", "third"]


def test_the_one_that_goes_on_loses_its_turn_without_progress(scene: Scene) -> None:
    first, second = scene.share("first", 600), scene.share("second", 600)
    assert [first.goes_on(), second.goes_on()] == [True, False]
    scene.budget.look_after(0.0)
    scene.budget.look_after(PATIENCE_S)
    first.add(MIN_PROGRESS_BYTES)
    scene.budget.look_after(PATIENCE_S + 1)
    assert not second.goes_on()
    scene.budget.look_after(2 * PATIENCE_S + 2)
    scene.turn()
    assert second.goes_on()
    assert not first.goes_on()


def test_the_largest_are_pressed_when_the_budget_is_spent(scene: Scene) -> None:
    for name, size in (("large", 900), ("medium", 500), ("small", 200)):
        scene.share(name, size)
    scene.turn()
    assert scene.pressed == ["large"]  # the level is 800


def test_connections_without_a_token_have_a_separate_budget(scene: Scene) -> None:
    stranger, other = scene.share("stranger", 90, is_known=False), scene.share("known", 1000)
    assert (stranger.is_short, other.is_short) == (True, False)
    assert scene.budget.held_bytes == 1090
    stranger.trust()
    assert not stranger.is_short
    assert scene.budget.held_bytes == 1090


def test_a_closed_share_stays_empty(scene: Scene) -> None:
    over = scene.share("over", 1600)
    over.close()
    over.add(1000)
    over.close()
    assert scene.budget.held_bytes == 0
    assert scene.share("next", 1125).goes_on()


@given(st.lists(st.integers(1, 3 * KNOWN), min_size=1, max_size=30))
def test_the_level_is_what_all_together_may_hold(sizes: list[int]) -> None:
    scene = Scene()
    shares = [scene.share(str(number), size) for number, size in enumerate(sizes)]
    level = shares[0]._pool.level(KNOWN)
    assert sum(min(size, level) for size in sizes) <= KNOWN
    if sum(sizes) > KNOWN:
        assert level >= KNOWN // len(sizes)
        assert any(share.is_too_much for share in shares)
    else:
        assert not any(share.is_too_much for share in shares)
