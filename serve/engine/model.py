"""One served version of a model: its interface, its configuration, its batcher and its counters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from protos.model_config_pb2 import ModelConfig
from serve.engine.backend import Backend, ModelInterface
from serve.engine.batcher import Batcher
from serve.engine.configuration.own_parameters import own_parameter
from serve.engine.configuration.queue_policy import queue_policy
from serve.engine.figures.statistics import Statistics
from serve.engine.instances.instance import Instance
from serve.engine.instances.supervision import Supervision
from serve.engine.precision_guard.guard import PrecisionGuard
from serve.engine.queueing.batch_limits import BatchLimits
from serve.engine.queueing.joining import Joining
from serve.engine.tensors import TensorSpec


@dataclass(eq=False)
class Model:
    """A loaded model version.

    Attributes:
        name: unique in the server.
        version: a positive integer, as on disk.
        interface: as clients see it.
        config: completed.
        backends: the loaded copies.
        limits: the batching policy.
        labels: names of the classes of an output, by the output's name.
        path: the model file.
        guard: looks at what the model answers; None does not.
        reload: loads the copy of a number anew; None where that cannot be done.
        short_s: seconds that short batches take, by their rows, as far as that is known; see `ShortBatches`.
        joining: whether requests may share batches; None where there are no rows to share.
    """

    name: str
    version: int
    interface: ModelInterface
    config: ModelConfig
    backends: Sequence[Backend]
    limits: BatchLimits
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    path: Path | None = None
    guard: PrecisionGuard | None = None
    reload: Callable[[int], Backend] | None = None
    short_s: Mapping[int, float] = field(default_factory=dict)
    joining: Joining | None = None
    statistics: Statistics = field(default_factory=Statistics)

    def __post_init__(self) -> None:
        self.inputs: dict[str, TensorSpec] = {spec.name: spec for spec in self.interface.inputs}
        self.outputs: dict[str, TensorSpec] = {spec.name: spec for spec in self.interface.outputs}
        self.queue_policy = queue_policy(self.config)
        supervision = Supervision(
            label=f"{self.name}/{self.version}",
            guard=self.guard,
            padded_sizes=self.limits.padded_rows,
            joining=self.joining,
            reload=self.reload,
            max_compute_s=own_parameter(self.config, "halfserve.max_compute_s"),
            open_ended=self.interface.open_ended,
        )
        instances = [Instance(backend, number, supervision) for number, backend in enumerate(self.backends)]
        limits, statistics = self.limits, self.statistics
        steady = self.interface.is_steady(batched=self.max_batch_size > 0)
        self.batcher = Batcher(instances, limits, statistics, self.short_s, self.joining, is_steady=steady)

    @property
    def max_batch_size(self) -> int:
        """Rows one request may bring; 0 for a model without a batch dimension."""
        return self.config.max_batch_size

    @property
    def is_ready(self) -> bool:
        """Whether requests are likely to be answered: a copy is up, and the guard has nothing against it."""
        up = any(instance.is_up for instance in self.batcher.instances)
        return up and (self.guard is None or not self.guard.blocks_readiness)

    @property
    def provider(self) -> str:
        """Where it really computes."""
        return self.backends[0].provider

    @property
    def precision(self) -> str:
        """What it computes in."""
        return self.backends[0].precision
