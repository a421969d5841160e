"""A loaded version on trial: the batches that it is run on, and the time that each trial may take."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from halfserve.protos.datatypes import BY_CONFIG
from halfserve.protos.model_config_pb2 import ModelWarmup
from halfserve.serve.engine.backend import Backend
from halfserve.serve.engine.config.model_config import DeclaredConfig
from halfserve.serve.engine.config.parameters import own_parameter
from halfserve.serve.engine.disk_files import read_regular
from halfserve.serve.engine.errors import InstanceLostError, ModelLoadError
from halfserve.serve.engine.execution.batch import run_batch
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.repository.model_repository import named_file
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.resource_limits import available_bytes
from halfserve.serve.engine.results import Answered, Failed
from halfserve.serve.engine.sequences.sequence_loading import first_step
from halfserve.serve.engine.tensors import ANY_SIZE, Array, Tensors, TensorSpec

logger = logging.getLogger(__name__)


MEMORY_SHARE = 0.25  # part of the available memory for inputs and outputs, because the model's own need is unknown
POINTER_BYTES = 8  # size of a text element in an array
WARM_UP_FOLDER = "warmup"  # folder beside the versions with the files that model_warmup names


@dataclass(frozen=True, kw_only=True)
class TrialBatch:
    """One batch to run.

    Attributes:
        what: description for messages.
        rows: size of the batch dimension; 1 for a model without one.
        inputs: arrays by name, in the shapes that clients use.
        times: number of runs.
        binding: whether a failure refuses the model; False if sizes had to be guessed.
        from_files: names of the inputs whose values are read from files, instead of zeros or random numbers of a given shape.
    """

    what: str
    rows: int
    inputs: Mapping[str, Array]
    times: int = 1
    binding: bool = True
    from_files: frozenset[str] = frozenset()

    def row_bytes(self, name: str) -> int:
        return self.inputs[name].nbytes // self.rows


class TriedVersion:
    """A loaded version, before it is started, on which trials run.

    Attributes:
        model: the version; trials that decide something about it set that there.
        budget_s: seconds that each trial may take.
        clock: returns the time in seconds.
        is_batched: whether the model has a batch dimension.
    """

    def __init__(self, model: Model, budget_s: float) -> None:
        self.model = model
        self.budget_s = budget_s
        self.clock = time.monotonic
        self.is_batched = model.max_batch_size > 0

    @property
    def is_off(self) -> bool:
        """Whether the configuration switches off trials that run the model."""
        return own_parameter(self.model.config, "halfserve.warm_up") is False

    def until(self) -> float:
        """Return the end of the time of a trial that begins now, in seconds of the clock."""
        return self.clock() + self.budget_s

    def warn(self, text: str, *values: object) -> None:
        """Log a warning about the version; `text` begins with "%s: " for its name."""
        logger.warning(text, self.model.label, *values, extra={"model": self.model.label})

    def run(self, backend: Backend, batch: TrialBatch) -> Answered | Failed:
        """Run one batch on a copy.

        Raises:
            ModelLoadError: the device was lost.
        """
        model = self.model
        try:
            (result,) = run_batch(backend, [self.request(batch)], invariance=model.invariance, ragged=model.ragged)
        except InstanceLostError as error:
            raise ModelLoadError(f"{model.path}: the device failed while it was tried out: {error}") from None
        return result

    def request(self, batch: TrialBatch) -> InferRequest:
        """Return a batch in the form that a backend takes; its answer is discarded."""
        model = self.model
        inputs: Tensors = {spec.name: spec.to_model(batch.inputs[spec.name]) for spec in model.interface.inputs}
        if model.sequences is not None:
            inputs = first_step(model.sequences, inputs, batch.rows)
        return InferRequest(
            inputs=inputs,
            outputs=tuple(spec.name for spec in model.interface.outputs),
            rows=batch.rows,
            bucket=None,
            deadline=None,
            done=lambda _: None,
        )

    @cached_property
    def declared(self) -> list[TrialBatch]:
        """The batches of the configuration's model_warmup, except those of `too_large_declared`.

        Raises:
            ModelLoadError: a batch contradicts the model's inputs, or a file cannot be read.
        """
        left_out = self.too_large_declared()
        return [self._declared(warm_up) for warm_up in self.model.config.model_warmup if warm_up not in left_out]

    def too_large_declared(self) -> list[ModelWarmup]:
        """Return the entries of model_warmup whose inputs alone would take more than MEMORY_SHARE of the available memory."""
        declared = self.model.config.model_warmup
        available = available_bytes() if declared else None
        if available is None:
            return []
        return [warm_up for warm_up in declared if _bytes(warm_up) > available * MEMORY_SHARE]

    def sized(self) -> Iterator[TrialBatch]:
        """Yield one batch of a single row, one of the largest size, and one of every preferred size, except `too_large` ones.

        They repeat the first row of the first declared batch. Without one, open sizes are 1 and so is every element, which is
        a valid index, length and divisor.
        """
        specs, like = self.model.interface.inputs, self._like
        guessed = like is None and any(ANY_SIZE in self._own_shape(spec) for spec in specs)
        left_out = self.too_large()
        for rows in self._sizes():
            if rows in left_out:
                continue
            inputs = {}
            for spec in specs:
                if like is None:
                    row = self._ones(spec)
                else:
                    row = like.inputs[spec.name][:1] if self.is_batched else like.inputs[spec.name]
                inputs[spec.name] = np.repeat(row, rows, axis=0) if self.is_batched else row
            what = f"a batch of {rows}" if self.is_batched else "a request"
            yield TrialBatch(what=what, rows=rows, inputs=inputs, binding=not guessed)

    def too_large(self) -> list[int]:
        """Return the numbers of rows whose inputs and outputs would take more than MEMORY_SHARE of the available memory."""
        available = available_bytes()
        if available is None:
            return []
        interface, like = self.model.interface, self._like
        given = sum(self._row_bytes(spec) if like is None else like.row_bytes(spec.name) for spec in interface.inputs)
        row_bytes = given + sum(self._row_bytes(spec) for spec in interface.outputs)
        return [rows for rows in self._sizes() if rows * row_bytes > available * MEMORY_SHARE]

    @property
    def _like(self) -> TrialBatch | None:
        """The batch whose rows those of every size repeat."""
        return self.declared[0] if self.declared else None

    def _sizes(self) -> list[int]:
        limits = self.model.limits
        return list(dict.fromkeys([1, *limits.targets, *limits.padded_rows])) if self.is_batched else [1]

    def _row_bytes(self, spec: TensorSpec) -> int:
        """Return the least bytes of a row; open sizes count as 1."""
        sizes = (1 if size == ANY_SIZE else size for size in self._own_shape(spec))
        return math.prod(sizes) * spec.datatype.array_dtype.itemsize

    def _own_shape(self, spec: TensorSpec) -> tuple[int, ...]:
        """Return the shape without the batch dimension."""
        return spec.shape[1:] if self.is_batched else spec.shape

    def _ones(self, spec: TensorSpec) -> Array:
        shape = tuple(1 if size == ANY_SIZE else size for size in self._own_shape(spec))
        return _filled(spec, (1, *shape) if self.is_batched else shape, 1)

    def _declared(self, warm_up: ModelWarmup) -> TrialBatch:
        model = self.model
        where = f"{model.declared.source}: model_warmup {warm_up.name!r}"
        rows, most = max(1, warm_up.batch_size), max(1, model.max_batch_size)
        if rows > most:
            raise ModelLoadError(f"{where} has batch_size {rows}, expected at most {most}")
        names = {spec.name for spec in model.interface.inputs}
        if set(warm_up.inputs) != names:
            given, expected = (", ".join(map(repr, sorted(which))) for which in (warm_up.inputs, names))
            raise ModelLoadError(f"{where} has inputs {given or 'of no name'}, expected {expected}")
        inputs = {}
        for spec in model.interface.inputs:
            row = self._row(spec, warm_up.inputs[spec.name], f"{where} input {spec.name!r}")
            inputs[spec.name] = np.repeat(row[None], rows, axis=0) if self.is_batched else row
        from_files = frozenset(name for name, given in warm_up.inputs.items() if given.HasField("input_data_file"))
        what, times = f"model_warmup {warm_up.name!r}", max(1, warm_up.count)
        return TrialBatch(what=what, rows=rows, inputs=inputs, times=times, from_files=from_files)

    def _row(self, spec: TensorSpec, given: Any, where: str) -> Array:
        """Return the data of one row of an input, without the batch dimension."""
        shape = tuple(given.dims)
        mismatch = spec.mismatch((1, *shape) if self.is_batched else shape)
        if mismatch is not None:
            raise ModelLoadError(f"{where} {mismatch}")
        if given.data_type != spec.datatype.config:
            raise ModelLoadError(f"{where} has another data_type than the model, which takes {spec.datatype.config_name}")
        match given.WhichOneof("input_data_type"):
            case "zero_data":
                return _filled(spec, shape, 0)
            case "random_data":
                return _random(spec, shape)
            case "input_data_file":
                return _from_file(spec, shape, self.model.declared, given.input_data_file, where)
            case _:
                raise ModelLoadError(f"{where} has no data, expected zero_data, random_data or input_data_file")


def _bytes(warm_up: ModelWarmup) -> int:
    rows = max(1, warm_up.batch_size)
    elements = [(math.prod(max(0, size) for size in one.dims), BY_CONFIG.get(one.data_type)) for one in warm_up.inputs.values()]
    return rows * sum(count * ((datatype and datatype.itemsize) or POINTER_BYTES) for count, datatype in elements)


def _filled(spec: TensorSpec, shape: tuple[int, ...], value: int) -> Array:
    dtype = spec.datatype.array_dtype
    if dtype.hasobject:
        return np.full(shape, b"1" if value else b"", object)
    return np.full(shape, value, dtype)


def _random(spec: TensorSpec, shape: tuple[int, ...]) -> Array:
    dtype, random = spec.datatype.array_dtype, np.random.default_rng(0)
    if dtype.hasobject:
        return _filled(spec, shape, 1)
    if dtype.kind in "iub":
        return random.integers(0, 2, shape).astype(dtype)
    return random.standard_normal(shape).astype(dtype)


def _from_file(spec: TensorSpec, shape: tuple[int, ...], declared: DeclaredConfig, name: str, where: str) -> Array:
    dtype = spec.datatype.array_dtype
    path = named_file(declared, name, f"{where} has input_data_file", folder=WARM_UP_FOLDER)
    if dtype.hasobject:
        raise ModelLoadError(f"{where} is of type {spec.datatype.wire}, which is not read from files; use random_data")
    try:
        data = read_regular(path)
    except OSError as error:
        raise ModelLoadError(f"{where}: cannot read {WARM_UP_FOLDER}/{name}: {error.strerror}") from None
    expected = math.prod(shape) * dtype.itemsize
    if len(data) != expected:
        raise ModelLoadError(f"{where}: {WARM_UP_FOLDER}/{name} has {len(data)} bytes, expected {expected} (one row)")
    return np.frombuffer(data, dtype).reshape(shape)
