"""Commands that all members have carried out, for members that join later: one file for each thing that can be commanded.

A command that replaces an earlier one replaces its file. An exclusive lock gives members their turns, which the system releases
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
RETRY_S = 0.01  # a thread that waits for the lock could not be stopped
BEGUN = "-begun"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One command.

    Attributes:
        name: of its file, in the order of the commands.
        path: of the method.
        request: serialized.
        is_begun: a member has ended before all others had done it.
    """

    name: str
    path: str
    request: bytes
    is_begun: bool = False


class Journal:
    def __init__(self, folder: Path) -> None:
        """The journal in this folder, which need not be there yet."""
        folder.mkdir(exist_ok=True)
        self._folder = folder

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Be the only member that commands, inside the context."""
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

    def begin(self, kind: str, name: str, path: str, request: bytes) -> Entry:
        """Keep a command that this member has carried out, and others have not.

        Args:
            kind: of the thing, without a dash.
            name: of the thing.
            path: of the method.
            request: serialized.
        """
        # One clock for all processes of a machine, which no correction turns back.
        entry = Entry(name=f"{time.monotonic_ns():020}-{_key(kind, name)}", path=path, request=request)
        hidden = self._folder / ".new"
        hidden.write_bytes(path.encode() + b"\n" + request)
        hidden.rename(self._folder / f"{entry.name}{BEGUN}")
        return entry

    def done(self, entry: Entry) -> None:
        """All have carried it out; it replaces what was kept of the same thing."""
        key = entry.name.partition("-")[2]
        for older in self._files():
            if older.name.partition("-")[2] == key:
                older.unlink(missing_ok=True)
        (self._folder / f"{entry.name}{BEGUN}").rename(self._folder / entry.name)

    def forget(self, kind: str, name: str = "") -> None:
        """Keep nothing of a thing any more; without a name, of none of its kind."""
        key = _key(kind, name) if name else f"{kind}-"
        for file in self._files():
            if file.name.partition("-")[2].startswith(key):
                file.unlink(missing_ok=True)

    def entries(self, known: Container[str] = ()) -> list[Entry]:
        """The commands in their order, but for those whose names are known."""
        found = []
        for file in self._files():
            name = file.name.removesuffix(BEGUN)
            if name not in known:
                path, _, request = file.read_bytes().partition(b"\n")
                found.append(Entry(name=name, path=path.decode(), request=request, is_begun=file.name != name))
        return found

    def _files(self) -> list[Path]:
        return sorted(file for file in self._folder.iterdir() if file.name[0].isdigit())


def _key(kind: str, name: str) -> str:
    return f"{kind}-{hashlib.sha256(name.encode()).hexdigest()[:32]}"
