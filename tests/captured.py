"""Captures as a server writes them, for the tests of what reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from halfserve.protos.captured_requests import CapturedRequest, write_shard

START_S = 1.79e9
WIRES = {"float16": "FP16", "float32": "FP32", "int64": "INT64", "object": "BYTES", "bfloat16": "BF16"}


def captured(inputs: Mapping[str, np.ndarray[Any, Any]], time_s: float = 0.0, **changes: Any) -> CapturedRequest:
    """Return a request that came `time_s` after the first."""
    facts: dict[str, Any] = {
        "time_s": START_S + time_s,
        "model": "scores",
        "version": 1,
        "request_id": "",
        "latency_ms": 1.0,
        "status": "OK",
        "parameters": {},
        "inputs": dict(inputs),
        "datatypes": {name: WIRES[array.dtype.name] for name, array in inputs.items()},
    }
    return CapturedRequest(**facts | changes)


def write_capture(folder: Path, *requests: CapturedRequest, model: str = "scores", shard: int = 100) -> Path:
    """Write shards of at most `shard` requests; return the capture's folder."""
    (folder / model).mkdir(parents=True, exist_ok=True)
    parts: list[Sequence[CapturedRequest]] = [requests[start : start + shard] for start in range(0, len(requests), shard)]
    for number, part in enumerate(parts, 1):
        write_shard(folder / model / f"{number:06}.npz", model, part)
    return folder
