"""Joins the inputs of a batch from those of its requests, in buffers of the thread that computes it."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from halfserve.serve.engine.backend import Backend
from halfserve.serve.engine.cuda_driver import Buffer, batch_buffer
from halfserve.serve.engine.padding.padding import Padding
from halfserve.serve.engine.requests import InferRequest, RawInputs
from halfserve.serve.engine.tensors import Array

# From this size on, the page faults of fresh memory cost more than the copy into it.
SCRATCH_BYTES: Final = 65_536


def assemble(requests: Sequence[InferRequest], name: str, dtype: np.dtype[Any], padded: int = 0) -> Array:
    """Join one input of a batch.

    Args:
        requests: requests of one bucket, in order.
        name: name of the input.
        dtype: dtype that the backend takes.
        padded: number of rows that the batch will be padded to; see `pad_rows`.

    Returns:
        All rows, with the padding if it costs no copy. The memory may be that of a single request, or be reused by this
        thread's next batch.

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
    buffer = _scratch().of(name, total + added * row_bytes)
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
    return _scratch().of(name, size)[:size].view(dtype).reshape(shape)


def lock_buffers(device_id: int) -> None:
    """Page-lock the buffers that this thread makes from now on, if possible, for copies to a CUDA device."""
    _scratch().device_id = device_id


class _Scratch:
    """A thread's buffers, by input. Each is as large as the largest batch so far."""

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
        self._buffers.pop((name, None), None)  # made before the thread's first batch on the device
        return batch_buffer(size, self.device_id)


_of_thread: Final = threading.local()  # holds a _Scratch for each thread


def _scratch() -> _Scratch:
    scratch: _Scratch | None = getattr(_of_thread, "scratch", None)
    if scratch is None:
        scratch = _of_thread.scratch = _Scratch()
    return scratch


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
        All rows of each input. The memory may be reused by this thread's next batch.

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
