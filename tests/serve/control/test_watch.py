"""What counts as a change, and when it is acted on."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from serve.control.fingerprint import fingerprint
from serve.control.loader_thread import LoaderThread
from serve.control.watch import RepositoryWatch
from serve.engine.errors import ModelLoadError


def test_a_fingerprint_sees_what_an_upload_may_hold_and_goes_round_no_circles(tmp_path: Path) -> None:
    (tmp_path / "1" / "fp32" / "weights" / "deeper").mkdir(parents=True)
    (tmp_path / "1" / "fp32" / "weights" / "0.bin").write_bytes(b"a")
    (tmp_path / "1" / "fp32" / "weights" / "deeper" / "0.bin").write_bytes(b"a")
    assert [entry[0] for entry in fingerprint(tmp_path)] == ["1/fp32/weights/0.bin"]
    for link in "abc":
        (tmp_path / link).symlink_to(tmp_path)
    assert len(fingerprint(tmp_path)) == 1


def test_a_fingerprint_sees_what_is_written_and_not_what_is_hidden(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.onnx").write_bytes(b"a")
    first = fingerprint(tmp_path)
    assert [entry[0] for entry in first] == ["1/model.onnx"]
    (tmp_path / ".config.tmp").write_bytes(b"half")
    (tmp_path / "1" / ".model.onnx.tmp").write_bytes(b"half")
    assert fingerprint(tmp_path) == first
    (tmp_path / "1" / "model.onnx").write_bytes(b"ab")
    second = fingerprint(tmp_path)
    assert second != first
    (tmp_path / "other").write_bytes(b"ab")
    (tmp_path / "other").rename(tmp_path / "1" / "model.onnx")
    assert fingerprint(tmp_path) != second
    assert fingerprint(tmp_path / "1" / "model.onnx") == tuple(("model.onnx", *e[1:]) for e in fingerprint(tmp_path))
    assert fingerprint(tmp_path / "absent") == ()


def test_a_fingerprint_sees_what_is_written_with_the_time_and_the_size_of_before(tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    model.write_bytes(b"a")
    os.utime(model, (1, 1))
    first, written = fingerprint(tmp_path), model.stat().st_ctime_ns
    while model.stat().st_ctime_ns == written:  # the system's clock for files has steps of some milliseconds
        model.write_bytes(b"b")
        os.utime(model, (1, 1))  # as `cp -p` does
    assert fingerprint(tmp_path) != first


def test_a_link_that_leads_to_itself_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"a")
    (tmp_path / "loop").symlink_to("loop")
    assert [entry[0] for entry in fingerprint(tmp_path)] == ["model.onnx"]


def test_the_watch_outlives_what_nobody_foresaw(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "1").mkdir(parents=True)
    followed: list[str] = []
    looks = 0

    class Fails(LoaderThread):
        """The second and the third look go wrong."""

        async def run(self, function: Callable[..., object], *arguments: object) -> object:  # type: ignore[override]  # (as is)
            nonlocal looks
            looks += 1
            if looks in {2, 3}:
                raise ZeroDivisionError("nobody foresaw this")
            return function(*arguments)

    async def work() -> None:
        done = asyncio.Event()
        watch = RepositoryWatch(tmp_path, Fails(), interval_s=0, settle_s=0)
        await watch.remember()
        for name in ("a", "b"):
            (tmp_path / name / "1" / "model.onnx").write_bytes(b"new")

        async def follow(name: str, there: bool) -> None:
            followed.append(name)
            if name == "a":
                raise ZeroDivisionError("nor this")
            done.set()

        watching = asyncio.create_task(watch.run(follow))
        await asyncio.wait_for(done.wait(), 20)
        watching.cancel()

    asyncio.run(work())
    assert followed == ["a", "b"]
    assert caplog.messages == [
        f"{tmp_path}: cannot be looked at; what is loaded goes on serving",
        "a: a change could not be followed; it is tried again when the files change",
    ]


def test_files_that_are_still_being_written_wait(tmp_path: Path) -> None:
    file = tmp_path / "mlp" / "1" / "model.onnx"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"")
    looks = 0
    followed: list[tuple[str, bool, int]] = []

    class WritesMeanwhile(LoaderThread):
        """Before each of the first five looks, a writer gets on with its file."""

        async def run(self, function: Callable[..., object], *arguments: object) -> object:  # type: ignore[override]  # (as is)
            nonlocal looks
            looks += 1
            if 1 < looks <= 5:
                file.write_bytes(b"x" * looks)
            return function(*arguments)

    async def work() -> None:
        done = asyncio.Event()
        watch = RepositoryWatch(tmp_path, WritesMeanwhile(), interval_s=0, settle_s=0)
        await watch.remember()

        async def follow(name: str, there: bool) -> None:
            followed.append((name, there, file.stat().st_size))
            done.set()

        watching = asyncio.create_task(watch.run(follow))
        await asyncio.wait_for(done.wait(), 20)
        watching.cancel()

    asyncio.run(work())
    assert followed == [("mlp", True, 5)]


def test_what_a_thread_raises_reaches_who_waits() -> None:
    def fail() -> None:
        raise ModelLoadError("no")

    async def work() -> int:
        thread = LoaderThread()
        with pytest.raises(ModelLoadError, match="no"):
            await thread.run(fail)
        given_up = asyncio.create_task(thread.run(lambda: 1))
        await asyncio.sleep(0)
        given_up.cancel()
        result = await thread.run(lambda: 3)
        thread.stop()
        return result

    assert asyncio.run(work()) == 3
