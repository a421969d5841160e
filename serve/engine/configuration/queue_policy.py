"""What a configuration says about waiting: priorities, and how long each of them waits for its turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from protos.model_config_pb2 import ModelConfig, ModelQueuePolicy
from serve.engine.errors import ModelLoadError

MAX_LEVELS = 1000  # each has a line of its own in the queue


@dataclass(frozen=True, kw_only=True)
class LevelPolicy:
    """How requests of one priority wait.

    Attributes:
        timeout_s: after which they have waited too long; None never.
        delays: they are then put behind the others of their level; otherwise they are dropped.
        allow_override: a request may ask for a shorter timeout.
        max_waiting: of this priority at a time; None is as many as the model's queue holds.
    """

    timeout_s: float | None = None
    delays: bool = False
    allow_override: bool = True
    max_waiting: int | None = None


@dataclass(frozen=True, kw_only=True)
class Turn:
    """How one request waits.

    Attributes:
        level: 0 the most urgent.
        drop_after_s: seconds in the queue after which it is not computed any more; None never.
        delay_after_s: seconds in the queue after which it stands behind the others of its level; None never.
    """

    level: int
    drop_after_s: float | None
    delay_after_s: float | None


@dataclass(frozen=True, kw_only=True)
class QueuePolicy:
    """How a model's requests wait.

    Attributes:
        levels: priorities that requests may have: 1 to `levels` on the wire.
        default_level: of requests that do not say, from 0.
        default: for the levels that `by_level` leaves out.
        by_level: policies by level, from 0.
    """

    levels: int = 1
    default_level: int = 0
    default: LevelPolicy = LevelPolicy()
    by_level: Mapping[int, LevelPolicy] = field(default_factory=dict)

    @property
    def max_waiting_by_level(self) -> dict[int, int]:
        """The bounds of the levels that have one; the default policy's is for each level that has no policy of its own."""
        bounds = {level: self.by_level.get(level, self.default).max_waiting for level in range(self.levels)}
        return {level: bound for level, bound in bounds.items() if bound is not None}

    def turn(self, priority: int, timeout_s: float | None) -> Turn:
        """How a request waits that asks for this priority and timeout.

        Args:
            priority: 1 the most urgent; 0, or one that the model does not have, is its default (so it is in Triton).
            timeout_s: seconds; None for the model's own.
        """
        level = priority - 1 if 1 <= priority <= self.levels else self.default_level
        policy = self.by_level.get(level, self.default)
        asked = timeout_s if policy.allow_override else None
        timeouts = [timeout for timeout in (asked, policy.timeout_s) if timeout is not None]
        after_s = min(timeouts, default=None)
        return Turn(
            level=level,
            drop_after_s=None if policy.delays else after_s,
            delay_after_s=after_s if policy.delays else None,
        )


def queue_policy(config: ModelConfig) -> QueuePolicy:
    """What a model's configuration asks for.

    Raises:
        ModelLoadError: its priorities contradict each other, or are too many.
    """
    batching = config.dynamic_batching
    if batching.priority_levels > MAX_LEVELS:
        raise ModelLoadError(
            f"model {config.name!r}: priority_levels is {batching.priority_levels}, expected at most {MAX_LEVELS}"
        )
    levels = max(1, batching.priority_levels)
    default_level = batching.default_priority_level or levels
    strange = sorted(level for level in batching.priority_queue_policy if not 1 <= level <= levels)
    if default_level > levels or strange:
        what = f"priority_queue_policy has a level {strange[0]}" if strange else f"default_priority_level is {default_level}"
        raise ModelLoadError(f"model {config.name!r}: {what}, expected 1 to priority_levels, which is {levels}")
    return QueuePolicy(
        levels=levels,
        default_level=default_level - 1,
        default=_level(batching.default_queue_policy) if batching.HasField("default_queue_policy") else LevelPolicy(),
        by_level={level - 1: _level(policy) for level, policy in batching.priority_queue_policy.items()},
    )


def _level(policy: ModelQueuePolicy) -> LevelPolicy:
    return LevelPolicy(
        timeout_s=policy.default_timeout_microseconds / 1e6 or None,
        delays=policy.timeout_action == ModelQueuePolicy.DELAY,
        allow_override=policy.allow_timeout_override,
        max_waiting=policy.max_queue_size or None,
    )
