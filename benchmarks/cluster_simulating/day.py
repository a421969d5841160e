"""A day's load on a cluster whose size a policy decides, in steps of half a second."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from halfserve.serve.fleet.control.autoscaling import LOAD_S, MemberLoad, ScalingOptions, wanted_members

STEP_S = 0.5
COMPUTE_S = 0.02  # compute time of one request
SLOTS = 2  # requests that one member computes concurrently
RATE = SLOTS / COMPUTE_S  # requests a second that a member can answer
DEADLINE_S = 0.1  # longest acceptable queue time of a request
BOUND_S = 1.0  # a longer queue refuses requests
START_S = 8.0  # start time of a member, including its models
MOST = 40


@dataclass(kw_only=True)
class Sight:
    """Inputs that a policy may use.

    Attributes:
        now: virtual time in seconds.
        serving: number of members that serve.
        target: number of members requested.
        load: mean load of a member, as members measure it.
        ongoing: exact number of requests in the cluster, computing or waiting.
    """

    now: float
    serving: int
    target: int
    load: MemberLoad
    ongoing: float


Policy = Callable[[Sight], int]


@dataclass(kw_only=True)
class Outcome:
    """Results of a day.

    Attributes:
        member_hours: hours of all members, including the time while they start.
        requests: number of requests.
        missed: number of requests that were refused, or waited longer than their deadline.
        changes: number of changes of the number of members.
        largest: largest number of members.
        rise_s: seconds from each burst's start to the last half second in which one percent of requests missed the deadline.
    """

    member_hours: float = 0.0
    requests: int = 0
    missed: float = 0.0
    changes: int = 0
    largest: int = 0
    rise_s: list[float] = field(default_factory=list)


def day(hours: float, seed: int) -> Iterator[float]:
    """Requests a second for each step: quiet at night, two bursts of ten minutes within seconds, and noise that lasts."""
    chance = random.Random(seed)  # noqa: S311  (no secret)
    steps, noise = round(hours * 3600 / STEP_S), 0.0
    for i in range(steps):
        part = i / steps
        noise = 0.98 * noise + chance.gauss(0, 0.02)
        base = 150 + 650 * max(0.0, math.sin(math.pi * (part - 0.25) / 0.6)) ** 2 * (0.25 < part < 0.85)
        burst = sum(1 / (1 + math.exp(-(i * STEP_S - start) / 1.0)) for start in bursts(hours) if 0 <= i * STEP_S - start < 600)
        yield max(0.0, base * (1 + noise) * (1 + 0.9 * min(burst, 1.0)))


def bursts(hours: float) -> tuple[float, float]:
    """Start times of the bursts, in seconds of the day: after a third of it, and near its end."""
    return hours * 3600 * 0.4, hours * 3600 * 0.9


def simulate(policy: Policy, *, hours: float = 24.0, seed: int = 1) -> Outcome:
    """Simulate a day. Members share the load evenly; a queue is answered in the order of arrival."""
    chance = random.Random(seed + 1)  # noqa: S311  (no secret)
    outcome, queue = Outcome(), 0.0
    starting, serving = deque[float](), 3
    window = deque[tuple[float, float, float, float]](maxlen=round(LOAD_S / STEP_S))
    rising = {start: start for start in bursts(hours)}
    for i, rate in enumerate(day(hours, seed)):
        now = i * STEP_S
        while starting and starting[0] <= now:
            starting.popleft()
            serving += 1
        came = max(0.0, chance.gauss(rate * STEP_S, math.sqrt(rate * STEP_S)))
        could = serving * RATE
        wait_s = queue / could
        taken = min(came, max(0.0, could * (BOUND_S + STEP_S) - queue))
        answered = min(queue + taken, could * STEP_S)
        queue += taken - answered
        late = _late_share(wait_s, came / STEP_S, serving)
        missed = came - taken + taken * late
        outcome.requests += round(came)
        outcome.missed += missed
        outcome.member_hours += (serving + len(starting)) * STEP_S / 3600
        outcome.largest = max(outcome.largest, serving + len(starting))
        for start in rising:
            if start <= now < start + 600 and missed > 0.01 * came:
                rising[start] = now
        window.append(
            (
                answered / (could * STEP_S),
                wait_s * answered + answered * _mean_wait(came / STEP_S, serving),
                answered,
                came - taken,
            )
        )
        answers, refusals = sum(one[2] for one in window), sum(one[3] for one in window)
        load = MemberLoad(
            busy=sum(one[0] for one in window) / len(window),
            queue_s=sum(one[1] for one in window) / answers if answers else 0.0,
            refused=refusals / (answers + refusals) if answers else 0.0,
        )
        target = serving + len(starting)
        ongoing = queue + answered / STEP_S * (COMPUTE_S + _mean_wait(came / STEP_S, serving))
        wanted = policy(Sight(now=now, serving=serving, target=target, load=load, ongoing=ongoing))
        if wanted != target:
            outcome.changes += 1
        for _ in range(wanted - target):
            starting.append(now + START_S)
        for _ in range(target - wanted):
            if starting:
                starting.pop()
            else:
                serving -= 1
    outcome.rise_s = [last - start for start, last in rising.items()]
    return outcome


def ours(busy: float = 0.7) -> Policy:
    """The policy of `halfserve cluster`, called once a second; `busy` is the target share of time in which models compute."""
    options = ScalingOptions(most=MOST, queue_s=DEADLINE_S / 2, busy=busy)
    state: dict[str, Any] = {}

    def decide(sight: Sight) -> int:
        nonlocal state
        if sight.now % 1.0:
            return sight.target
        wanted, state = wanted_members([sight.load] * sight.serving, sight.target, options, state, sight.now)
        return wanted

    return decide


def rays(target_ongoing: float = 2.0) -> Policy:
    """Ray Serve's default policy, with exact request counts instead of those that it would collect.

    `target_ongoing`: requests per replica.
    """
    from ray.serve import autoscaling_policy  # noqa: PLC0415  (the extra "ray")
    from ray.serve._private.common import DeploymentID  # noqa: PLC0415  (as above)
    from ray.serve.config import AutoscalingConfig, AutoscalingContext  # noqa: PLC0415  (as above)

    config = AutoscalingConfig(min_replicas=1, max_replicas=MOST, target_ongoing_requests=target_ongoing)
    seen = deque[float](maxlen=round(config.look_back_period_s / STEP_S))
    state: dict[str, Any] = {}

    def decide(sight: Sight) -> int:
        nonlocal state
        seen.append(sight.ongoing)
        context = AutoscalingContext(
            deployment_id=DeploymentID("simulated"),
            deployment_name="simulated",
            app_name=None,
            current_num_replicas=sight.serving,
            target_num_replicas=sight.target,
            running_replicas=[],
            total_num_requests=sum(seen) / len(seen),
            total_queued_requests=0.0,
            aggregated_metrics=None,
            raw_metrics=None,
            capacity_adjusted_min_replicas=1,
            capacity_adjusted_max_replicas=MOST,
            policy_state=state,
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=sight.now,
            config=config,
        )
        # Serve's wrapper around every policy, with the virtual clock instead of the wall clock.
        desired, _ = autoscaling_policy.default_autoscaling_policy(context)
        scaled = autoscaling_policy._apply_scaling_factors(desired, sight.serving, config)  # noqa: SLF001  (see above)
        wanted, state = autoscaling_policy._apply_delay_logic(max(0, scaled), sight.target, config, state, sight.now)  # noqa: SLF001  (see above)
        return max(1, min(int(wanted), MOST))

    return decide


def _mean_wait(rate: float, members: int) -> float:
    """Mean queue time due to random arrivals alone, by Sakasegawa's formula for M/D/c."""
    slots = members * SLOTS
    use = min(rate * COMPUTE_S / slots, 0.99)
    waits: float = use ** (math.sqrt(2 * (slots + 1)) - 1)
    return COMPUTE_S / 2 * waits / (slots * (1 - use))


def _late_share(wait_s: float, rate: float, members: int) -> float:
    """Share of requests that wait longer than their deadline, because of the queue ahead of them and of chance."""
    if wait_s > DEADLINE_S:
        return 1.0
    slots = members * SLOTS
    use = min(rate * COMPUTE_S / slots, 0.99)
    waits: float = use ** (math.sqrt(2 * (slots + 1)) - 1)
    return waits * math.exp(-2 * slots / COMPUTE_S * (1 - use) * (DEADLINE_S - wait_s))
