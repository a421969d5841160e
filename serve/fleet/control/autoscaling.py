"""Load of servers, and the number of members that a cluster needs for it. Pure functions: state is passed in and out.

Members are added at once, in a single step up to the number needed. They are removed one by one, down to the highest number
that was needed in the last minutes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from halfserve.serve.fleet.control.reports import NOTHING, ModelReport

LOAD_S = 2.0  # loads are averaged over at least this time
COMPUTES = 0.1  # share of all compute time; the queue of a model below this share is no reason to add members
CONFIRM_S = 2.0  # high compute load must last this long before members are added; queues and refusals act at once
DRAIN_S = 5.0  # time in which the added members are to work off an overlong queue
GROWTH_S = 1.0  # shortest interval over which queue growth is measured; loads arrive less often than decisions are requested
REFUSED = 0.01  # acceptable share of refused requests
HIDDEN = 4.0  # cap on offered load (refused and waiting requests included), as a multiple of the observed load
BUCKETS = 10  # intervals that `look_back_s` is divided into


@dataclass(frozen=True, kw_only=True)
class MemberLoad:
    """Recent load of one member.

    Attributes:
        busy: fraction of its compute slots' time spent in models, 0 to 1.
        queue_s: mean queue time of a request, in seconds, of the busy model whose requests wait longest.
        refused: fraction of requests that it refused, 0 to 1.
    """

    busy: float = 0.0
    queue_s: float = 0.0
    refused: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ScalingOptions:
    """Limits and targets of autoscaling.

    Attributes:
        least, most: bounds on the number of members.
        busy: target fraction of time in which models compute, 0 to 1; the rest is headroom for bursts.
        queue_s: acceptable queue time, in seconds.
        look_back_s: a member is removed only after it was not needed for this many seconds.
        step_s: shortest time between two removals, in seconds.
    """

    least: int = 1
    most: int = 1
    busy: float = 0.7
    queue_s: float = 0.05
    look_back_s: float = 300.0
    step_s: float = 15.0


def wanted_members(
    loads: Collection[MemberLoad], target: int, options: ScalingOptions, state: Mapping[str, Any], now: float
) -> tuple[int, dict[str, Any]]:
    """Compute the number of members that the cluster needs, and the state for the next call, which consists of JSON values.

    Args:
        loads: load of each member that serves.
        target: number of members requested so far; some of them may still be starting.
        options: limits and targets of the cluster.
        state: state returned by the last call; empty for the first.
        now: monotonic time in seconds.
    """
    kept = dict(state)
    if not loads:
        return _bounded(target, options), kept
    queue_s = sum(load.queue_s for load in loads) / len(loads)
    refused = sum(load.refused for load in loads) / len(loads)
    busy = sum(load.busy for load in loads)
    # A queue that waits for something other than compute would not get shorter with more members.
    is_late = (queue_s > options.queue_s or refused > REFUSED) and busy > options.busy / 2 * len(loads)
    needed = math.ceil(_offered(busy, queue_s, refused, kept, now, is_late=is_late) / options.busy - 1e-9)
    if is_late:
        needed = max(needed, len(loads) + 1)
    if now - kept.get("at", now - GROWTH_S) >= GROWTH_S:
        kept["queue_s"], kept["at"] = queue_s, now
    needed = _bounded(needed, options)
    most_lately = _most_lately(needed, kept, now, options.look_back_s)
    risen_at = kept.pop("risen_at", now)
    if needed > target:
        if is_late or now - risen_at >= CONFIRM_S:
            return needed, kept
        kept["risen_at"] = risen_at
    elif most_lately < target and now - kept.get("fell_at", 0.0) >= options.step_s:
        kept["fell_at"] = now
        return _bounded(target - 1, options), kept
    return _bounded(target, options), kept


def _offered(busy: float, queue_s: float, refused: float, state: Mapping[str, Any], now: float, *, is_late: bool) -> float:
    """Return the number of fully busy members that the offered load would need, refused and waiting requests included."""
    seen = 1 / max(1 - refused, 1 / HIDDEN)
    if is_late:
        # While queue time grows by g seconds per second, requests arrive at 1 + g times the rate at which they are answered.
        growth = (queue_s - state.get("queue_s", queue_s)) / max(now - state.get("at", now), GROWTH_S)
        seen += max(growth, 0.0) + queue_s / DRAIN_S
    return busy * min(seen, HIDDEN)


def _most_lately(needed: int, state: dict[str, Any], now: float, look_back_s: float) -> int:
    """Highest number needed within the look-back time; the history keeps one number per bucket."""
    width = look_back_s / BUCKETS
    bucket = int(now / width) if width else 0
    peaks = [[start, most] for start, most in state.get("peaks", []) if bucket - BUCKETS <= start <= bucket]
    if peaks and peaks[-1][0] == bucket:
        peaks[-1][1] = max(peaks[-1][1], needed)
    else:
        peaks.append([bucket, needed])
    state["peaks"] = peaks
    return int(max(most for _, most in peaks))


def _bounded(count: int, options: ScalingOptions) -> int:
    return max(options.least, min(count, options.most))


@dataclass(frozen=True, kw_only=True)
class ModelLoad:
    """Recent load of a model, at one member or summed over several.

    Attributes:
        requests_s: requests answered per second.
        compute: average number of batches that compute concurrently.
    """

    requests_s: float = 0.0
    compute: float = 0.0

    def __add__(self, other: ModelLoad) -> ModelLoad:
        return ModelLoad(requests_s=self.requests_s + other.requests_s, compute=self.compute + other.compute)


class LoadMeter:
    """Computes loads of a member and of its models from its reports of the last LOAD_S seconds."""

    def __init__(self) -> None:
        self._reports: deque[tuple[float, int, Mapping[str, ModelReport]]] = deque()

    def take(self, models: Mapping[str, ModelReport], compute_slots: int, now_s: float) -> None:
        """Take in the member's models and compute slots, as read at `now_s` on a monotonic clock."""
        self._reports.append((now_s, compute_slots, models))
        while len(self._reports) > 2 and self._reports[1][0] <= now_s - LOAD_S:
            self._reports.popleft()

    @property
    def load(self) -> MemberLoad:
        """Load of the member."""
        if not self._reports:
            return MemberLoad()
        (then_s, _, then), (now_s, slots, now) = self._reports[0], self._reports[-1]
        spent_ns = (now_s - then_s) * 1e9 * max(1, slots)
        steps = [_step(then.get(name, NOTHING), one) for name, one in now.items()]
        requests = sum(step.requests for step in steps)
        refusals = sum(step.refusals for step in steps)
        compute_ns = sum(step.compute_ns for step in steps)
        queues_s = [
            step.queue_ns / 1e9 / step.requests for step in steps if step.requests and step.compute_ns >= COMPUTES * compute_ns
        ]
        return MemberLoad(
            busy=compute_ns / spent_ns if spent_ns else 0.0,
            queue_s=max(queues_s, default=0.0),
            refused=refusals / (requests + refusals) if refusals else 0.0,
        )

    def model_load(self, name: str) -> ModelLoad:
        """Load of one of its models."""
        (then_s, _, then), (now_s, _, now) = self._reports[0], self._reports[-1]
        if now_s == then_s:
            return ModelLoad()
        step = _step(then.get(name, NOTHING), now.get(name, NOTHING))
        return ModelLoad(requests_s=step.requests / (now_s - then_s), compute=step.compute_ns / 1e9 / (now_s - then_s))


def _step(before: ModelReport, after: ModelReport) -> ModelReport:
    """Return the counts between two reports; those of versions that were replaced meanwhile begin at 0 again."""
    if after.requests < before.requests or after.compute_ns < before.compute_ns:
        return after
    return ModelReport(
        requests=after.requests - before.requests,
        refusals=max(0, after.refusals - before.refusals),
        queue_ns=max(0, after.queue_ns - before.queue_ns),
        compute_ns=after.compute_ns - before.compute_ns,
    )
