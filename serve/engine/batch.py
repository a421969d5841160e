"""Run one batch on a backend: put the requests' rows together, compute, take the answers apart. Runs on a worker thread."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from serve.engine.backend import Backend
from serve.engine.errors import BackendError, InferenceError
from serve.engine.requests import InferRequest
from serve.engine.statistics import BatchTimes
from serve.engine.tensors import Array, Tensors


@dataclass(frozen=True)
class Answered:
    """Requests that ran together.

    Attributes:
        requests: in order of arrival.
        answers: one per request.
        times: of the batch.
    """

    requests: list[InferRequest]
    answers: list[Tensors]
    times: BatchTimes


@dataclass(frozen=True)
class Failed:
    """A request that could not be computed, not even alone."""

    request: InferRequest
    error: InferenceError


def run_batch(backend: Backend, requests: list[InferRequest]) -> list[Answered | Failed]:
    """Run the requests together; when that fails, halve until only the requests that cannot be computed have failed."""
    started = time.monotonic_ns()
    try:
        inputs = {
            name: _assemble([r.inputs[name] for r in requests], backend.compute_dtype(name)) for name in requests[0].inputs
        }
        assembled = time.monotonic_ns()
        outputs = backend.run(inputs)
        computed = time.monotonic_ns()
        answers = _take_apart(outputs, requests)
        times = BatchTimes(started=started, assembled=assembled, computed=computed, split=time.monotonic_ns())
    except Exception as error:  # noqa: BLE001  (whatever a runtime raises must reach these requests, not end the worker)
        if len(requests) == 1:
            known = error if isinstance(error, InferenceError) else BackendError(f"the model failed on this request: {error}")
            return [Failed(requests[0], known)]
        middle = len(requests) // 2
        return run_batch(backend, requests[:middle]) + run_batch(backend, requests[middle:])
    return [Answered(requests, answers, times)]


def _assemble(parts: Sequence[Array], dtype: np.dtype[Any]) -> Array:
    if len(parts) == 1:
        (part,) = parts
        # A view on received bytes may begin at any of them; what a runtime does with such a pointer is its own affair.
        return part.astype(dtype, copy=not part.flags.aligned)
    return np.concatenate(parts, dtype=dtype, casting="unsafe")


def _take_apart(outputs: Tensors, requests: list[InferRequest]) -> list[Tensors]:
    if len(requests) == 1:
        request = requests[0]
        return [{name: outputs[name] for name in request.outputs}]
    rows = sum(request.rows for request in requests)
    for name, array in outputs.items():
        if array.ndim == 0 or array.shape[0] != rows:
            raise BackendError(
                f"output {name!r} has shape {list(array.shape)}, expected {rows} rows first, one per row of the batch"
            )
    answers: list[Tensors] = []
    start = 0
    for request in requests:
        end = start + request.rows
        answers.append({name: outputs[name][start:end] for name in request.outputs})
        start = end
    return answers
