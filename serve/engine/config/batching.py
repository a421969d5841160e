"""The batching and queueing that a configuration asks for: limits, priorities, timeouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from halfserve.protos.model_config_pb2 import ModelConfig, ModelQueuePolicy
from halfserve.serve.engine.config.model_config import Defaults
from halfserve.serve.engine.config.parameters import PADDED_ROWS, own_parameter
from halfserve.serve.engine.config.sequence_batching import batching_of
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.queueing.pace import BatchLimits

FIRST_WITH_MIDDLE = 8  # from this power of two on, batches are also padded to the middle between it and the next


@dataclass(frozen=True, kw_only=True)
class LevelPolicy:
    """Queueing rules for requests of one priority.

    Attributes:
        timeout_s: the queue timeout in seconds; None for none.
        delays: whether requests go behind the others of their level after the timeout; otherwise they are dropped.
        allow_override: whether a request may ask for a shorter timeout.
        max_waiting: most requests of this priority in the queue; None applies only the queue's bound.
    """

    timeout_s: float | None = None
    delays: bool = False
    allow_override: bool = True
    max_waiting: int | None = None


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Queueing rules for one request.

    Attributes:
        level: priority level; 0 is the most urgent.
        drop_after_s: seconds in the queue after which it is dropped; None never.
        delay_after_s: seconds in the queue after which it goes behind the others of its level; None never.
    """

    level: int
    drop_after_s: float | None
    delay_after_s: float | None


@dataclass(frozen=True, kw_only=True)
class QueuePolicy:
    """Queueing rules for a model's requests.

    Attributes:
        levels: number of priorities, which are 1 to `levels` on the wire.
        default_level: level of requests without a priority, from 0.
        default: policy of levels that `by_level` leaves out.
        by_level: policies by level, from 0.
    """

    levels: int = 1
    default_level: int = 0
    default: LevelPolicy = LevelPolicy()
    by_level: Mapping[int, LevelPolicy] = field(default_factory=dict)

    @property
    def max_waiting_by_level(self) -> dict[int, int | None]:
        """The bounds of the levels with a policy of their own; each other level has the default policy's bound."""
        return {level: policy.max_waiting for level, policy in self.by_level.items()}

    @property
    def most_waiting(self) -> int:
        """The sum of all levels' bounds."""
        others = (self.default.max_waiting or 0) * (self.levels - len(self.by_level))
        return sum([policy.max_waiting or 0 for policy in self.by_level.values()], others)

    def turn(self, priority: int, timeout_s: float | None) -> Turn:
        """Return the queueing rules for a request with this priority and timeout.

        Args:
            priority: 1 is the most urgent; 0 and unknown priorities mean the model's default, as in Triton.
            timeout_s: timeout that the request asks for, in seconds; None for the model's own.
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
    """Read the queue policy of a model's configuration.

    Raises:
        ModelLoadError: its priorities contradict each other.
    """
    batching = config.dynamic_batching
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


def batch_limits(config: ModelConfig, defaults: Defaults) -> BatchLimits:
    """Read the batching policy of a completed configuration.

    Raises:
        ModelLoadError: its settings contradict each other.
    """
    dynamic, policy = config.dynamic_batching, queue_policy(config)
    is_one = policy.levels == 1  # with one level, its bound is that of the queue
    max_waiting = (
        (policy.most_waiting or defaults.max_queue_size) if is_one else max(defaults.max_queue_size, policy.most_waiting)
    )
    target_ms = own_parameter(config, "halfserve.latency_target_ms", _source(config))
    weight = own_parameter(config, "halfserve.compute_weight", _source(config))
    delay_us, preferred = dynamic.max_queue_delay_microseconds, tuple(dynamic.preferred_batch_size)
    if config.HasField("sequence_batching"):
        delay_us, preferred = batching_of(config)
    return BatchLimits(
        max_rows=max(1, config.max_batch_size),
        max_delay_s=delay_us / 1e6,
        preferred_rows=_preferred_rows(config, preferred),
        max_waiting=max_waiting,
        max_waiting_bytes=defaults.max_queue_mib * 2**20,
        levels=policy.levels,
        max_waiting_by_level={} if is_one else policy.max_waiting_by_level,
        max_waiting_of_others=None if is_one else policy.default.max_waiting,
        padded_rows=_padded_rows(config),
        latency_target_s=None if target_ms is None else target_ms / 1e3,
        compute_weight=1.0 if weight is None else weight,
    )


def _source(config: ModelConfig) -> str:
    return f"model {config.name!r}"


def _preferred_rows(config: ModelConfig, sizes: tuple[int, ...]) -> tuple[int, ...]:
    most = config.max_batch_size
    strange = [size for size in sizes if not 1 <= size <= most]
    if strange:
        raise ModelLoadError(f"{_source(config)}: preferred_batch_size has {strange[0]}, expected 1 to max_batch_size, {most}")
    return sizes


def _padded_rows(config: ModelConfig) -> tuple[int, ...]:
    if PADDED_ROWS in config.parameters:
        return tuple(map(int, config.parameters[PADDED_ROWS].string_value.split(",")))
    return declared_padded_rows(config) or ()


def few_sizes(config: ModelConfig) -> tuple[int, ...]:
    """Return the numbers of rows that batches are padded to where each further number of rows is expensive, in rising order.

    They are the configured ones; none if padding is off, or if there is nothing to pad. By default they are 1, 2, 4, 8, and
    from there on also the middle between two powers of two, such as 12 and 24: at most a third of such a batch is padding, and
    max_batch_size 128 needs 12 sizes. A batch below 8 rows hardly fills a device, so that its padding costs little.

    Raises:
        ModelLoadError: see `batch_limits`.
    """
    declared = declared_padded_rows(config)
    if declared is not None:
        return declared
    most = config.max_batch_size
    ragged = config.batch_input or any(entry.allow_ragged_batch for entry in config.input)
    if most <= 1 or ragged or config.HasField("sequence_batching"):
        return ()
    powers = [2**exponent for exponent in range(most.bit_length())]
    middles = [power + power // 2 for power in powers if power >= FIRST_WITH_MIDDLE]
    sizes = {*powers, *middles, *config.dynamic_batching.preferred_batch_size, most}
    return tuple(sorted(size for size in sizes if 1 <= size <= most))


def declared_padded_rows(config: ModelConfig) -> tuple[int, ...] | None:
    """Return the numbers of rows that a configuration has batches padded to; none if it turns padding off, None if it says
    nothing.

    Raises:
        ModelLoadError: padding is on, and there is nothing to pad or nothing to pad to.
    """
    key = "halfserve.pad_to_preferred"
    is_on = own_parameter(config, key, _source(config))
    if not is_on:
        return None if is_on is None else ()
    if not config.max_batch_size:
        raise ModelLoadError(f"{_source(config)}: {key} is on, but the model has no batch dimension to pad; remove it")
    sizes = sorted(set(config.dynamic_batching.preferred_batch_size))
    if not sizes:
        raise ModelLoadError(
            f"{_source(config)}: {key} is on, but there are no sizes to pad to; list them in dynamic_batching, such as "
            "preferred_batch_size: [1, 8, 32]"
        )
    return tuple(sizes)
