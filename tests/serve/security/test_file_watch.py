from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serve.security.file_watch import FileWatch

WAIT_S = 20.0


def taking(change: Callable[[], None]) -> Callable[[bool], bool]:
    """For a watch: what has changed is told of, and taken."""

    def changed(_: bool) -> bool:
        change()
        return True

    return changed


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no pipes with names")
def test_a_pipe_does_not_change_and_files_beside_it_do(tmp_path: Path) -> None:
    pipe, file = tmp_path / "pipe", tmp_path / "file"
    os.mkfifo(pipe)
    file.touch()
    changes: list[str] = []

    async def watch() -> None:
        both_changed = asyncio.Event()
        watches = [
            FileWatch([pipe], 0.001, taking(lambda: changes.append("pipe"))),
            FileWatch([pipe, file], 0.001, taking(both_changed.set)),
        ]
        # Both ends are open here, so that nobody waits.
        end = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        os.write(end, b"token")
        os.utime(pipe, (1, 1))
        file.write_text("another")
        for one in watches:
            one.start()
        async with asyncio.timeout(WAIT_S):
            await both_changed.wait()
            both_changed.clear()
            file.write_text("and another one")  # so many looks later the first watch has looked more than once
            await both_changed.wait()
        for one in watches:
            one.close()
        os.close(end)

    asyncio.run(watch())
    assert changes == []


def test_what_could_not_be_taken_is_tried_again_until_it_is(tmp_path: Path) -> None:
    file, again = tmp_path / "file", list[bool]()
    file.touch()

    async def watch() -> None:
        taken, looked = asyncio.Event(), asyncio.Event()

        def changed(is_again: bool) -> bool:
            again.append(is_again)
            (taken if len(again) == 3 else looked).set()
            return len(again) >= 3

        one = FileWatch([file], 0.001, changed)
        one.start()
        file.write_text("another")
        async with asyncio.timeout(WAIT_S):
            await taken.wait()
            file.write_text("and another one")
            looked.clear()
            await looked.wait()
        one.close()

    asyncio.run(watch())
    assert again == [False, True, True, False], "and no more once it was taken"


def test_the_watch_outlives_a_look_for_which_no_thread_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, refused = tmp_path / "file", list[str]()
    file.touch()
    to_thread = asyncio.to_thread

    async def scarce(*arguments: Any) -> Any:
        if len(refused) < 2:
            refused.append("can't start new thread")
            raise RuntimeError(refused[0])
        return await to_thread(*arguments)

    async def watch() -> None:
        changed = asyncio.Event()
        monkeypatch.setattr(asyncio, "to_thread", scarce)
        one = FileWatch([file], 0.001, taking(changed.set))
        file.write_text("another")
        one.start()
        async with asyncio.timeout(WAIT_S):
            await changed.wait()
        one.close()

    asyncio.run(watch())
    assert len(refused) == 2
