"""Commands that all members have carried out, kept for members that join later: one file per target that commands can change.

A command that replaces an earlier one replaces its file. Members take turns by an exclusive lock, which the system releases
when a member ends.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import time
from collections.abc import AsyncIterator, Container
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

LOCK = "turn"
RETRY_S = 0.01  # polled, because a thread that blocks on the lock could not be cancelled
BEGUN = "-begun"


@dataclass(frozen=True, kw_only=True)
class JournalEntry:
    """One command.

    Attributes:
        name: name of its file, which sorts in the order of the commands.
        path: path of the method.
        request: serialized request.
        is_begun: a member began it and ended before all others had carried it out.
    """

    name: str
    path: str
    request: bytes
    is_begun: bool = False


class Journal:
    def __init__(self, folder: Path) -> None:
        """Use the journal in this folder, which need not exist yet."""
        folder.mkdir(exist_ok=True)
        self._folder = folder

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Hold the lock inside the context, so that no other member issues commands."""
        file = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    await asyncio.sleep(RETRY_S)
            yield
        finally:
            os.close(file)

    def begin(self, kind: str, name: str, path: str, request: bytes) -> JournalEntry:
        """Record a command that this member has carried out, but the others have not.

        Args:
            kind: kind of the target, without a dash.
            name: name of the target.
            path: path of the method.
            request: serialized request.
        """
        # The monotonic clock is shared by all processes of a machine, and never set back.
        entry = JournalEntry(name=f"{time.monotonic_ns():020}-{_key(kind, name)}", path=path, request=request)
        hidden = self._folder / ".new"
        hidden.write_bytes(path.encode() + b"\n" + request)
        hidden.rename(self._folder / f"{entry.name}{BEGUN}")
        return entry

    def done(self, entry: JournalEntry) -> None:
        """Mark a command as carried out by all members; it replaces earlier commands for the same target."""
        key = entry.name.partition("-")[2]
        for older in self._files():
            if older.name.partition("-")[2] == key:
                older.unlink(missing_ok=True)
        (self._folder / f"{entry.name}{BEGUN}").rename(self._folder / entry.name)

    def forget(self, kind: str, name: str = "") -> None:
        """Remove the commands for a target; without a name, those for all targets of its kind."""
        key = _key(kind, name) if name else f"{kind}-"
        for file in self._files():
            if file.name.partition("-")[2].startswith(key):
                file.unlink(missing_ok=True)

    def entries(self, known: Container[str] = ()) -> list[JournalEntry]:
        """The commands in order, except those whose names are known."""
        found = []
        for file in self._files():
            name = file.name.removesuffix(BEGUN)
            if name not in known:
                path, _, request = file.read_bytes().partition(b"\n")
                found.append(JournalEntry(name=name, path=path.decode(), request=request, is_begun=file.name != name))
        return found

    def _files(self) -> list[Path]:
        return sorted(file for file in self._folder.iterdir() if file.name[0].isdigit())


def _key(kind: str, name: str) -> str:
    return f"{kind}-{hashlib.sha256(name.encode()).hexdigest()[:32]}"
