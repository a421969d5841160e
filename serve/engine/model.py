"""A served model version, the interface of its schedulers, and the states that versions go through."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.protos.pictures import PicturePreparation
from halfserve.protos.triton_errors import TritonPhrase
from halfserve.serve.engine.backend import Backend, ModelInterface
from halfserve.serve.engine.batcher import Batcher
from halfserve.serve.engine.config.batching import queue_policy
from halfserve.serve.engine.config.model_config import NOT_DECLARED, DeclaredConfig
from halfserve.serve.engine.config.parameters import MEASURED, own_parameter
from halfserve.serve.engine.config.sequence_batching import SequencePlan
from halfserve.serve.engine.dispatch.short_batches import LoopOccupancy
from halfserve.serve.engine.errors import InvalidArgumentError
from halfserve.serve.engine.execution.batch_invariance import BatchInvariance
from halfserve.serve.engine.execution.instance import Instance
from halfserve.serve.engine.execution.runners import make_instance
from halfserve.serve.engine.execution.tensor_runner import Supervision
from halfserve.serve.engine.model_statistics import Statistics
from halfserve.serve.engine.padding.mixed_lengths import MixedLengths
from halfserve.serve.engine.padding.ragged import Ragged
from halfserve.serve.engine.precision_guard.guard import PrecisionGuard
from halfserve.serve.engine.queueing.compute_slots import ComputeSlots
from halfserve.serve.engine.queueing.pace import BatchLimits
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.tensors import TensorSpec


class Scheduler(Protocol):
    """Takes requests and gives each its answer. Used on the event loop only."""

    @property
    def is_idle(self) -> bool:
        """Whether it has answered every request that it took, and runs no sequence."""
        ...

    def submit(self, request: InferRequest) -> None:
        """Queue a request; its `done` is called later on this event loop, exactly once unless it is cancelled.

        Raises:
            InferenceError: the request is refused.
        """

    def cancel(self, request: InferRequest) -> None:
        """Drop a request whose client has gone: free its resources, and discard its answer."""

    async def drain(self) -> None:
        """Refuse new requests, finish the accepted ones, and stop."""


class Composition(Protocol):
    """The parts of a model without backends of its own: an ensemble."""

    @property
    def provider(self) -> str:
        """The execution providers of its parts, each once."""
        ...

    @property
    def precision(self) -> str:
        """The compute precisions of its parts, each once."""
        ...

    @property
    def models(self) -> frozenset[str]:
        """The names of the models of which it consists, at any depth."""
        ...

    @property
    def parts(self) -> Sequence[str]:
        """One line per part: its model, its provider and precision, and its certificate's verdict."""
        ...

    @property
    def is_decoupled(self) -> bool:
        """Whether one of its parts gives any number of responses to a request."""
        ...

    def labels_of(self, output: str) -> Sequence[str]:
        """Return the class names of an output, which are those of the part that computes it."""
        ...

    @property
    def fault(self) -> str:
        """Reason why no request can be answered now; "" if requests can be answered."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether requests are likely to be answered."""
        ...


class Holder(Protocol):
    """Sends requests to models on behalf of its own requests."""

    async def released(self) -> None:
        """Wait until its accepted requests no longer need these models."""


