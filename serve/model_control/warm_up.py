"""Runs a model version before it serves, so that a model that cannot run is refused, and the first request is fast.

The runs are the batches that its configuration describes, and one batch of every size that the batcher will form.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from halfserve.protos.datatypes import BY_CONFIG
from halfserve.protos.model_config_pb2 import ModelWarmup
from halfserve.serve.engine.backend import CALLING_PROVIDERS, CPU_PROVIDERS, PYTHON, Backend
from halfserve.serve.engine.background_threads import pause
from halfserve.serve.engine.config.model_config import DeclaredConfig
from halfserve.serve.engine.config.parameters import own_parameter
from halfserve.serve.engine.disk_files import read_regular
from halfserve.serve.engine.dispatch.short_batches import LONE_S
from halfserve.serve.engine.errors import InstanceLostError, ModelLoadError
from halfserve.serve.engine.execution.batch import run_batch
from halfserve.serve.engine.repository.loaded_version import LoadedVersion
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
RUNS = 8


@dataclass(frozen=True, kw_only=True)
class WarmUpRequest:
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

    def to_model(self, version: LoadedVersion) -> InferRequest:
        """Return the request in the form that a backend takes; its answer is discarded."""
        interface = version.interface
        inputs: Tensors = {spec.name: spec.to_model(self.inputs[spec.name]) for spec in interface.inputs}
        if version.sequences is not None:
            inputs = first_step(version.sequences, inputs, self.rows)
        return InferRequest(
            inputs=inputs,
            outputs=tuple(spec.name for spec in interface.outputs),
            rows=self.rows,
            bucket=None,
            deadline=None,
            done=lambda _: None,
        )


def declared_requests(version: LoadedVersion) -> list[WarmUpRequest]:
    """Return the requests of the configuration's model_warmup, except those of `too_large_declared`.

    Raises:
        ModelLoadError: a request contradicts the model's inputs, or a file cannot be read.
    """
    left_out = too_large_declared(version)
    return [_declared(version, warm_up) for warm_up in version.config.model_warmup if warm_up not in left_out]


def too_large_declared(version: LoadedVersion) -> list[ModelWarmup]:
    """Return the entries of model_warmup whose inputs alone would take more than MEMORY_SHARE of the available memory."""
    available = available_bytes()
    if available is None:
        return []
    return [warm_up for warm_up in version.config.model_warmup if _bytes(warm_up) > available * MEMORY_SHARE]


def _bytes(warm_up: ModelWarmup) -> int:
    rows = max(1, warm_up.batch_size)
    elements = [(math.prod(max(0, size) for size in one.dims), BY_CONFIG.get(one.data_type)) for one in warm_up.inputs.values()]
    return rows * sum(count * ((datatype and datatype.itemsize) or POINTER_BYTES) for count, datatype in elements)


def sized_requests(version: LoadedVersion, like: WarmUpRequest | None) -> Iterator[WarmUpRequest]:
    """Yield one batch of a single row, one of the largest size, and one of every preferred size, except `too_large` ones.

    They repeat the first row of `like`, a request of the model's configuration. Without one, open sizes are 1 and so is every
    element, which is a valid index, length and divisor.
    """
    batched = version.config.max_batch_size > 0
    guessed = like is None and any(ANY_SIZE in _own_shape(spec, batched=batched) for spec in version.interface.inputs)
    left_out = too_large(version, like)
    for rows in _sizes(version):
        if rows in left_out:
            continue
        inputs = {}
        for spec in version.interface.inputs:
            if like is None:
                row = _ones(spec, batched=batched)
            else:
                row = like.inputs[spec.name][:1] if batched else like.inputs[spec.name]
            inputs[spec.name] = np.repeat(row, rows, axis=0) if batched else row
        yield WarmUpRequest(
            what=f"a batch of {rows}" if batched else "a request", rows=rows, inputs=inputs, binding=not guessed
        )


def too_large(version: LoadedVersion, like: WarmUpRequest | None) -> list[int]:
    """Return the batch sizes, in rows, whose inputs and outputs would take more than MEMORY_SHARE of the available memory."""
    available = available_bytes()
    if available is None:
        return []
    given = sum(_row_bytes(spec, version) if like is None else like.row_bytes(spec.name) for spec in version.interface.inputs)
    row_bytes = given + sum(_row_bytes(spec, version) for spec in version.interface.outputs)
    return [rows for rows in _sizes(version) if rows * row_bytes > available * MEMORY_SHARE]


def _sizes(version: LoadedVersion) -> list[int]:
    if not version.config.max_batch_size:
        return [1]
    return list(dict.fromkeys([1, *version.limits.targets, *version.limits.padded_rows]))


def _row_bytes(spec: TensorSpec, version: LoadedVersion) -> int:
    """Return the least bytes of a row; open sizes count as 1."""
    own = _own_shape(spec, batched=version.config.max_batch_size > 0)
    return math.prod(1 if size == ANY_SIZE else size for size in own) * spec.datatype.array_dtype.itemsize


def _own_shape(spec: TensorSpec, *, batched: bool) -> tuple[int, ...]:
    """Return the shape without the batch dimension."""
    return spec.shape[1:] if batched else spec.shape


def _ones(spec: TensorSpec, *, batched: bool) -> Array:
    shape = tuple(1 if size == ANY_SIZE else size for size in _own_shape(spec, batched=batched))
    return _filled(spec, (1, *shape) if batched else shape, 1)


def _filled(spec: TensorSpec, shape: tuple[int, ...], value: int) -> Array:
    dtype = spec.datatype.array_dtype
    if dtype.hasobject:
        return np.full(shape, b"1" if value else b"", object)
    return np.full(shape, value, dtype)


def _declared(version: LoadedVersion, warm_up: ModelWarmup) -> WarmUpRequest:
    declared = version.files.config
    where = f"{declared.source}: model_warmup {warm_up.name!r}"
    batched = version.config.max_batch_size > 0
    rows = max(1, warm_up.batch_size)
    if rows > max(1, version.config.max_batch_size):
        raise ModelLoadError(f"{where} has batch_size {rows}, expected at most {max(1, version.config.max_batch_size)}")
    names = {spec.name for spec in version.interface.inputs}
    if set(warm_up.inputs) != names:
        given, expected = (", ".join(map(repr, sorted(which))) for which in (warm_up.inputs, names))
        raise ModelLoadError(f"{where} has inputs {given or 'of no name'}, expected {expected}")
    inputs = {}
    for spec in version.interface.inputs:
        row = _row(spec, warm_up.inputs[spec.name], declared, f"{where} input {spec.name!r}", batched=batched)
        inputs[spec.name] = np.repeat(row[None], rows, axis=0) if batched else row
    from_files = frozenset(name for name, given in warm_up.inputs.items() if given.HasField("input_data_file"))
    what, times = f"model_warmup {warm_up.name!r}", max(1, warm_up.count)
    return WarmUpRequest(what=what, rows=rows, inputs=inputs, times=times, from_files=from_files)


def _row(spec: TensorSpec, given: Any, declared: DeclaredConfig, where: str, *, batched: bool) -> Array:
    """Return the data of one row of an input, without the batch dimension."""
    shape = tuple(given.dims)
    mismatch = spec.mismatch((1, *shape) if batched else shape)
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
            return _from_file(spec, shape, declared, given.input_data_file, where)
        case _:
            raise ModelLoadError(f"{where} has no data, expected zero_data, random_data or input_data_file")


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


def warm_up(version: LoadedVersion, budget_s: float) -> None:
    """Run every copy on the requests of its configuration, then on every batch size.

    After `budget_s` seconds no further size is run. A single row, and each declared request once, are always run.

    Raises:
        ModelLoadError: the model failed, or its answer does not fit its interface.
    """
    is_code = version.interface.kind is PYTHON  # code runs only on declared requests, because guessed ones may have effects
    if own_parameter(version.config, "halfserve.warm_up") is False or version.config.model_transaction_policy.decoupled:
        return
    for warm_up_declared in too_large_declared(version):
        what = f"model_warmup {warm_up_declared.name!r}"
        _warn(version, "%s: %s was not run: it could take all memory that is available", what)
    declared = declared_requests(version)
    like = declared[0] if declared else None
    left_out = too_large(version, like)
    if left_out:
        sizes = ", ".join(map(str, left_out))
        _warn(version, "%s: batches of %s were not tried out: they could take all memory that is available", sizes)
    until = time.monotonic() + budget_s
    for backend in version.backends:
        for request in declared:
            done = _repeat(version, backend, request, until)
            if done < request.times:
                how_often = f"{done} of {request.times} times"
                _warn(version, "%s: %s was run %s, for as long as %g s", request.what, how_often, budget_s)
        for request in () if is_code else sized_requests(version, like):
            if request.rows > 1 and time.monotonic() > until:
                _warn(version, "%s: %s and more were not tried out in %g s", request.what, budget_s)
                break
            if not _try(version, backend, request):
                break
            pause()


def settle(version: LoadedVersion, backend: Backend, budget_s: float) -> None:
    """Run every batch size on a device from the calling thread, which then computes the batches of clients.

    A device's runtime keeps handles and recordings by thread. The second run of a size records it, and no further size is run
    after `budget_s` seconds.

    Raises:
        ModelLoadError: the model failed, or its answer does not fit its interface.
    """
    if own_parameter(version.config, "halfserve.warm_up") is False or version.config.model_transaction_policy.decoupled:
        return
    if version.interface.kind is PYTHON or backend.provider in CPU_PROVIDERS:
        return
    declared = declared_requests(version)
    until = time.monotonic() + budget_s
    for request in sized_requests(version, declared[0] if declared else None):
        if time.monotonic() > until:
            _warn(version, "%s: %s and more were not run on the thread that serves in %g s", request.what, budget_s)
            return
        if not all(_try(version, backend, request) for _ in range(2)):
            return


def _repeat(version: LoadedVersion, backend: Backend, request: WarmUpRequest, until: float) -> int:
    """Run the request as often as it says, or until the time is over, but at least once; returns the number of runs."""
    for done in range(1, request.times + 1):
        _try(version, backend, request)
        if time.monotonic() > until:
            return done
    return request.times


def _try(version: LoadedVersion, backend: Backend, request: WarmUpRequest) -> bool:
    """Return whether the model has answered; a failure is an error unless the request's sizes are guessed."""
    result = run_alone(version, backend, request)
    wrong = _misfit(version, result.answers[0]) if isinstance(result, Answered) else str(result.error)
    if wrong is None:
        return True
    if request.binding:
        raise ModelLoadError(
            f"{version.files.model}: {request.what} failed: {wrong}; mend the model, describe inputs that it can take in "
            "model_warmup, or set the parameter halfserve.warm_up to 'off'"
        )
    _warn(version, "%s: cannot be tried out (%s); describe inputs that it can take in model_warmup", wrong)
    return False


