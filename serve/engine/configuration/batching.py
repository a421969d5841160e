"""The batching that a model's configuration asks for."""

from __future__ import annotations

from dataclasses import dataclass

from protos.model_config_pb2 import ModelConfig
from serve.engine.configuration.config import Defaults
from serve.engine.configuration.own_parameters import own_parameter
from serve.engine.configuration.queue_policy import queue_policy
from serve.engine.errors import ModelLoadError
from serve.engine.queueing.batch_limits import BatchLimits
from serve.engine.queueing.compute_slots import ComputeSlots


@dataclass(frozen=True, kw_only=True)
class BatchingOptions:
    """What holds for the batching of all models together.

    Attributes:
        compute_slots: batches computed at once on the CPU, over all models, handed out fairly (see `compute_slots`). 0 bounds
            nothing and leaves it to the operating system, which can interrupt a long batch for a short one; a bound helps
            where one model has more instances than another, or weighs more.
    """

    compute_slots: int = 0

    def slots(self) -> ComputeSlots | None:
        """The slots that the models share; None where nothing bounds them."""
        return ComputeSlots(self.compute_slots) if self.compute_slots else None


def batch_limits(config: ModelConfig, defaults: Defaults) -> BatchLimits:
    """The batching policy that a completed configuration asks for.

    Raises:
        ModelLoadError: its settings contradict each other.
    """
    dynamic, policy = config.dynamic_batching, queue_policy(config)
    bounds = policy.max_waiting_by_level
    if policy.levels == 1:  # its bound is the queue's own, and nobody need count
        max_waiting, bounds = bounds.get(0, defaults.max_queue_size), {}
    else:
        max_waiting = max(defaults.max_queue_size, sum(bounds.values()))
    target_ms = own_parameter(config, "halfserve.latency_target_ms", _source(config))
    weight = own_parameter(config, "halfserve.compute_weight", _source(config))
    return BatchLimits(
        max_rows=max(1, config.max_batch_size),
        max_delay_s=dynamic.max_queue_delay_microseconds / 1e6,
        preferred_rows=_preferred_rows(config),
        max_waiting=max_waiting,
        max_waiting_bytes=defaults.max_queue_mib * 2**20,
        levels=policy.levels,
        max_waiting_by_level=bounds,
        padded_rows=_padded_rows(config),
        latency_target_s=None if target_ms is None else target_ms / 1e3,
        compute_weight=1.0 if weight is None else weight,
    )


def _source(config: ModelConfig) -> str:
    return f"model {config.name!r}"


def _preferred_rows(config: ModelConfig) -> tuple[int, ...]:
    most = config.max_batch_size
    sizes = tuple(config.dynamic_batching.preferred_batch_size)
    strange = [size for size in sizes if not 1 <= size <= most]
    if strange:
        raise ModelLoadError(f"{_source(config)}: preferred_batch_size has {strange[0]}, expected 1 to max_batch_size, {most}")
    return sizes


def _padded_rows(config: ModelConfig) -> tuple[int, ...]:
    key = "halfserve.pad_to_preferred"
    if not own_parameter(config, key, _source(config)):
        return ()
    if not config.max_batch_size:
        raise ModelLoadError(f"{_source(config)}: {key} is on, but the model has no batch dimension to pad; remove it")
    sizes = sorted(set(config.dynamic_batching.preferred_batch_size))
    if not sizes:
        raise ModelLoadError(
            f"{_source(config)}: {key} is on, but there are no sizes to pad to; list them in dynamic_batching, such as "
            "preferred_batch_size: [1, 8, 32]"
        )
    return tuple(sizes)
