from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import resource
import threading
from pathlib import Path

import pytest

from halfserve.serve.engine.errors import FailedPreconditionError
from halfserve.serve.observability.outbox import MOST, ArrayFile, LineFile, Outbox, check_writable
from tests.serve.running_server import WAIT_S


async def test_items_arrive_in_order_on_another_thread() -> None:
    got: list[int] = []
    threads: set[str] = set()
    all_there = threading.Event()

    def deliver(items: list[int]) -> None:
        got.extend(items)
        threads.add(threading.current_thread().name)
        if len(got) == 100:
            all_there.set()

    outbox = Outbox(deliver, name="parcels", every_s=0.001)
    for number in range(100):
        outbox.put(number)
        await asyncio.sleep(0)
    assert await asyncio.to_thread(all_there.wait, WAIT_S)
    assert outbox.dropped == 0
    outbox.close(WAIT_S)
    assert got == list(range(100))
    assert threads == {"parcels"}


async def test_what_does_not_fit_is_dropped_and_counted_and_nothing_waits() -> None:
    go_on = threading.Event()
    got: list[int] = []

    def deliver(items: list[int]) -> None:
        assert go_on.wait(WAIT_S)
        got.extend(items)

    outbox = Outbox(deliver, name="parcels", bound=10, every_s=0.001)
    for number in range(25):
        outbox.put(number)
    go_on.set()
    outbox.close(WAIT_S)
    outbox.put(99)
    assert outbox.dropped == 16
    assert got == list(range(10))


async def test_what_was_delivered_makes_room() -> None:
    delivered = threading.Semaphore(0)
    outbox: Outbox[int] = Outbox(lambda _: delivered.release(), name="parcels", bound=3, every_s=0.0001)
    for number in range(10):
        outbox.put(number)
        assert await asyncio.to_thread(delivered.acquire, timeout=WAIT_S)
    outbox.close(WAIT_S)
    assert outbox.dropped == 0


def test_a_failing_delivery_is_logged_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
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
        dropped = asyncio.run(send())
    assert dropped == 3
    assert got == ["c"]
    assert [record.getMessage() for record in caplog.records] == [
        "parcels: 1 lost: [Errno 28] No space left on device",
        "parcels: 1 lost: [Errno 28] No space left on device",
    ]


async def test_what_was_kept_back_is_put_before_what_is_there_is_handed_over() -> None:
    got: list[int] = []
    kept = [1, 2, 3]
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
    assert got == [1, 2, 3, 4]


async def test_many_items_do_not_wait_for_their_time() -> None:
    got: list[list[int]] = []
    arrived = threading.Event()

    def deliver(items: list[int]) -> None:
        got.append(items)
        arrived.set()

    outbox: Outbox[int] = Outbox(deliver, name="parcels", every_s=3600)
    for number in range(MOST + 1):
        outbox.put(number)
    assert await asyncio.to_thread(arrived.wait, WAIT_S)
    outbox.close(WAIT_S)
    assert [len(items) for items in got] == [MOST, 1]


@pytest.mark.parametrize("error", [None, ImportError("not here")])
async def test_the_thread_prepares_before_anything_comes(error: Exception | None) -> None:
    prepared = threading.Event()
    got: list[int] = []

    def prepare() -> None:
        prepared.set()
        if error is not None:
            raise error

    outbox: Outbox[int] = Outbox(got.extend, name="parcels", prepare=prepare)
    assert await asyncio.to_thread(prepared.wait, WAIT_S)
    outbox.put(1)
    outbox.close(WAIT_S)
    assert got == [1]


def test_lines_are_appended_to_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    path.write_text("old\n")
    file = LineFile(path)
    file.write(["one\n", "two\n"])
    file.write(["three\n"])
    file.close()
    file.write(["four\n"])
    file.close()
    assert path.read_text() == "old\none\ntwo\nthree\nfour\n"


def test_a_file_that_was_moved_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    file = LineFile(path)
    file.write(["one\n"])
    path.rename(tmp_path / "access.log.1")
    file.write(["two\n"])
    path.unlink()
    file.write(["three\n"])
    file.close()
    assert (tmp_path / "access.log.1").read_text() == "one\n"
    assert path.read_text() == "three\n"


def test_a_file_that_was_moved_away_is_let_go_of(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    file = LineFile(path)
    for number in range(3):
        file.write(["line\n"])
        file.write(["line\n"])
        path.rename(tmp_path / f"access.log.{number}")
    held = {link.resolve() for link in Path("/proc/self/fd").iterdir()}
    assert [number for number in range(3) if tmp_path / f"access.log.{number}" in held] == [2]
    file.close()


def test_without_a_path_lines_go_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    file = LineFile(None)
    file.write(["one\n"])
    file.close()
    assert capfd.readouterr().err == "one\n"


@pytest.mark.parametrize(
    ("place", "reason"),
    [("no/access.log", "/no is not a folder"), (".", "it is a folder, expected a file")],
    ids=["no-folder", "a-folder"],
)
def test_a_place_is_checked_before_the_first_line(tmp_path: Path, place: str, reason: str) -> None:
    check_writable(tmp_path / "access.log", "the access log")
    with pytest.raises(FailedPreconditionError) as refused:
        check_writable(tmp_path / place, "the access log")
    assert str(refused.value).startswith(f"the access log cannot be written to {tmp_path / place}: ")
    assert str(refused.value).endswith(f"{reason}; choose another file")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=re.escape("No such file or directory")):
        LineFile(tmp_path / "no" / "access.log").write(["one\n"])


def test_an_array_is_whole_after_each_write_and_replaces_an_older_one(tmp_path: Path) -> None:
    path = tmp_path / "array"
    path.write_text("older, and longer than what replaces it" * 9)
    file = ArrayFile(path)
    for number in range(1, 4):
        file.write([str(number), '"\u00e9"'])
        assert json.loads(path.read_text()) == [1, "\u00e9", 2, "\u00e9", 3, "\u00e9"][: 2 * number]
    path.rename(tmp_path / "moved")
    file.write(["4"])
    assert json.loads(path.read_text()) == [4]
    os.truncate(path, 0)
    file.write(["5"])
    file.close()
    assert json.loads(path.read_text()) == [5]
    assert len(json.loads((tmp_path / "moved").read_text())) == 6


def test_an_array_stays_as_it_is_where_a_write_finds_no_room(tmp_path: Path) -> None:
    file = ArrayFile(tmp_path / "array")
    file.write(["1"])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # bytes of a file
    try:
        with pytest.raises(OSError, match="File too large"):
            file.write([f'"{"x" * 8192}"'])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert json.loads((tmp_path / "array").read_text()) == [1]
    file.write(["2"])
    file.close()
    assert json.loads((tmp_path / "array").read_text()) == [1, 2]
