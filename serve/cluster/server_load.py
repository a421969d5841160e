"""Load of a server, computed from the counters that it reports."""

from __future__ import annotations

from collections import deque

from halfserve.protos.agent_pb2 import MemberState, ModelState
from halfserve.serve.cluster.autoscaling import MemberLoad

LOAD_S = 2.0
COMPUTES = 0.1  # share of all compute time; the queue of a model below this share is no reason to add members


class LoadMeter:
    """Computes a server's load from its states of the last LOAD_S seconds.

    Attributes:
        load: current load.
    """

    def __init__(self) -> None:
        self.load = MemberLoad()
        self._states: deque[tuple[float, MemberState]] = deque()

    def take(self, state: MemberState, now_s: float) -> None:
        """Take in a server's state, read at `now_s` on time.monotonic()'s clock."""
        self._states.append((now_s, state))
        while len(self._states) > 2 and self._states[1][0] <= now_s - LOAD_S:
            self._states.popleft()
        then_s, then = self._states[0]
        spent_ns = (now_s - then_s) * 1e9 * max(1, state.compute_slots)
        pairs = [(one, then.models.get(name, ModelState())) for name, one in state.models.items()]
        requests = sum(now.requests - before.requests for now, before in pairs)
        refusals = sum(now.refusals - before.refusals for now, before in pairs)
        compute_ns = sum(now.compute_ns - before.compute_ns for now, before in pairs)
        queues_s = [
            (now.queue_ns - before.queue_ns) / 1e9 / (now.requests - before.requests)
            for now, before in pairs
            if now.requests > before.requests and now.compute_ns - before.compute_ns >= COMPUTES * compute_ns
        ]
        self.load = MemberLoad(
            busy=compute_ns / spent_ns if spent_ns else 0.0,
            queue_s=max(queues_s, default=0.0),
            refused=refusals / (requests + refusals) if refusals else 0.0,
        )
