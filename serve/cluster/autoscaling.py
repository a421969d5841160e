"""How many members a cluster needs, by what their servers measure. Pure: all state goes in and comes out.

Members are added at once, in one step to what is needed. They are removed one by one, down to the most that was needed in the
last minutes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

CONFIRM_S = 2.0  # that models must compute too much, before members are added; queues and refusals need no proof
DRAIN_S = 5.0  # within which a queue that is too long shall be answered
GROWTH_S = 1.0  # over which the growth of a queue is measured; loads come in less often than decisions are asked for
REFUSED = 0.01  # share of requests: more is too much
HIDDEN = 4.0  # how many times the load that is seen the load may be that is refused or waits
BUCKETS = 10  # of the time that a decision to remove looks back on


@dataclass(frozen=True, kw_only=True)
class MemberLoad:
    """What one member has done lately.

    Attributes:
        busy: share of its compute slots' time in which models computed, 0 to 1.
        queue_s: mean time of a request in the queue, in seconds; of the busy model whose requests wait longest.
        refused: share of requests that it refused, 0 to 1.
    """

    busy: float = 0.0
    queue_s: float = 0.0
    refused: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ScalingOptions:
    """How a cluster scales.

    Attributes:
        least, most: members at any time.
        busy: share of time in which models shall compute, 0 to 1; what is above it is for bursts.
        queue_s: time in the queue that is acceptable, in seconds.
        look_back_s: a member is removed if it was not needed for so long.
        step_s: between two removals.
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
    """How many members there shall be.

    Args:
        loads: of the members that serve.
        target: how many there shall be so far; some may be starting.
        options: of the cluster.
        state: what the last call returned; empty at first. It is plain JSON.
        now: in seconds; grows from call to call.

    Returns:
        The number of members, and the state for the next call.
    """
    kept = dict(state)
    if not loads:
        return _bounded(target, options), kept
    queue_s = sum(load.queue_s for load in loads) / len(loads)
    refused = sum(load.refused for load in loads) / len(loads)
    busy = sum(load.busy for load in loads)
    # A queue that waits for something else than compute would not become shorter.
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
    """How many members would compute all the time for what clients send, refused and waiting requests included."""
    seen = 1 / max(1 - refused, 1 / HIDDEN)
    if is_late:
        # While a queue grows by g seconds per second, 1 + g times as much comes in as is answered.
        growth = (queue_s - state.get("queue_s", queue_s)) / max(now - state.get("at", now), GROWTH_S)
        seen += max(growth, 0.0) + queue_s / DRAIN_S
    return busy * min(seen, HIDDEN)


def _most_lately(needed: int, state: dict[str, Any], now: float, look_back_s: float) -> int:
    """The most that was needed in the time to look back on, kept as one number for each part of it."""
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
