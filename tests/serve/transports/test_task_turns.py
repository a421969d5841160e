"""Tasks of many clients take turns on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import pytest

from halfserve.serve.transports.task_turns import TURN_S, TaskTurns

ITERATIONS = 60
CROWD, OTHER = "crowd", "other"


class Scene:
    """Tasks on an event loop whose iterations are counted, and a clock that only their steps advance.

    Attributes:
        turns: what is tested.
        ran: client and number of each step, by the iteration in which it ran.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.turns = TaskTurns(lambda: self.now_s)
        self.ran: dict[int, list[tuple[str, int]]] = {}
        self._iteration = 0

    def step(self, client: str, number: int, seconds: float) -> None:
        self.ran.setdefault(self._iteration, []).append((client, number))
        self.now_s += seconds

    def task(self, client: str, number: int, seconds: float) -> asyncio.Task[None]:
        async def once() -> None:
            self.step(client, number, seconds)

        async def run() -> None:
            await self.turns.run(once(), lambda: client)

        return asyncio.create_task(run())

    async def go_on(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        for _ in range(ITERATIONS):
            self._iteration += 1
            await asyncio.sleep(0)
            meanwhile()

    @property
    def order(self) -> list[tuple[str, int]]:
        return [step for _, steps in sorted(self.ran.items()) for step in steps]


@pytest.mark.parametrize(("seconds", "most"), [(2 * TURN_S, 1), (TURN_S / 4, 6)])
def test_tasks_that_wake_at_once_run_for_a_turn_per_iteration(seconds: float, most: int) -> None:
    scene = Scene()

    async def run() -> None:
        for number in range(20):
            scene.task(CROWD, number, seconds)
        await scene.go_on()

    asyncio.run(run())
    assert scene.order == [(CROWD, number) for number in range(20)]
    assert max(map(len, scene.ran.values())) <= most


def test_a_client_does_not_wait_for_all_tasks_of_another() -> None:
    scene = Scene()

    async def run() -> None:
        for number in range(20):
            scene.task(CROWD, number, TURN_S)
        scene.task(OTHER, 0, TURN_S)
        await scene.go_on()

    asyncio.run(run())
    assert scene.order.index((OTHER, 0)) < 4
    assert len(scene.order) == 21


def test_every_step_of_a_task_waits_for_a_turn() -> None:
    scene = Scene()

    async def steps(number: int) -> None:
        for _ in range(3):
            scene.step(CROWD, number, 2 * TURN_S)
            await asyncio.sleep(0)

    async def run() -> None:
        async def whole(number: int) -> None:
            await scene.turns.run(steps(number), lambda: CROWD)

        tasks = [asyncio.create_task(whole(number)) for number in range(4)]
        await scene.go_on()
        assert all(task.done() for task in tasks)

    asyncio.run(run())
    assert sorted(scene.order) == [(CROWD, number) for number in range(4) for _ in range(3)]
    assert max(map(len, scene.ran.values())) == 1


def test_a_task_that_is_cancelled_while_it_waits_ends() -> None:
    scene = Scene()

    async def run() -> None:
        tasks = [scene.task(CROWD, number, TURN_S) for number in range(8)]
        await asyncio.sleep(0)
        tasks[5].cancel()
        await scene.go_on()
        assert [task.cancelled() for task in tasks] == [number == 5 for number in range(8)]

    asyncio.run(run())
    assert scene.order == [(CROWD, number) for number in range(8) if number != 5]


def test_tasks_whose_time_limits_end_at_once_take_turns() -> None:
    scene = Scene()

    async def waits(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            scene.step(CROWD, number, 2 * TURN_S)

    async def whole(number: int) -> None:
        await scene.turns.run(waits(number), lambda: CROWD)

    async def run() -> None:
        tasks = [asyncio.create_task(whole(number)) for number in range(10)]
        await scene.go_on()
        for task in tasks:
            task.cancel()
        await scene.go_on()
        assert all(task.cancelled() for task in tasks)

    asyncio.run(run())
    assert sorted(scene.order) == [(CROWD, number) for number in range(10)]
    assert max(map(len, scene.ran.values())) <= 2


def test_errors_and_time_limits_reach_the_task() -> None:
    turns, seen = TaskTurns(), list[str]()

    async def waits() -> None:
        try:
            async with asyncio.timeout(0):
                await asyncio.Event().wait()
        except TimeoutError:
            seen.append("late")
        raise KeyError("end")

    async def run() -> None:
        await turns.run(waits(), lambda: CROWD)

    with pytest.raises(KeyError, match="end"):
        asyncio.run(run())
    assert seen == ["late"]


def test_functions_share_the_turns() -> None:
    scene = Scene()

    async def run() -> None:
        for number in range(10):
            scene.turns.call_later(CROWD, partial(scene.step, CROWD, number, 2 * TURN_S))
        scene.task(OTHER, 0, TURN_S)
        await scene.go_on()

    asyncio.run(run())
    assert sorted(scene.order) == [*((CROWD, number) for number in range(10)), (OTHER, 0)]
    assert scene.order.index((OTHER, 0)) < 4
    assert max(map(len, scene.ran.values())) <= 2  # a function, and a task that was woken in the iteration before
