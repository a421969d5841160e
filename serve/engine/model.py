"""One served version of a model: its interface, its configuration, its batcher and its counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from protos.model_config_pb2 import ModelConfig
from serve.engine.backend import Backend, ModelInterface
from serve.engine.batch_queue import BatchLimits
from serve.engine.batcher import Batcher
from serve.engine.queue_policy import queue_policy
from serve.engine.statistics import Statistics
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
    """

    name: str
    version: int
    interface: ModelInterface
    config: ModelConfig
    backends: Sequence[Backend]
    limits: BatchLimits
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    statistics: Statistics = field(default_factory=Statistics)

    def __post_init__(self) -> None:
        self.inputs: dict[str, TensorSpec] = {spec.name: spec for spec in self.interface.inputs}
        self.outputs: dict[str, TensorSpec] = {spec.name: spec for spec in self.interface.outputs}
        self.queue_policy = queue_policy(self.config)
        self.batcher = Batcher(self.backends, self.limits, self.statistics)

    @property
    def max_batch_size(self) -> int:
        """Rows one request may bring; 0 for a model without a batch dimension."""
        return self.config.max_batch_size

    @property
    def provider(self) -> str:
        """Where it really computes."""
        return self.backends[0].provider

    @property
    def precision(self) -> str:
        """What it computes in."""
        return self.backends[0].precision