def run_alone(version: LoadedVersion, backend: Backend, request: WarmUpRequest) -> Answered | Failed:
    """Run one request on a copy.

    Raises:
        ModelLoadError: the device was lost.
    """
    try:
        (result,) = run_batch(backend, [request.to_model(version)], invariance=version.invariance, ragged=version.ragged)
    except InstanceLostError as error:
        raise ModelLoadError(f"{version.files.model}: the device failed while it was tried out: {error}") from None
    return result


def _misfit(version: LoadedVersion, outputs: Tensors) -> str | None:
    """Return why an answer does not fit the interface; None if it fits."""
    batched = version.config.max_batch_size > 0
    for spec in version.interface.outputs:
        shape = tuple(outputs[spec.name].shape)
        expected = spec.shape if spec.model_shape is None else spec.model_shape
        # The number of rows may differ: such a model's requests are computed one by one.
        given_sizes, expected_sizes = (shape[1:], expected[1:]) if batched else (shape, expected)
        fits = len(shape) == len(expected) and all(e in {ANY_SIZE, g} for g, e in zip(given_sizes, expected_sizes, strict=True))
        if not fits:
            return f"output {spec.name!r} has shape {list(shape)}, the model's file promises {list(expected)}"
    return None


def _warn(version: LoadedVersion, text: str, *values: object) -> None:
    label = f"{version.files.name}/{version.files.version}"
    logger.warning(text, label, *values, extra={"model": label})


