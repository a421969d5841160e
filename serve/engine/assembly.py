"""Put the rows of a batch's requests together, one array per input. Runs on a worker thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from serve.engine.raw_inputs import RawInputs
from serve.engine.requests import InferRequest
from serve.engine.tensors import Array

# From here on memory that is fresh from the system costs more than the copy into it: its pages come one fault after the other.
SCRATCH_BYTES = 65_536


def assemble(requests: Sequence[InferRequest], name: str, dtype: np.dtype[Any]) -> Array:
    """One input of a batch.

    Args:
        requests: of one bucket, in order.
        name: the input's.
        dtype: in which the backend takes it.

    Returns:
        All rows. Their memory may be the request's own, where there is only one, or be used again by this thread's next batch.

    Raises:
        InferenceError: bytes that lie in shared memory cannot be fetched.
    """
    first = requests[0].inputs
    if type(first) is not RawInputs:
        return _concatenated(requests, name, dtype)
    if len(requests) == 1:
        if first.size(name) >= SCRATCH_BYTES and not first.has_aligned(name):
            return _gathered([first], name, requests[0].rows, dtype)
        # A view on received bytes may begin at any of them; what a runtime does with such a pointer is its own affair.
        part = first[name]
        return part.astype(dtype, copy=not part.flags.aligned)
    sources = [request.inputs for request in requests if type(request.inputs) is RawInputs]
    if len(sources) != len(requests):
        return _concatenated(requests, name, dtype)
    rows = sum([request.rows for request in requests])
    if first.size(name) * len(requests) >= SCRATCH_BYTES:
        return _gathered(sources, name, rows, dtype)
    entry = first.layout.inputs[first.layout.places[name]]
    joined = b"".join([source.piece(name) for source in sources])
    return np.frombuffer(joined, entry.dtype).reshape(rows, *entry.shape[1:]).astype(dtype, copy=False)


def _concatenated(requests: Sequence[InferRequest], name: str, dtype: np.dtype[Any]) -> Array:
    if len(requests) == 1:
        part = requests[0].inputs[name]
        return part.astype(dtype, copy=not part.flags.aligned)
    return np.concatenate([request.inputs[name] for request in requests], dtype=dtype, casting="unsafe")


def _gathered(sources: Sequence[RawInputs], name: str, rows: int, dtype: np.dtype[Any]) -> Array:
    entry = sources[0].layout.inputs[sources[0].layout.places[name]]
    sizes = [source.size(name) for source in sources]
    total = sum(sizes)
    buffer = _scratch.of(name, total)
    view, start = buffer.data, 0
    for source, size in zip(sources, sizes, strict=True):
        source.copy_into(name, view[start : start + size])
        start += size
    shape = (rows, *entry.shape[1:]) if len(sources) > 1 else entry.shape
    return buffer[:total].view(entry.dtype).reshape(shape).astype(dtype, copy=False)


class _Scratch(threading.local):
    """A thread's buffers, by the name of the input that they are for. Each is as large as the largest batch was."""

    def __init__(self) -> None:
        self._buffers: dict[str, np.ndarray[tuple[int], np.dtype[np.uint8]]] = {}

    def of(self, name: str, size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """A buffer of at least `size` bytes."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[name] = np.empty(size, np.uint8)
        return buffer


_scratch = _Scratch()
