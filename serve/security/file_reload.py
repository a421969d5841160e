"""Files that are read again while the server runs, and warnings about what they hold."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from halfserve.serve.security.security_options import SecurityError

logger = logging.getLogger(__name__)
T = TypeVar("T")
Stamps = tuple[tuple[int, int, int] | None, ...]
DAY_S = 86_400


class Reloadable(Generic[T]):
    """The latest usable content of some files.

    Attributes:
        value: the parsed content; the same object until the content changes.
        is_stale: whether the last read failed, so that `value` is older than the files.
    """

    def __init__(self, read: Callable[[], T], kept: str, paths: Sequence[Path] = ()) -> None:
        """Read for the first time.

        `read` reads all `paths`, or raises SecurityError; `kept` says in the log what stays valid after a failed reload.

        Raises:
            SecurityError: the files cannot be used.
        """
        self._read = read
        self._kept = kept
        self._paths = paths
        self.is_stale = False
        self._logged = ""
        self.value = read()

    def reload(self, *, again: bool = False) -> bool:
        """Read the files again; returns whether the content has changed. Unusable files change nothing and are logged.

        `again` marks an automatic retry, which does not log the same error twice.
        """
        try:
            self._refuse_pipes()
            value = self._read()
        except SecurityError as error:
            if not again or str(error) != self._logged:
                logger.error("%s; %s", error, self._kept)  # noqa: TRY400  (the text says it all)
            self.is_stale, self._logged = True, str(error)
            return False
        self.is_stale, self._logged = False, ""
        if value == self.value:
            return False
        self.value = value
        return True

    def _refuse_pipes(self) -> None:
        """Raise for a pipe: opening it a second time would wait for a writer."""
        for path in self._paths:
            with contextlib.suppress(OSError):  # `read` reports a missing file
                if stat.S_ISFIFO(path.stat().st_mode):
                    raise SecurityError(f"{path} is a pipe, which can be read only once; expected a regular file")


class FileWatch:
    """Polls files for changes. A file that is still being written differs between two polls, and is read after a later one.

    A pipe in place of a file is read once and never changes.
    """

    def __init__(self, paths: Sequence[Path], interval_s: float, changed: Callable[[bool], bool]) -> None:
        """Take the files' present state as known: make the watch before the files are read. Links are followed.

        `changed` is called on the event loop after a change that was stable over two polls, with False. If it returns False, it
        is called again after each poll, with True: the cause of a failure may lie outside the files.
        """
        self._paths = paths
        self._interval_s = interval_s
        self._changed = changed
        self._known = self._seen = _stamps(paths)
        self._is_accepted = True
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            before = self._seen
            with contextlib.suppress(RuntimeError):  # no thread can be started now; the next poll tries again
                self._seen = await asyncio.to_thread(_stamps, self._paths)
            if self._seen != before:
                continue
            if self._seen != self._known:
                self._known = self._seen
                self._is_accepted = self._changed(False)
            elif not self._is_accepted:
                self._is_accepted = self._changed(True)


class ClockWatch:
    """Calls a function periodically: a timer set for a wall-clock time would miss it when the clock jumps."""

    def __init__(self, interval_s: float, look: Callable[[], None]) -> None:
        self._interval_s = interval_s
        self._look = look
        self._next: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._next = asyncio.get_running_loop().call_later(self._interval_s, self._tick)

    def close(self) -> None:
        if self._next is not None:
            self._next.cancel()

    def _tick(self) -> None:
        self.start()
        self._look()


class Reminder:
    """Logs a warning once, and again whenever its text changes."""

    def __init__(self) -> None:
        self._said = ""

    def say(self, text: str) -> None:
        """Warn, unless the last text was the same; "" logs nothing and resets."""
        if text and text != self._said:
            logger.warning("%s", text)
        self._said = text


def ends_in(end_s: float, now_s: float) -> str:
    """Return when something ends, for a warning: "expires in 3 days", in whole days so that the text changes once a day."""
    if end_s <= now_s:
        return "has expired"
    days = int((end_s - now_s) // DAY_S)
    return f"expires in {days} day{'s' if days > 1 else ''}" if days else "expires within a day"


def _stamps(paths: Sequence[Path]) -> Stamps:
    return tuple(map(_stamp, paths))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None  # a pipe: opening it again would wait for a writer
    return status.st_mtime_ns, status.st_size, status.st_ino
