"""Joins the inputs of a batch from those of its requests, in buffers that further batches reuse."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from halfserve.serve.engine.backend import Backend
from halfserve.serve.engine.cuda_driver import Buffer, batch_buffer
from halfserve.serve.engine.execution.device_inputs import DeviceInputs, DeviceRows
from halfserve.serve.engine.padding.padding import Padding
from halfserve.serve.engine.padding.ragged import Ragged
from halfserve.serve.engine.queueing.pace import padded_rows
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.tensors import Array, RawInputs, Tensors

# From this size on, the page faults of fresh memory cost more than the copy into it.
SCRATCH_BYTES: Final = 65_536


class GatheredBatch:
    """The inputs of a batch, joined.

    Attributes:
        inputs: inputs by name.
        rows: rows of the batch, including padded ones.
        length: length to which requests of different lengths were padded; 0 if nothing needed padding.
        started: time at which the batch's turn came, in nanoseconds on time.monotonic_ns()'s clock.
    """

    __slots__ = ("inputs", "length", "rows", "started")

    def __init__(self, inputs: Tensors, rows: int, length: int, started: int) -> None:
        self.inputs = inputs
        self.rows = rows
        self.length = length
        self.started = started


def gather(
    backend: Backend,
    requests: list[InferRequest],
    padded_sizes: Sequence[int] = (),
    padding: Padding | None = None,
    ragged: Ragged | None = None,
) -> GatheredBatch:
    """Join the inputs of requests; see `run_batch` for the arguments.

    Raises:
        InferenceError: bytes in shared memory cannot be read.
    """
    started = time.monotonic_ns()
    if ragged is not None:
        return GatheredBatch(_ragged_inputs(backend, requests, ragged), 0, 0, started)
    rows = requests[0].rows if len(requests) == 1 else sum([request.rows for request in requests])
    if padded_sizes:
        rows = padded_rows(rows, padded_sizes)
    length = 0 if padding is None else padding.common_length(requests)
    inputs: Tensors
    on_device = None if length else device_inputs(backend, requests, rows)
    if on_device is not None:
        return GatheredBatch(on_device, rows, length, started)
    if padding is None or not length:
        inputs = {name: assemble(requests, name, backend.compute_dtype(name), rows) for name in requests[0].inputs}
    else:
        inputs = padded_inputs(backend, requests, rows, length, padding)
    if padded_sizes:
        inputs = {name: pad_rows(array, rows) for name, array in inputs.items()}
    return GatheredBatch(inputs, rows, length, started)


def device_inputs(backend: Backend, requests: list[InferRequest], rows: int) -> DeviceInputs | None:
    """Return the inputs of requests of one bucket, padded to `rows` rows; None unless all of them lie on the backend's device.

    The device of the backend is known once it has computed on this thread, or for these buffers.
    """
    first = requests[0].inputs
    if type(first) is not RawInputs or first.all_sent:
        return None
    device_id = _buffers().device_id
    if device_id is None:
        return None
    found: dict[str, DeviceRows] = {}
    for entry in first.layout.inputs:
        pieces: list[tuple[int, int]] = []
        count = 0
        for request in requests:
            given = request.inputs
            place = given.device_bytes(entry.name) if type(given) is RawInputs else None
            if type(given) is not RawInputs or place is None or place.device_id != device_id:
                return None
            pieces.append((place.address, given.size(entry.name)))
            count += request.rows
        if entry.dtype != backend.compute_dtype(entry.name) or not entry.size:
            return None
        shape = entry.shape if len(requests) == 1 else (count, *entry.shape[1:])
        if rows > count:
            address, size = pieces[-1]
            row_bytes = entry.size // requests[0].rows
            pieces += [(address + size - row_bytes, row_bytes)] * (rows - count)
            shape = (rows, *entry.shape[1:])
        found[entry.name] = DeviceRows(shape, entry.dtype, device_id, pieces)

    def copy(name: str) -> Array:
        return pad_rows(assemble(requests, name, backend.compute_dtype(name), rows), rows)

    return DeviceInputs(found, copy)


def _ragged_inputs(backend: Backend, requests: list[InferRequest], ragged: Ragged) -> Tensors:
    inputs: dict[str, Array] = {}
    for name in requests[0].inputs:
        dtype = backend.compute_dtype(name)
        inputs[name] = ragged.joined(requests, name, dtype) if name in ragged.inputs else assemble(requests, name, dtype)
    inputs.update(ragged.made_inputs(requests))
    return inputs


def assemble(requests: Sequence[InferRequest], name: str, dtype: np.dtype[Any], padded: int = 0) -> Array:
    """Join one input of a batch.

    Args:
        requests: requests of one bucket, in order.
        name: name of the input.
        dtype: dtype that the backend takes.
        padded: number of rows that the batch will be padded to; see `pad_rows`.

    Returns:
        All rows, with the padding if it costs no copy. The memory may be that of a single request, or be reused by the next
        batch in this thread's buffers.

    Raises:
        InferenceError: bytes in shared memory cannot be read.
    """
    first = requests[0].inputs
    if type(first) is not RawInputs:
        return _concatenated(requests, name, dtype)
    if len(requests) == 1:
        if first.size(name) >= SCRATCH_BYTES and (padded > requests[0].rows or not first.has_aligned(name)):
            return _gathered([first], name, requests[0].rows, dtype, padded)
        # A view on received bytes may be unaligned, and runtimes may not take such pointers.
        part = first[name]
        return part.astype(dtype, copy=not part.flags.aligned)
    sources = [request.inputs for request in requests if type(request.inputs) is RawInputs]
    if len(sources) != len(requests):
        return _concatenated(requests, name, dtype)
    rows = sum([request.rows for request in requests])
    if first.size(name) * len(requests) >= SCRATCH_BYTES:
        return _gathered(sources, name, rows, dtype, padded)
    entry = first.layout.inputs[first.layout.places[name]]
    joined = b"".join([source.piece(name) for source in sources])
    return np.frombuffer(joined, entry.dtype).reshape(rows, *entry.shape[1:]).astype(dtype, copy=False)


def _concatenated(requests: Sequence[InferRequest], name: str, dtype: np.dtype[Any]) -> Array:
    if len(requests) == 1:
        part = requests[0].inputs[name]
        return part.astype(dtype, copy=not part.flags.aligned)
    return np.concatenate([request.inputs[name] for request in requests], dtype=dtype, casting="unsafe")


def _gathered(sources: Sequence[RawInputs], name: str, rows: int, dtype: np.dtype[Any], padded: int) -> Array:
    entry = sources[0].layout.inputs[sources[0].layout.places[name]]
    sizes = [source.size(name) for source in sources]
    total = sum(sizes)
    row_bytes, added = (total // rows, padded - rows) if padded > rows else (0, 0)
    buffer = _buffers().of(name, total + added * row_bytes)
    view, start = buffer.data, 0
    for source, size in zip(sources, sizes, strict=True):
        source.copy_into(name, view[start : start + size])
        start += size
    if added:
        buffer[total : total + added * row_bytes].reshape(added, row_bytes)[:] = buffer[total - row_bytes : total]
    shape = (rows + added, *entry.shape[1:]) if len(sources) > 1 or added else entry.shape
    return buffer[: total + added * row_bytes].view(entry.dtype).reshape(shape).astype(dtype, copy=False)


def _empty(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    size = math.prod(shape) * dtype.itemsize
    if size < SCRATCH_BYTES:
        return np.empty(shape, dtype)
    return _buffers().of(name, size)[:size].view(dtype).reshape(shape)


class BatchBuffers:
    """Buffers for one batch at a time, by input. Each is as large as the largest batch so far. Used by one thread at a time.

    Attributes:
        device_id: CUDA device for which new buffers are page-locked, if possible; None for pageable memory.
    """

    __slots__ = ("_buffers", "device_id")

    def __init__(self) -> None:
        self.device_id: int | None = None
        self._buffers: dict[tuple[str, int | None], Buffer] = {}

    def of(self, name: str, size: int) -> Buffer:
        """Return a buffer of at least `size` bytes."""
        key = (name, self.device_id)
        buffer = self._buffers.get(key)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[key] = self._new(name, size)
        return buffer

    def _new(self, name: str, size: int) -> Buffer:
        if self.device_id is None:
            return np.empty(size, np.uint8)
        self._buffers.pop((name, None), None)  # made before the first batch on the device
        return batch_buffer(size, self.device_id)


_of_thread: Final = threading.local()  # holds a BatchBuffers for each thread


def use_buffers(buffers: BatchBuffers) -> None:
    """Join this thread's batches in these buffers from now on."""
    _of_thread.buffers = buffers


