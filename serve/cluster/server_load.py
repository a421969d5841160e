"""How busy a server is, from the sums that it reports."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from halfserve.protos.agent_pb2 import MemberState

LOAD_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Load:
    """How busy a server was in the last LOAD_S seconds.

    Attributes:
        computing: share of time in which models computed, of all that could compute at once.
        queue_s: mean seconds that a request waited for its batch; 0 without requests.
        refused: share of requests that were refused, as queues were full: 0 to 1.
    """

    computing: float = 0.0
    queue_s: float = 0.0
    refused: float = 0.0


@dataclass(frozen=True, kw_only=True)
class _Sums:
    at_s: float
    requests: int
    refusals: int
    queue_ns: int
    compute_ns: int


class LoadMeter:
    """Keeps the sums of the last LOAD_S seconds.

    Attributes:
        load: the present one.
    """

    def __init__(self) -> None:
        self.load = Load()
        self._sums: deque[_Sums] = deque()

    def take(self, state: MemberState, now_s: float) -> None:
        """Take a server's state; `now_s` on time.monotonic()'s clock."""
        models = state.models.values()
        now = _Sums(
            at_s=now_s,
            requests=sum(one.requests for one in models),
            refusals=sum(one.refusals for one in models),
            queue_ns=sum(one.queue_ns for one in models),
            compute_ns=sum(one.compute_ns for one in models),
        )
        self._sums.append(now)
        while len(self._sums) > 2 and self._sums[1].at_s <= now_s - LOAD_S:
            self._sums.popleft()
        then = self._sums[0]
        requests, refusals = now.requests - then.requests, now.refusals - then.refusals
        spent_ns = (now.at_s - then.at_s) * 1e9 * max(1, state.compute_slots)
        self.load = Load(
            computing=(now.compute_ns - then.compute_ns) / spent_ns if spent_ns else 0.0,
            queue_s=(now.queue_ns - then.queue_ns) / 1e9 / requests if requests else 0.0,
            refused=refusals / (requests + refusals) if refusals else 0.0,
        )