def short_sizes(version: LoadedVersion) -> dict[int, float]:
    """Measure batches of growing size until one is not short, so that the first short batches of clients run on the event loop.

    Returns batch rows -> least seconds that a batch takes on the slowest copy; nothing if requests may differ in shape or time,
    if batches run on a device, or if warm-up is off.
    """
    if own_parameter(version.config, "halfserve.warm_up") is False:
        return {}
    steady = version.interface.is_steady(batched=version.config.max_batch_size > 0)
    if not steady or any(backend.provider not in CALLING_PROVIDERS for backend in version.backends):
        return {}
    declared = declared_requests(version)
    sizes = {}
    for request in sorted(sized_requests(version, declared[0] if declared else None), key=lambda request: request.rows):
        seconds = max(_shortest_s(version, backend, request) for backend in version.backends)
        if seconds > LONE_S:
            break
        sizes[request.rows] = seconds
        pause()
    return sizes


def _shortest_s(version: LoadedVersion, backend: Backend, request: WarmUpRequest) -> float:
    """Return the seconds of the fastest of RUNS runs, stopped early if the first ones are too long; inf if the model fails.

    The time is that of the clock: a runtime with threads of its own keeps this thread waiting, and would keep the event loop.
    """
    shortest = math.inf
    for _ in range(RUNS):
        asked = [request.to_model(version)]
        started = time.monotonic()
        (result,) = run_batch(backend, asked)
        seconds = time.monotonic() - started
        if not isinstance(result, Answered):
            return math.inf
        shortest = min(shortest, seconds)
        if shortest > 2 * LONE_S:
            break
    return shortest
