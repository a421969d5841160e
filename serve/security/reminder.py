"""Warnings of what does not go away by itself."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


class Reminder:
    """Warns once, and again when there is something else to say."""

    def __init__(self) -> None:
        self._said = ""

    def say(self, text: str) -> None:
        """Warn, unless it was the last thing said; "" says nothing, and lets the same be said again."""
        if text and text != self._said:
            logger.warning("%s", text)
        self._said = text
