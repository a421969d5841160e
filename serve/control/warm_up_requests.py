"""What a model is tried out with: the batches that its configuration describes, and one of every size that it will be given."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from protos.datatypes import BY_CONFIG
from protos.model_config_pb2 import ModelWarmup
from serve.control.memory_check import available_bytes
from serve.engine.configuration.config import DeclaredConfig
from serve.engine.errors import ModelLoadError
from serve.engine.regular_files import read_regular
from serve.engine.repository.loaded_version import LoadedVersion
from serve.engine.repository.named_files import named_file
from serve.engine.requests import InferRequest
from serve.engine.tensors import ANY_SIZE, Array, TensorSpec

MEMORY_SHARE = 0.25  # for inputs and outputs: what a model needs in between is not known
POINTER_BYTES = 8  # an element of text in an array
WARM_UP_FOLDER = "warmup"  # of a model folder; holds the files that model_warmup names


@dataclass(frozen=True, kw_only=True)
class WarmUpRequest:
    """One batch to try.

    Attributes:
        what: it is, in words.
        rows: of the batch dimension; 1 for a model without one.
        inputs: by name, in the shapes that clients use.
        times: to run it.
        binding: the model must answer it to be served. Not so where sizes had to be guessed.
    """

    what: str
    rows: int
    inputs: Mapping[str, Array]
    times: int = 1
    binding: bool = True

    def row_bytes(self, name: str) -> int:
        """Bytes of one row of an input."""
        return self.inputs[name].nbytes // self.rows

    def to_model(self, version: LoadedVersion) -> InferRequest:
        """The request as a backend takes it; nobody waits for its answer."""
        interface = version.interface
        return InferRequest(
            inputs={spec.name: spec.to_model(self.inputs[spec.name]) for spec in interface.inputs},
            outputs=tuple(spec.name for spec in interface.outputs),
            rows=self.rows,
            bucket=None,
            deadline=None,
            done=lambda _: None,
        )


def declared_requests(version: LoadedVersion) -> list[WarmUpRequest]:
    """What the configuration's model_warmup asks for, but for what is `too_large_declared`.

    Raises:
        ModelLoadError: it contradicts the model's inputs, or a file cannot be read.
    """
    left_out = too_large_declared(version)
    return [_declared(version, warm_up) for warm_up in version.config.model_warmup if warm_up not in left_out]


def too_large_declared(version: LoadedVersion) -> list[ModelWarmup]:
    """What of it would take more than MEMORY_SHARE of the memory that is available, for the inputs alone."""
    available = available_bytes()
    if available is None:
        return []
    return [warm_up for warm_up in version.config.model_warmup if _bytes(warm_up) > available * MEMORY_SHARE]


def _bytes(warm_up: ModelWarmup) -> int:
    rows = max(1, warm_up.batch_size)
    elements = [(math.prod(max(0, size) for size in one.dims), BY_CONFIG.get(one.data_type)) for one in warm_up.inputs.values()]
    return rows * sum(count * ((datatype and datatype.itemsize) or POINTER_BYTES) for count, datatype in elements)


def sized_requests(version: LoadedVersion, like: WarmUpRequest | None) -> Iterator[WarmUpRequest]:
    """One batch of a single row, one of the largest size, and one of every size that the batcher prefers; `too_large` ones
    are left out.

    Args:
        version: the model version.
        like: a request of the model's configuration, whose first row is taken; otherwise every element is 1, which is a valid
            index, length and divisor, and sizes that the model leaves open are 1.
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
    """Sizes of batches, in rows, whose inputs and outputs would take more than MEMORY_SHARE of the memory that is available.

    Args:
        version: the model version.
        like: as for `sized_requests`.
    """
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
    """At least; where sizes are open, each counts as 1."""
    own = _own_shape(spec, batched=version.config.max_batch_size > 0)
    return math.prod(1 if size == ANY_SIZE else size for size in own) * spec.datatype.array_dtype.itemsize


def _own_shape(spec: TensorSpec, *, batched: bool) -> tuple[int, ...]:
    """Without the batch dimension."""
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
    return WarmUpRequest(what=f"model_warmup {warm_up.name!r}", rows=rows, inputs=inputs, times=max(1, warm_up.count))


def _row(spec: TensorSpec, given: Any, declared: DeclaredConfig, where: str, *, batched: bool) -> Array:
    """What one row of an input is to hold, without the batch dimension."""
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