class VersionState(StrEnum):
    """A version's state, in Triton's words."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(frozen=True, kw_only=True)
class VersionStatus:
    """One line of the repository index.

    Attributes:
        name: name of the model.
        version: number of the version; "" for a model without a version that could be served.
        state: current state.
        reason: reason of the state, unless the version is simply ready.
    """

    name: str
    version: str
    state: VersionState
    reason: str = ""


class VersionStates:
    """States of versions beyond the served ones: versions that are being loaded or unloaded, or were refused."""

    def __init__(self) -> None:
        self._by_name: dict[str, dict[str, VersionStatus]] = {}

    def of(self, name: str) -> dict[str, VersionStatus]:
        """Return the remembered states of one model, by version."""
        return self._by_name.get(name, {})

    def names(self) -> set[str]:
        """Return the models with remembered states."""
        return set(self._by_name)

    def set(self, name: str, version: int | str, state: VersionState, reason: str = "") -> None:
        number = str(version)
        status = VersionStatus(name=name, version=number, state=state, reason=reason)
        self._by_name.setdefault(name, {})[number] = status

    def clear(self, name: str, version: int | str, *states: VersionState) -> None:
        """Forget one version, if it is in one of these states."""
        known = self._by_name.get(name, {})
        status = known.get(str(version))
        if status is not None and status.state in states:
            del known[str(version)]
            if not known:
                del self._by_name[name]


def in_order(statuses: list[VersionStatus]) -> list[VersionStatus]:
    """Sort by name and version, with versions as numbers."""
    return sorted(statuses, key=lambda s: (s.name, int(s.version) if s.version.isdigit() else 0))


@dataclass(eq=False, kw_only=True)
class Model:
    """A model version: first loaded, then tried out, which may set `short_s` and `mixed`, then started, and served at last.

    Attributes:
        name: name that is unique in the server.
        version: positive integer, as on disk.
        interface: the interface that clients see.
        config: the completed configuration.
        declared: the configuration as written, with the path of its file.
        backends: the loaded copies.
        limits: the batching policy.
        labels: class names of an output, by the output's name.
        pictures: preparation of encoded pictures, by the name of the input that takes them.
        path: path of the model file.
        guard: checks the model's outputs; None checks nothing.
        reload: loads the copy of a number again; None if that is not possible.
        short_s: seconds that short batches take, by their rows, as far as measured; see `ShortBatches`.
        sequences: controls, states and slots of its sequences; None for a model without sequences.
        invariance: decides whether requests may share batches; None if there are no rows to share.
        mixed: chooses requests of different lengths for one batch, which are padded; None keeps them apart, and so does padding
            that is not proved.
        ragged: joins requests of different shapes, if the model takes them so; None for ordinary batches.
        batcher: runs batches on the copies; only a started model has one.
        batchers: the batcher alone, or one for each copy if each sequence stays with its copy.
        scheduler: takes the requests of a started model: the batcher, or a scheduler in front of it. Set before the first
            request.
        composition: steps and models of an ensemble, which has no backends; set like `scheduler`.
        holders: models whose requests in progress may need this one; it is not drained before they release it.
        size_bytes: memory that its copies take at least; 0 where that is unknown.
        loaded_ns: time at which it was started, after its trial, on time.monotonic_ns()'s clock.
    """

    name: str
    version: int
    interface: ModelInterface
    config: ModelConfig
    declared: DeclaredConfig = NOT_DECLARED
    backends: Sequence[Backend]
    limits: BatchLimits
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    pictures: Mapping[str, PicturePreparation] = field(default_factory=dict)
    path: Path | None = None
    guard: PrecisionGuard | None = None
    reload: Callable[[int], Backend] | None = None
    short_s: Mapping[int, float] = field(default_factory=dict)
    sequences: SequencePlan | None = None
    invariance: BatchInvariance | None = None
    mixed: MixedLengths | None = None
    ragged: Ragged | None = None
    statistics: Statistics = field(default_factory=Statistics)

    def __post_init__(self) -> None:
        self.inputs: dict[str, TensorSpec] = {spec.name: spec for spec in self.interface.inputs}
        self.outputs: dict[str, TensorSpec] = {spec.name: spec for spec in self.interface.outputs}
        self.queue_policy = queue_policy(self.config)
        self.composition: Composition | None = None
        self.holders: list[Holder] = []
        self.size_bytes = 0
        self.loaded_ns = 0
        self._decoupled: bool = self.config.model_transaction_policy.decoupled

    def start(self) -> Model:
        """Start the threads of the copies, and make the queue; returns itself. May be called on any thread; the model then
        belongs to the event loop.
        """
        supervision = Supervision(
            label=self.label,
            guard=self.guard,
            padded_sizes=self.limits.padded_rows,
            invariance=self.invariance,
            padding=None if self.mixed is None else self.mixed.padding,
            ragged=self.ragged,
            reload=self.reload,
            max_compute_s=own_parameter(self.config, "halfserve.max_compute_s"),
            open_ended=self.interface.open_ended,
        )
        instances = [make_instance(backend, number, supervision) for number, backend in enumerate(self.backends)]
        limits, statistics = self.limits, self.statistics
        steady = self.interface.is_steady(batched=self.max_batch_size > 0)
        lanes = 1 if self.sequences is None else self.sequences.lanes
        self.batchers = [
            Batcher(lane, limits, statistics, self.short_s, is_steady=steady, mixed=self.mixed)
            for lane in ([instances] if lanes == 1 else [[instance] for instance in instances])
        ]
        self.batcher = self.batchers[0]
        self.scheduler: Scheduler = self.batcher
        self.loaded_ns = time.monotonic_ns()
        return self

    def share_loop(self, occupancy: LoopOccupancy) -> None:
        """See `Batcher.share_loop`."""
        for batcher in self.batchers:
            batcher.share_loop(occupancy)

    def compete(self, slots: ComputeSlots) -> None:
        """See `Batcher.compete`."""
        for batcher in self.batchers:
            batcher.compete(slots)

    @property
    def instances(self) -> Sequence[Instance]:
        """All copies of a started model, in service or not."""
        return [instance for batcher in self.batchers for instance in batcher.instances]

    @property
    def waiting(self) -> int:
        """Number of requests that no copy computes yet."""
        return sum(batcher.waiting for batcher in self.batchers)

    @property
    def is_idle(self) -> bool:
        """Whether it has no requests and no sequences, and is not a step of a served ensemble."""
        return not self.holders and self.scheduler.is_idle

    @property
    def last_used_ns(self) -> int:
        """Time of its latest batch, or of its load before the first one, on time.monotonic_ns()'s clock."""
        latest = self.statistics.latest
        return self.loaded_ns if latest is None else max(self.loaded_ns, latest.split)

    @property
    def label(self) -> str:
        """The version as "name/version", for the log."""
        return f"{self.name}/{self.version}"

    @property
    def max_batch_size(self) -> int:
        """Most rows of one request; 0 for a model without a batch dimension."""
        return self.config.max_batch_size

    @property
    def is_decoupled(self) -> bool:
        """Whether the model may answer a request any number of times."""
        return self._decoupled if self.composition is None else self.composition.is_decoupled

    def rows_of(self, shapes: Mapping[str, tuple[int, ...]], where: str = "") -> int:
        """Return the batch size of a request from the shapes of its inputs by name; 1 for a model without a batch dimension.

        Raises:
            InvalidArgumentError: the inputs differ in it, or it is out of bounds; `where` begins the text.
        """
        if not self.max_batch_size:
            return 1
        sizes = {name: shape[0] for name, shape in shapes.items()}
        rows = next(iter(sizes.values()), 0)
        if any(size != rows for size in sizes.values()):
            other = next(name for name, size in sizes.items() if size != rows)
            text = f"{where}inputs have different batch sizes {sizes}, expected the same for all"
            raise InvalidArgumentError(text).like(TritonPhrase.BATCH_SIZES_DIFFER, input=other, model=self.name)
        if not 1 <= rows <= self.max_batch_size:
            raise InvalidArgumentError(
                f"{where}the batch size is {rows}, expected 1 to {self.max_batch_size}; split the request"
            ).like(TritonPhrase.BATCH_SIZE, most=self.max_batch_size, model=self.name)
        return rows

    def bucket(self, shapes: Mapping[str, tuple[int, ...]]) -> Hashable:
        """Return the bucket of a request: requests with equal buckets can share a batch.

        `shapes`: shapes of its inputs by name, as the model takes them, with the batch dimension if it has one.
        """
        # Without a batch dimension each request runs alone, and its latency depends on the whole shape.
        first = 1 if self.max_batch_size else 0
        if self.ragged is not None:
            return self.ragged.bucket({name: shapes[name][1:] for name in self.inputs})
        if len(shapes) < len(self.inputs):  # optional inputs are left out
            return tuple((name, shapes[name][first:]) for name in self.inputs if name in shapes)
        # The shapes are in the model's order, whatever order the request has.
        own = tuple(shapes[name][first:] for name in self.inputs)
        return own[0] if len(own) == 1 else own

    @property
    def is_ready(self) -> bool:
        """Whether requests are likely to be answered: a copy is up, and the guard does not block."""
        if self.composition is not None:
            return self.composition.is_ready
        up = any(instance.is_up for instance in self.instances)
        return up and (self.guard is None or not self.guard.blocks_readiness)

    async def says_ready(self) -> bool:
        """Return whether the model is ready, and every copy of it that is up says so itself."""
        if not self.is_ready:
            return False
        copies = [instance.recovery.runner for instance in self.instances if instance.is_up]
        return all(await asyncio.gather(*(copy.is_ready() for copy in copies)))

    @property
    def provider(self) -> str:
        """See `Backend.provider`, and `Composition.provider`."""
        return self.backends[0].provider if self.composition is None else self.composition.provider

    @property
    def precision(self) -> str:
        """See `Backend.precision`, and `Composition.precision`."""
        return self.backends[0].precision if self.composition is None else self.composition.precision

    @property
    def verdict(self) -> str:
        """The verdict of the checked certificate, "passed" or "failed"; "" without a certificate of its own."""
        key = "halfserve.certificate"
        return self.config.parameters[key].string_value if key in self.config.parameters else ""

    def labels_of(self, output: str) -> Sequence[str]:
        """Return the class names of an output; those of the step that computes it, if the model is composed and has none of its
        own.
        """
        if output in self.labels or self.composition is None:
            return self.labels.get(output, ())
        return self.composition.labels_of(output)

    @property
    def measured(self) -> str:
        """Speed of the model in each precision that was tried when it was loaded, in words; "" without a trial."""
        return self.config.parameters[MEASURED].string_value if MEASURED in self.config.parameters else ""

    @property
    def properties(self) -> dict[str, str]:
        """Provider, precision and measured speed of the model, for clients."""
        found = {"halfserve.provider": self.provider, "halfserve.precision": self.precision}
        return found | {MEASURED: measured} if (measured := self.measured) else found

    @property
    def fault(self) -> str:
        return "" if self.composition is None else self.composition.fault


def missing_inputs(text: str, model: Model, given: list[str], missing: list[str]) -> InvalidArgumentError:
    """Return the error of a request that leaves out required inputs, with Triton's text."""
    count, required = len(model.inputs), sum(not spec.optional for spec in model.inputs.values())
    phrase = TritonPhrase.INPUT_COUNT if required == count else TritonPhrase.INPUT_COUNT_BETWEEN
    facts = {"count": count, "required": required, "given": len(given), "names": given, "missing": missing}
    return InvalidArgumentError(text).like(phrase, model=model.name, **facts)


def unfit_shape(text: str, model: Model, spec: TensorSpec, shape: Iterable[int]) -> InvalidArgumentError:
    """Return the error of an input whose shape the model does not take, with Triton's text."""
    facts = {"input": spec.name, "expected": list(spec.shape), "given": list(shape)}
    return InvalidArgumentError(text).like(TritonPhrase.SHAPE, model=model.name, **facts)
