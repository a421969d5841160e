from __future__ import annotations

import asyncio
from pathlib import Path

from halfserve.serve.fleet.member.process_service import Journal


def kept(journal: Journal) -> list[tuple[str, bytes, bool]]:
    return [(entry.path, entry.request, entry.is_begun) for entry in journal.entries()]


def test_of_each_thing_the_latest_command_is_kept_models_first(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.done(journal.begin("trace", "a", "/trace", b"t"))  # it needs its model
    for name, path in (("a", "/load"), ("b", "/load"), ("a", "/unload")):
        journal.done(journal.begin("model", name, path, name.encode() + b"\n"))
    models = [("/load", b"b\n", False), ("/unload", b"a\n", False)]
    assert kept(Journal(tmp_path / "journal")) == [*models, ("/trace", b"t", False)]
    known = {entry.name for entry in journal.entries()}
    begun = journal.begin("model", "c", "/load", b"c")
    assert [(entry.name, entry.is_begun) for entry in journal.entries(known)] == [(begun.name, True)]


def test_commands_are_forgotten_for_one_target(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for kind, name in (("system", "a"), ("system", "b"), ("cuda", "a")):
        journal.done(journal.begin(kind, name, f"/{kind}/{name}", b""))
    journal.forget("system", "a")
    assert [path for path, _, _ in kept(journal)] == ["/system/b", "/cuda/a"]


async def test_members_command_in_turn(tmp_path: Path) -> None:
    done: list[str] = []

    async def command(name: str, journal: Journal) -> None:
        async with journal.turn("turn"):
            done.append(name)
            await asyncio.sleep(0)
            done.append(name)

    await asyncio.gather(*(command(name, Journal(tmp_path)) for name in "abc"))
    assert sorted(done) == list("aabbcc")
    assert done[::2] == done[1::2]


def test_a_file_that_vanishes_while_the_journal_is_read_is_left_out(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.done(journal.begin("model", "a", "/load", b"a"))
    (tmp_path / f"{1:020}-model-b").symlink_to(tmp_path / "gone")  # listed, and not there when it is read
    assert kept(journal) == [("/load", b"a", False)]
