"""How long to wait before a worker is started anew, and when to give up."""

from __future__ import annotations

FIRST_S, LONGEST_S = 0.1, 10.0
FORGET_AFTER_S = 60.0
GIVE_UP_AFTER = 5


class Backoff:
    """The first start anew comes at once, the next ones later and later, until a worker has served for a minute.

    Attributes:
        never_ready: how many workers in a row have ended before they were ready.
    """

    def __init__(self) -> None:
        self._wait_s = 0.0
        self.never_ready = 0

    @property
    def gives_up(self) -> bool:
        """Whether so many workers in a row never got ready that one more would be no use."""
        return self.never_ready >= GIVE_UP_AFTER

    def ended(self, served_s: float | None) -> float:
        """A worker has ended.

        Args:
            served_s: seconds for which it was ready; None if it never was.

        Returns:
            Seconds until the next one is to start.
        """
        self.never_ready = self.never_ready + 1 if served_s is None else 0
        if served_s is not None and served_s >= FORGET_AFTER_S:
            self._wait_s = 0.0
        wait_s = self._wait_s
        self._wait_s = min(max(FIRST_S, 2 * wait_s), LONGEST_S)
        return wait_s
