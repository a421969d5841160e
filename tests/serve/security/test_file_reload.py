from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from halfserve.serve.protocol.rpc import Role
from halfserve.serve.security.file_reload import FileWatch, Reloadable, Reminder
from halfserve.serve.security.security import Security
from halfserve.serve.security.security_options import SecurityError, SecurityOptions
from halfserve.serve.security.tokens import new_token
from tests.serve.running_server import WAIT_S
from tests.serve.security.guarded import Certificates


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


class Source:
    """What would be in a file; None where it cannot be read."""

    def __init__(self, content: list[int] | None) -> None:
        self.content = content

    def read(self) -> list[int]:
        if self.content is None:
            raise SecurityError("the file is gone")
        return list(self.content)


def test_what_cannot_be_used_at_first_is_refused() -> None:
    with pytest.raises(SecurityError, match="the file is gone"):
        Reloadable(Source(None).read, "nothing")


def test_what_cannot_be_used_later_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    source = Source([1])
    file = Reloadable(source.read, "the old one holds")
    first = file.value
    assert not file.reload()
    assert file.value is first, "the same content is the same object"
    source.content = None
    assert not file.reload()
    assert [record.message for record in caplog.records] == ["the file is gone; the old one holds"]
    assert file.value is first
    source.content = [2]
    assert file.reload()
    assert file.value == [2]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no pipes with names")
@pytest.mark.parametrize("what", ["tokens", "key"])
def test_pipes_are_read_once(certificates: Certificates, tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture) -> None:
    tokens = tmp_path / "tokens.txt"
    tokens.write_text(new_token("alice", [Role.INFER])[1])
    path = {"tokens": tokens, "key": certificates.options.key}[what]
    content = path.read_bytes()
    path.unlink()
    os.mkfifo(path)
    with ThreadPoolExecutor(1) as elsewhere:
        elsewhere.submit(path.write_bytes, content)
        security = Security(SecurityOptions(tls=certificates.options, token_file=tokens), lambda _: None)
        # A server would stand still in its event loop, until somebody writes.
        again = threading.Thread(target=security.reload)
        again.start()
        again.join(WAIT_S)
        stood_still = again.is_alive()
        if stood_still:
            path.write_bytes(content)
    assert not stood_still
    (line,) = [record.message for record in caplog.records if str(path) in record.message]
    assert line.startswith(f"{path} is a pipe, which can be read only once; expected a regular file; ")


def test_an_error_is_logged_once_while_retries_fail(caplog: pytest.LogCaptureFixture) -> None:
    source = Source([1])
    file = Reloadable(source.read, "the old one holds")
    for content in (None, [2], None):
        source.content = content
        for _ in range(3):
            file.reload(again=True)
            assert file.is_stale == (content is None)
    file.reload()
    assert [record.message for record in caplog.records] == ["the file is gone; the old one holds"] * 3, "asked for, it is told"


def test_a_reminder_repeats_nothing_but_what_had_gone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    reminder = Reminder()
    for text in ("", "3 days", "3 days", "2 days", "", "2 days", "100 %s"):
        reminder.say(text)
    assert [record.message for record in caplog.records] == ["3 days", "2 days", "2 days", "100 %s"]
