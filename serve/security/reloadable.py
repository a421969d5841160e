"""What was read from files, and is read again while the server runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from serve.security.errors import SecurityError

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Reloadable(Generic[T]):
    """The latest content that could be used.

    Attributes:
        value: that content; the very same object until there is another.
    """

    def __init__(self, read: Callable[[], T], kept: str) -> None:
        """Read for the first time.

        Args:
            read: reads all of it, or raises SecurityError.
            kept: what a log line says that still holds when it cannot be read again.

        Raises:
            SecurityError: it cannot be used.
        """
        self._read = read
        self._kept = kept
        self.value = read()

    def reload(self) -> bool:
        """Read again, and tell whether that changed anything. What cannot be used changes nothing, and is logged."""
        try:
            value = self._read()
        except SecurityError as error:
            logger.error("%s; %s", error, self._kept)  # noqa: TRY400  (the text says it all)
            return False
        if value == self.value:
            return False
        self.value = value
        return True
