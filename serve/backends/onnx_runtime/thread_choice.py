"""How many threads an operator gets on the CPU where nobody says: one, for models that are done before a second one is awake.

A multi-layer perceptron of 64-256-10 takes 19 microseconds for 64 rows on one thread, and 30 on two: they do not spin while
they wait, so each operator that is shared out waits for the system to wake the other thread.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import onnxruntime as ort

from serve.backends.cores import fewer_cores
from serve.backends.onnx_runtime.probe.probe_child import ones
from serve.engine.backend import DevicePlacement

QUICK_S = 200e-6
QUICK_BYTES = 1 << 26  # of inputs: no memory delivers more in that time, and a batch of millions of rows may not fit into it
RUNS = 5
# Larger models are not quick, and to open them twice takes its time.
SMALL_FILE_BYTES = 4 << 20


def may_be_quick(path: Path, placement: DevicePlacement) -> bool:
    """Whether it is worth a trial: the number of threads is open, there are several to have, and the file is small."""
    return placement.threads == 0 and (fewer_cores() or os.cpu_count() or 1) > 1 and path.stat().st_size <= SMALL_FILE_BYTES


def is_quick(session: ort.InferenceSession, rows: int) -> bool:
    """Whether the largest batch takes less time than it pays to share out; no where its size is not known.

    Args:
        session: with one thread.
        rows: of the largest batch.
    """
    inputs = session.get_inputs()
    if any(not isinstance(size, int) for value in inputs for size in value.shape[1:]):
        return False
    batched = all(value.shape and not isinstance(value.shape[0], int) for value in inputs)
    if not batched and any(not isinstance(size, int) for value in inputs for size in value.shape):
        return False
    row = {value.name: ones(value) for value in inputs}
    if rows * sum(array.nbytes for array in row.values()) > QUICK_BYTES:
        return False
    return _quickest_s(session, {value.name: ones(value, rows) for value in inputs}) <= QUICK_S


def _quickest_s(session: ort.InferenceSession, feeds: dict[str, Any]) -> float:
    quickest = float("inf")
    for _ in range(RUNS):
        started = time.perf_counter()
        try:
            session.run(None, feeds)
        except Exception:  # noqa: BLE001  (ones are not what this model takes, and nothing more is known of it)
            return float("inf")
        took = time.perf_counter() - started
        quickest = min(quickest, took)
        if took > RUNS * QUICK_S:
            break
    return quickest
