"""Notice that files have changed."""

from __future__ import annotations

import asyncio
import contextlib
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

Look = tuple[tuple[int, int, int] | None, ...]


class FileWatch:
    """Looks at files now and then. What is still being written differs between two looks, and waits for the next.

    A pipe in a file's place has been read when it was read once: it does not change.
    """

    def __init__(self, paths: Sequence[Path], interval_s: float, changed: Callable[[bool], bool]) -> None:
        """A watch that takes the files for known as they are now: make it before they are read.

        Args:
            paths: of the files; links are followed.
            interval_s: seconds between two looks.
            changed: is called on the event loop when files have changed and stayed as they are between two looks, with False.
                Where it says that they could not be taken, it is called again after each look, with True: what was in the way
                may have been no fault of theirs, or none that such a look shows.
        """
        self._paths = paths
        self._interval_s = interval_s
        self._changed = changed
        self._known = self._seen = _look(paths)
        self._taken = True
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look; on the event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    def close(self) -> None:
        """End that."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            before = self._seen
            with contextlib.suppress(RuntimeError):  # there are as many threads as may be: the next look is soon
                self._seen = await asyncio.to_thread(_look, self._paths)
            if self._seen != before:
                continue
            if self._seen != self._known:
                self._known = self._seen
                self._taken = self._changed(False)
            elif not self._taken:
                self._taken = self._changed(True)


def _look(paths: Sequence[Path]) -> Look:
    return tuple(map(_stamp, paths))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None  # a pipe, which whoever opens it again would wait at
    return status.st_mtime_ns, status.st_size, status.st_ino
