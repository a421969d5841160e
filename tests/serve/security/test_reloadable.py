from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serve.security.errors import SecurityError
from serve.security.options import SecurityOptions
from serve.security.reloadable import Reloadable
from serve.security.reminder import Reminder
from serve.security.roles import Role
from serve.security.security import Security
from serve.security.token_file import new_token
from tests.serve.security.guarded import Certificates

WAIT_S = 10.0


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
    assert line.startswith(f"{path} is a pipe, which is read once; expected a file where it is to be read again; ")


def test_what_is_wrong_is_told_once_while_it_is_read_again_and_again(caplog: pytest.LogCaptureFixture) -> None:
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
