from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

from serve.control.loader_thread import LoaderThread
from serve.engine.pauses import pause

T = TypeVar("T")
linux = pytest.mark.skipif(sys.platform != "linux", reason="threads have scheduling policies on Linux")


def on_the_thread(function: Callable[[], T]) -> T:
    async def main() -> T:
        thread = LoaderThread()
        try:
            return await thread.run(function)
        finally:
            thread.stop()

    return asyncio.run(main())


@linux
def test_what_it_runs_gives_way() -> None:
    assert on_the_thread(lambda: os.sched_getscheduler(0)) == os.SCHED_BATCH


def test_what_a_function_raises_is_raised_and_the_thread_goes_on() -> None:
    def fail() -> None:
        raise KeyError("broken")

    async def main() -> int:
        thread = LoaderThread()
        try:
            with pytest.raises(KeyError, match="broken"):
                await thread.run(fail)
            return await thread.run(lambda: 7)
        finally:
            thread.stop()

    assert asyncio.run(main()) == 7


def test_functions_run_in_order_on_one_thread() -> None:
    async def main() -> tuple[list[int], set[int]]:
        thread, order, idents = LoaderThread(), list[int](), set[int]()

        def work(number: int) -> None:
            order.append(number)
            idents.add(threading.get_ident())

        try:
            await asyncio.gather(*(thread.run(work, number) for number in range(20)))
            return order, idents
        finally:
            thread.stop()

    order, idents = asyncio.run(main())
    assert order == list(range(20))
    assert len(idents) == 1
    assert threading.get_ident() not in idents


def test_work_pauses_once_there_are_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    rested: list[float] = []
    monkeypatch.setattr("time.sleep", rested.append)

    async def main() -> tuple[int, int]:
        thread = LoaderThread()
        try:
            await thread.run(pause)
            before = len(rested)
            thread.in_service = True
            await thread.run(pause)
            return before, len(rested)
        finally:
            thread.stop()

    assert asyncio.run(main()) == (0, 2), "in front of it and where it says"