def _buffers() -> BatchBuffers:
    buffers: BatchBuffers | None = getattr(_of_thread, "buffers", None)
    if buffers is None:
        buffers = _of_thread.buffers = BatchBuffers()
    return buffers


def lock_buffers(device_id: int) -> None:
    """Page-lock the buffers that this thread makes from now on, if possible, for copies to a CUDA device."""
    _buffers().device_id = device_id


def pad_rows(array: Array, rows: int) -> Array:
    """Pad one input to `rows` rows by repeating its last row.

    Unlike zeros, that row is valid for the model (an index into a table, a mask with an element), and gives no non-finite
    values.

    Args:
        array: array of shape [n, ...] with 1 <= n <= rows.
        rows: number of rows to pad to.

    Returns:
        An array of shape [rows, ...]; the array itself if n = rows.
    """
    missing = rows - array.shape[0]
    if missing <= 0:
        return array
    return np.concatenate([array, np.broadcast_to(array[-1:], (missing, *array.shape[1:]))])


def padded_inputs(
    backend: Backend, requests: Sequence[InferRequest], rows: int, length: int, padding: Padding
) -> dict[str, Array]:
    """Join all inputs of a batch of requests of different lengths, each in one copy.

    Args:
        backend: the model, which gives the dtypes.
        requests: requests of one family of buckets, in order.
        rows: rows of the batch; rows beyond the requests' repeat the last one.
        length: length to which the requests are padded.
        padding: gives the padded axes and their values.

    Returns:
        All rows of each input. The memory may be reused by the next batch in this thread's buffers.

    Raises:
        InferenceError: bytes in shared memory cannot be read.
    """
    inputs: dict[str, Array] = {}
    for name in requests[0].inputs:
        dtype = backend.compute_dtype(name)
        if name in padding.inputs:
            arrays = [request.inputs[name] for request in requests]
            batch = inputs[name] = _empty(name, tuple(padding.shape(name, arrays[0].shape, rows, length)), dtype)
            padding.fill(batch, name, arrays)
        else:
            inputs[name] = assemble(requests, name, dtype, rows)
    return inputs
