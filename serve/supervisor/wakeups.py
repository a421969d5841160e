"""Signals, as something that can be waited for together with files."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterable, Iterator, Sequence


class Wakeups:
    """Waits for signals and files, without asking again and again."""

    def __init__(self, read: int) -> None:
        self._read = read

    def wait(self, files: Sequence[int], timeout_s: float | None) -> tuple[list[signal.Signals], list[int]]:
        """The signals that have come and the files that can be read; both empty once the time is up.

        Args:
            files: descriptors.
            timeout_s: None waits for as long as it takes.
        """
        readable, _, _ = select.select([self._read, *files], [], [], timeout_s)
        came: list[signal.Signals] = []
        if self._read in readable:
            readable.remove(self._read)
            came = [signal.Signals(number) for number in os.read(self._read, 4096)]
        return came, readable


@contextlib.contextmanager
def wakeups(names: Iterable[signal.Signals]) -> Iterator[Wakeups]:
    """Catch these signals meanwhile; those that were blocked until now come then."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    # A signal whose number finds no room in the pipe is one of thousands that came and were not looked at: enough is there.
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    handlers = {name: signal.signal(name, _note) for name in names}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, handlers)
    try:
        yield Wakeups(read)
    finally:
        for name, handler in handlers.items():
            signal.signal(name, handler)
        signal.set_wakeup_fd(before)
        os.close(read)
        os.close(write)


def _note(number: int, frame: object) -> None:
    """Nothing: that there is a handler has the interpreter write the number to the pipe."""
