from __future__ import annotations

import asyncio
from pathlib import Path

from halfserve.serve.fleet.member.command_journal import Journal


def kept(journal: Journal) -> list[tuple[str, bytes, bool]]:
    return [(entry.path, entry.request, entry.is_begun) for entry in journal.entries()]


def test_of_each_thing_the_latest_command_is_kept_in_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    for name, path in (("a", "/load"), ("b", "/load"), ("a", "/unload")):
        journal.done(journal.begin("model", name, path, name.encode() + b"\n"))
    assert kept(Journal(tmp_path / "journal")) == [("/load", b"b\n", False), ("/unload", b"a\n", False)]
    known = {entry.name for entry in journal.entries()}
    begun = journal.begin("model", "c", "/load", b"c")
    assert [(entry.name, entry.is_begun) for entry in journal.entries(known)] == [(begun.name, True)]


def test_things_are_forgotten_one_by_one_or_all_of_a_kind(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for kind, name in (("system", "a"), ("system", "b"), ("cuda", "a")):
        journal.done(journal.begin(kind, name, f"/{kind}/{name}", b""))
    journal.forget("system", "a")
    assert [path for path, _, _ in kept(journal)] == ["/system/b", "/cuda/a"]
    journal.forget("system")
    assert [path for path, _, _ in kept(journal)] == ["/cuda/a"]


def test_members_command_in_turn(tmp_path: Path) -> None:
    done: list[str] = []

    async def command(name: str, journal: Journal) -> None:
        async with journal.turn():
            done.append(name)
            await asyncio.sleep(0)
            done.append(name)

    async def all_of_them() -> None:
        await asyncio.gather(*(command(name, Journal(tmp_path)) for name in "abc"))

    asyncio.run(all_of_them())
    assert sorted(done) == list("aabbcc")
    assert done[::2] == done[1::2]
