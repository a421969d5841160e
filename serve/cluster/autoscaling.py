"""How many members a cluster needs, by what their servers measure. Pure: all state goes in and comes out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MemberLoad:
    """What one member has done lately.

    Attributes:
        busy: share of its compute slots' time in which models computed, 0 to 1.
        queue_s: mean time of a request in the queue, in seconds.
        refused: share of requests that it refused, 0 to 1.
    """

    busy: float = 0.0
    queue_s: float = 0.0
    refused: float = 0.0
