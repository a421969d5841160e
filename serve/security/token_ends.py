"""When the tokens of a file end, by the machine's clock.

A clock that was wrong and is put right does no lasting harm: nobody is locked out, or let in, for longer than it was wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from serve.security.expiry import DAY_S, ends_in
from serve.security.reminder import Reminder
from serve.security.token_file import Holder

SOON_S = 7 * DAY_S
MAX_NAMED = 10


class TokenEnds:
    """Looks at the clock, and warns of what ends soon."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        """No ends yet.

        Args:
            path: of the file, for the texts of warnings.
            clock: seconds since the epoch.
        """
        self._path = path
        self._clock = clock
        self._reminder = Reminder()
        self._ends: list[tuple[float, str]] = []
        self._over: set[str] = set()
        self._told: set[str] = set()  # since the last look, that they have ended

    def take(self, holders: Iterable[Holder]) -> None:
        """These are the holders now."""
        self._ends = sorted((holder.expires_s, holder.name) for holder in holders if holder.expires_s is not None)
        self.look()

    def is_over(self, holder: Holder) -> bool:
        """Whether a holder's token has expired."""
        if holder.expires_s is None or self._clock() < holder.expires_s:
            return False
        self._told.add(holder.name)
        return True

    def look(self) -> bool:
        """Warn of tokens that end soon, and tell whether others have ended than at the last look, or were told so since.

        Ended ones may hold again: by a clock that was put right, maybe between two looks.
        """
        now_s = self._clock()
        before, self._over = self._over, {name for end_s, name in self._ends if now_s >= end_s}
        told, self._told = self._told, set()
        soon = [(end_s, name) for end_s, name in self._ends if end_s - now_s < SOON_S]
        named = ", ".join(f"{name!r} {ends_in(end_s, now_s)}" for end_s, name in soon[:MAX_NAMED])
        more = f", and so with {len(soon) - MAX_NAMED} more" if len(soon) > MAX_NAMED else ""
        self._reminder.say(f"token file {self._path}: {named}{more}; `halfserve token` makes others" if soon else "")
        return self._over != before or not told <= self._over
