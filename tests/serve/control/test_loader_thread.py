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
from serve.engine.worker import Worker

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
    rested: list[int] = []  # which thread did; those of tests before may still do
    monkeypatch.setattr("time.sleep", lambda _: rested.append(threading.get_ident()))

    async def main() -> tuple[int, int]:
        thread = LoaderThread()
        try:
            ours = await thread.run(threading.get_ident)
            await thread.run(pause)
            before = rested.count(ours)
            thread.in_service = True
            await thread.run(pause)
            return before, rested.count(ours)
        finally:
            thread.stop()

    assert asyncio.run(main()) == (0, 2), "in front of it and where it says"


def test_what_hangs_is_left_behind_and_what_waited_is_done_by_another_thread() -> None:
    release, left = threading.Event(), threading.Event()

    def hang() -> str:
        assert release.wait(20)
        left.set()
        return "too late"

    async def main() -> tuple[list[int], str]:
        thread = LoaderThread()
        try:
            hanging = asyncio.ensure_future(thread.run(hang, limit_s=0.05))
            behind = [asyncio.ensure_future(thread.run(lambda n=n: n)) for n in range(3)]
            with pytest.raises(TimeoutError, match=r"not done within 0\.05 s"):
                await hanging
            done = await asyncio.gather(*behind)
            release.set()
            await asyncio.to_thread(left.wait, 20)
            return done, await thread.run(lambda: "next", limit_s=20)
        finally:
            release.set()
            thread.stop()

    assert asyncio.run(main()) == ([0, 1, 2], "next")


def test_what_hangs_is_given_up_in_time_though_no_thread_can_be_started_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    release, asked = threading.Event(), list[str]()

    class Scarce(Worker):
        def __init__(self, name: str) -> None:
            asked.append(name)
            if len(asked) < 3:
                raise RuntimeError("can't start new thread")
            super().__init__(name)

    async def main() -> int:
        thread = LoaderThread("slow")
        monkeypatch.setattr("serve.control.loader_thread.Worker", Scarce)
        monkeypatch.setattr("serve.control.loader_thread.AGAIN_S", 0.01)
        try:
            hanging = asyncio.ensure_future(thread.run(lambda: release.wait(20), limit_s=0.05))
            behind = asyncio.ensure_future(thread.run(lambda: 7))
            with pytest.raises(TimeoutError, match=r"not done within 0\.05 s"):
                await asyncio.wait_for(hanging, 10)
            return await asyncio.wait_for(behind, 10)
        finally:
            release.set()
            thread.stop()

    assert asyncio.run(main()) == 7
    assert asked == ["slow"] * 3


def test_the_limit_counts_from_its_beginning() -> None:
    async def main() -> list[str]:
        thread, first = LoaderThread(), threading.Event()
        try:
            waiting = asyncio.ensure_future(thread.run(lambda: first.wait(20) and "first"))
            limited = asyncio.ensure_future(thread.run(lambda: "second", limit_s=0.05))
            _, pending = await asyncio.wait([waiting, limited], timeout=0.2)
            assert len(pending) == 2
            first.set()
            return [str(done) for done in await asyncio.gather(waiting, limited)]
        finally:
            first.set()
            thread.stop()

    assert asyncio.run(main()) == ["first", "second"]
