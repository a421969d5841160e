"""Captures as a server writes them, for the tests of what reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from halfserve.protos.captured_requests import CapturedMessage, encode_shard
from halfserve.protos.datatypes import BY_WIRE, DATATYPES
from halfserve.protos.inference_pb2 import ModelInferRequest
from halfserve.serve.protocol.raw_tensors import to_raw

START_S = 1.79e9


def captured(
    inputs: Mapping[str, np.ndarray[Any, Any]],
    time_s: float = 0.0,
    *,
    request_id: str = "",
    parameters: Mapping[str, Any] | None = None,
    **changes: Any,
) -> CapturedMessage:
    """Return a request that came `time_s` after the first."""
    message = ModelInferRequest(id=request_id)
    for name, array in inputs.items():
        row = next((row for row in DATATYPES if row.array_dtype == array.dtype), BY_WIRE["BYTES"])
        message.inputs.add(name=name, datatype=row.wire, shape=array.shape)
        message.raw_input_contents.append(to_raw(array, row))
    for name, value in (parameters or {}).items():
        kind = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
        setattr(message.parameters[name], kind, value)
    sent = CapturedMessage(message.SerializeToString(), [], 0, "scores", 1, START_S + time_s, 1.0, "OK")
    return replace(sent, **changes)


def write_capture(folder: Path, *requests: CapturedMessage, model: str = "scores", shard: int = 100) -> Path:
    """Write shards of at most `shard` requests; return the capture's folder."""
    (folder / model).mkdir(parents=True, exist_ok=True)
    for number, start in enumerate(range(0, len(requests), shard), 1):
        content = encode_shard(requests[start : start + shard])
        (folder / model / f"{number:06}.npz").write_bytes(content)
    return folder
