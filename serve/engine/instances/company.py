"""Whether a model has the event loop to itself: then nobody else waits while it computes there."""

from __future__ import annotations

import math

ALONE_AFTER_S = 1.0  # since another model has computed


class Company:
    """The models that are served by one event loop."""

    __slots__ = ("_latest", "_since")

    def __init__(self) -> None:
        self._latest: int | None = None  # not the model itself: it must not be kept once it is unloaded
        self._since = -math.inf

    def is_alone(self, who: object, now: float) -> bool:
        """Note that `who` computes at `now` (seconds); whether nobody else has for a while."""
        if id(who) != self._latest:
            self._latest, self._since = id(who), now
        return now - self._since >= ALONE_AFTER_S
