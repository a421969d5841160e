"""Waits for loads on demand in virtual time: what happens if loads, unloads, clients that go and the drain meet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from halfserve.serve.engine.errors import FailedPreconditionError, InferenceError, UnavailableError
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.model_control.load_on_demand import LONGEST_PAUSE_S, WAIT_S, LoadOnDemand
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.simulated_cluster.virtual_time import run_virtually


class Loads:
    """A core whose loads of the model m end by hand, and the ends of the requests that wait for it."""

    def __init__(self) -> None:
        self.core = InferenceCore([])
        self.core.loadable = frozenset({"m"})
        self.ends: list[asyncio.Future[None]] = []
        self.told: list[tuple[str, str | None]] = []  # request, and its error
        self.core.on_demand = LoadOnDemand(self.core, self._load, lambda work: asyncio.get_running_loop().create_task(work))

    async def _load(self, _: str) -> None:
        self.ends.append(asyncio.get_running_loop().create_future())
        await self.ends[-1]

    def ask(
        self, request: str, time_left_s: float | None = None, then: Callable[[], object] = lambda: None
    ) -> Callable[[], object] | None:
        def arrived(error: InferenceError | None) -> None:
            self.told.append((request, None if error is None else str(error)))
            then()

        return self.core.demand("m", time_left_s, arrived)

    def serve(self, *versions: int) -> None:
        models = [held_model(HeldBackend(), "m") for _ in versions]
        for model, version in zip(models, versions, strict=True):
            model.version = version
        self.core.replace("m", models)

    async def end(self, error: InferenceError | None = None) -> None:
        if error is None:
            self.ends[-1].set_result(None)
        else:
            self.ends[-1].set_exception(error)
        await asyncio.sleep(0.001)


def scene(act: Callable[[Loads], Coroutine[Any, Any, None]]) -> Loads:
    async def main(_: Callable[[], float]) -> Loads:
        loads = Loads()
        await act(loads)
        return loads

    return run_virtually(main)


def test_a_request_that_ends_another_ends_it_before_its_turn() -> None:
    async def act(loads: Loads) -> None:
        ends: list[Callable[[], object] | None] = []
        loads.ask("first", then=lambda: [end() for end in ends if end is not None])
        ends.append(loads.ask("second"))
        loads.ask("third")
        await asyncio.sleep(0)
        loads.serve(1)
        await loads.end()
        assert loads.told == [("first", None), ("third", None)]

    scene(act)


def test_a_request_for_a_version_that_is_still_loaded_waits_once_more() -> None:
    async def act(loads: Loads) -> None:
        loads.ask("old", then=lambda: None if len(loads.told) > 1 else loads.ask("old again"))
        await asyncio.sleep(0)
        loads.serve(2)  # the latest version comes first
        assert loads.told == [("old", None)]
        loads.serve(1, 2)
        await loads.end()
        assert loads.told == [("old", None), ("old again", None)]
        assert loads.ask("served") is None

    scene(act)


def test_a_load_that_fails_does_not_fail_requests_of_a_model_that_came_otherwise() -> None:
    async def act(loads: Loads) -> None:
        loads.ask("early")
        await asyncio.sleep(0)
        loads.serve(1)
        await loads.end(FailedPreconditionError("no"))
        loads.core.notify()
        assert loads.told == [("early", None)]
        loads.serve()
        assert loads.core.comes_on_demand("m")  # there is no pause

    scene(act)


def test_requests_whose_model_went_again_at_once_begin_another_load() -> None:
    async def act(loads: Loads) -> None:
        loads.ask("early")
        await asyncio.sleep(0)
        loads.serve(1)
        loads.serve()  # an unload request
        loads.ask("late", then=partial(loads.ask, "late again"))
        await loads.end()
        assert loads.told == [("early", None), ("late", None)]
        await asyncio.sleep(0)
        loads.serve(1)
        await loads.end()
        assert loads.told == [("early", None), ("late", None), ("late again", None)]

    scene(act)


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_drain_ends_waits_once_and_begins_none(is_gone: bool) -> None:
    async def act(loads: Loads) -> None:
        end = loads.ask("waiting")
        await asyncio.sleep(0)
        assert end is not None
        if is_gone:
            end()
        await loads.core.drain()
        with pytest.raises(UnavailableError, match="shutting down"):
            loads.ask("late")
        await loads.end(FailedPreconditionError("no"))
        end()
        assert [name for name, _ in loads.told] == ([] if is_gone else ["waiting"])

    scene(act)


def test_waits_end_with_their_time_and_the_load_goes_on() -> None:
    async def act(loads: Loads) -> None:
        loads.ask("deadline", 5)
        loads.ask("none")
        await asyncio.sleep(5.001)
        assert [(name, "time was up" in str(error)) for name, error in loads.told] == [("deadline", True)]
        await asyncio.sleep(WAIT_S)
        assert [name for name, _ in loads.told] == ["deadline", "none"]
        loads.ask("later")
        loads.serve(1)
        await loads.end()
        assert loads.told[-1] == ("later", None)
        assert len(loads.ends) == 1

    scene(act)


def test_pauses_double_unless_the_reason_passes() -> None:
    async def act(loads: Loads) -> None:
        pauses = []
        lack = UnavailableError("no room")
        for error in [*[FailedPreconditionError("no")] * 10, lack, lack]:
            loads.ask("one")
            await asyncio.sleep(0)
            await loads.end(error)
            with pytest.raises(UnavailableError, match="could not be loaded") as refused:
                loads.ask("at once")
            pauses.append(round(refused.value.retry_after_s or 0))
            await asyncio.sleep(pauses[-1])
        assert pauses == [1, 2, 4, 8, 16, 32, 64, 128, 256, LONGEST_PAUSE_S, 1, 1]

    scene(act)
