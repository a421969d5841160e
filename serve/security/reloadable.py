"""What was read from files, and is read again while the server runs."""

from __future__ import annotations

import logging
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from serve.security.errors import SecurityError

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Reloadable(Generic[T]):
    """The latest content that could be used.

    Attributes:
        value: that content; the very same object until there is another.
        is_stale: what was read last could not be used, and the content is from before.
    """

    def __init__(self, read: Callable[[], T], kept: str, paths: Sequence[Path] = ()) -> None:
        """Read for the first time.

        Args:
            read: reads all of it, or raises SecurityError.
            kept: what a log line says that still holds when it cannot be read again.
            paths: of the files.

        Raises:
            SecurityError: it cannot be used.
        """
        self._read = read
        self._kept = kept
        self._paths = paths
        self.is_stale = False
        self._told = ""
        self.value = read()

    def reload(self, *, again: bool = False) -> bool:
        """Read again, and tell whether that changed anything. What cannot be used changes nothing, and is logged.

        Args:
            again: nobody has asked for it: what was logged the last time is not repeated.
        """
        try:
            _refuse_pipes(self._paths)
            value = self._read()
        except SecurityError as error:
            if not again or str(error) != self._told:
                logger.error("%s; %s", error, self._kept)  # noqa: TRY400  (the text says it all)
            self.is_stale, self._told = True, str(error)
            return False
        self.is_stale, self._told = False, ""
        if value == self.value:
            return False
        self.value = value
        return True


def _refuse_pipes(paths: Sequence[Path]) -> None:
    """To open a pipe again would wait for somebody who writes to it, and nobody may."""
    for path in paths:
        try:
            is_pipe = stat.S_ISFIFO(path.stat().st_mode)
        except OSError:
            continue  # to read it says what is wrong
        if is_pipe:
            raise SecurityError(f"{path} is a pipe, which is read once; expected a file where it is to be read again")
