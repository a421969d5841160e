"""Put the rows of a batch's requests together, one array per input. Runs on a worker thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from serve.engine.batches.locked_memory import Buffer, locked_buffer
from serve.engine.batches.raw_inputs import RawInputs
from serve.engine.requests import InferRequest
from serve.engine.tensors import Array

# From here on memory that is fresh from the system costs more than the copy into it: its pages come one fault after the other.
SCRATCH_BYTES = 65_536


def assemble(requests: Sequence[InferRequest], name: str, dtype: np.dtype[Any], padded: int = 0) -> Array:
    """One input of a batch.

    Args:
        requests: of one bucket, in order.
        name: the input's.
        dtype: in which the backend takes it.
        padded: rows that the batch is going to be filled up to; see `pad_rows`.

    Returns:
        All rows, and those that are to be added where that costs no copy. Their memory may be the request's own, where there
        is only one, or be used again by this thread's next batch.

    Raises:
        InferenceError: bytes that lie in shared memory cannot be fetched.
    """
    first = requests[0].inputs
    if type(first) is not RawInputs:
        return _concatenated(requests, name, dtype)
    if len(requests) == 1:
        if first.size(name) >= SCRATCH_BYTES and (padded > requests[0].rows or not first.has_aligned(name)):
            return _gathered([first], name, requests[0].rows, dtype, padded)
        # A view on received bytes may begin at any of them; what a runtime does with such a pointer is its own affair.
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
    buffer = _scratch.of(name, total + added * row_bytes)
    view, start = buffer.data, 0
    for source, size in zip(sources, sizes, strict=True):
        source.copy_into(name, view[start : start + size])
        start += size
    if added:
        buffer[total : total + added * row_bytes].reshape(added, row_bytes)[:] = buffer[total - row_bytes : total]
    shape = (rows + added, *entry.shape[1:]) if len(sources) > 1 or added else entry.shape
    return buffer[: total + added * row_bytes].view(entry.dtype).reshape(shape).astype(dtype, copy=False)


def lock_buffers(device_id: int) -> None:
    """Have the buffers that this thread makes from now on locked in memory, where possible, for copies to a CUDA device."""
    _scratch.device_id = device_id


class _Scratch(threading.local):
    """A thread's buffers, by the name of the input that they are for. Each is as large as the largest batch was."""

    def __init__(self) -> None:
        self.device_id: int | None = None
        self._buffers: dict[tuple[str, int | None], Buffer] = {}

    def of(self, name: str, size: int) -> Buffer:
        """A buffer of at least `size` bytes."""
        key = (name, self.device_id)
        buffer = self._buffers.get(key)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[key] = self._new(name, size)
        return buffer

    def _new(self, name: str, size: int) -> Buffer:
        if self.device_id is None:
            return np.empty(size, np.uint8)
        self._buffers.pop((name, None), None)  # from before the first batch was on the device
        buffer = locked_buffer(size, self.device_id)
        return np.empty(size, np.uint8) if buffer is None else buffer


_scratch = _Scratch()
