from __future__ import annotations

import logging

import pytest

from serve.security.errors import SecurityError
from serve.security.reloadable import Reloadable
from serve.security.reminder import Reminder


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


def test_a_reminder_repeats_nothing_but_what_had_gone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    reminder = Reminder()
    for text in ("", "3 days", "3 days", "2 days", "", "2 days", "100 %s"):
        reminder.say(text)
    assert [record.message for record in caplog.records] == ["3 days", "2 days", "2 days", "100 %s"]
