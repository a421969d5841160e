from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from serve.observability.outbox import MOST, Outbox

WAIT_S = 20.0


def test_items_arrive_in_order_on_another_thread() -> None:
    got: list[int] = []
    threads: set[str] = set()
    all_there = threading.Event()

    def deliver(items: list[int]) -> None:
        got.extend(items)
        threads.add(threading.current_thread().name)
        if len(got) == 100:
            all_there.set()

    async def send() -> None:
        outbox = Outbox(deliver, name="parcels", every_s=0.001)
        for number in range(100):
            outbox.put(number)
            await asyncio.sleep(0)
        assert await asyncio.to_thread(all_there.wait, WAIT_S)
        assert outbox.dropped == 0
        outbox.close(WAIT_S)

    asyncio.run(send())
    assert got == list(range(100))
    assert threads == {"parcels"}


def test_what_does_not_fit_is_dropped_and_counted_and_nothing_waits() -> None:
    go_on = threading.Event()
    got: list[int] = []

    def deliver(items: list[int]) -> None:
        assert go_on.wait(WAIT_S)
        got.extend(items)

    async def send() -> int:
        outbox = Outbox(deliver, name="parcels", bound=10, every_s=0.001)
        for number in range(25):
            outbox.put(number)
        go_on.set()
        outbox.close(WAIT_S)
        outbox.put(99)
        return outbox.dropped

    assert asyncio.run(send()) == 16
    assert got == list(range(10))


def test_what_was_delivered_makes_room() -> None:
    delivered = threading.Semaphore(0)

    async def send() -> int:
        outbox: Outbox[int] = Outbox(lambda _: delivered.release(), name="parcels", bound=3, every_s=0.0001)
        for number in range(10):
            outbox.put(number)
            assert await asyncio.to_thread(delivered.acquire, timeout=WAIT_S)
        outbox.close(WAIT_S)
        return outbox.dropped

    assert asyncio.run(send()) == 0


def test_a_failing_delivery_is_told_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    failures = iter([True, True, False, True])
    got: list[str] = []
    delivered = threading.Semaphore(0)

    def deliver(items: list[str]) -> None:
        try:
            if next(failures):
                raise OSError(28, "No space left on device")
            got.extend(items)
        finally:
            delivered.release()

    async def send() -> int:
        outbox = Outbox(deliver, name="parcels", every_s=0.0001)
        for item in "abcd":
            outbox.put(item)
            assert await asyncio.to_thread(delivered.acquire, timeout=WAIT_S)
        outbox.close(WAIT_S)
        return outbox.dropped

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(send()) == 3
    assert got == ["c"]
    assert [record.getMessage() for record in caplog.records] == [
        "parcels: 1 lost: [Errno 28] No space left on device",
        "parcels: 1 lost: [Errno 28] No space left on device",
    ]


def test_what_was_kept_back_is_put_before_what_is_there_is_handed_over() -> None:
    got: list[int] = []
    kept = [1, 2, 3]

    async def send() -> None:
        outbox: Outbox[int] = Outbox(got.extend, name="parcels", every_s=0.001)
        filled = asyncio.Event()

        def fill() -> None:
            while kept:
                outbox.put(kept.pop(0))
            filled.set()

        outbox.fill = fill
        outbox.expect()
        await filled.wait()
        kept.append(4)
        outbox.close(WAIT_S)

    asyncio.run(asyncio.wait_for(send(), WAIT_S))
    assert got == [1, 2, 3, 4]


def test_many_items_do_not_wait_for_their_time() -> None:
    got: list[list[int]] = []
    arrived = threading.Event()

    def deliver(items: list[int]) -> None:
        got.append(items)
        arrived.set()

    async def send() -> None:
        outbox: Outbox[int] = Outbox(deliver, name="parcels", every_s=3600)
        for number in range(MOST + 1):
            outbox.put(number)
        assert await asyncio.to_thread(arrived.wait, WAIT_S)
        outbox.close(WAIT_S)

    asyncio.run(send())
    assert [len(items) for items in got] == [MOST, 1]


@pytest.mark.parametrize("error", [None, ImportError("not here")])
def test_the_thread_prepares_before_anything_comes(error: Exception | None) -> None:
    prepared = threading.Event()
    got: list[int] = []

    def prepare() -> None:
        prepared.set()
        if error is not None:
            raise error

    async def send() -> None:
        outbox: Outbox[int] = Outbox(got.extend, name="parcels", prepare=prepare)
        assert await asyncio.to_thread(prepared.wait, WAIT_S)
        outbox.put(1)
        outbox.close(WAIT_S)

    asyncio.run(send())
    assert got == [1]
