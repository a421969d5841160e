"""The times of a request in its response: parameters, and the header Server-Timing of REST.

https://www.w3.org/TR/server-timing/
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Final

from halfserve.protos.inference_pb2 import InferParameter, ModelInferRequest, ModelInferResponse
from halfserve.protos.request_parameters import TIMINGS
from halfserve.serve.engine.model_statistics import BatchTimes
from halfserve.serve.engine.requests import Parameter
from halfserve.serve.protocol.messages import split_response

# Response parameters, in milliseconds, by their names in Server-Timing. The queue lasts until the request's batch begins,
# computing until the batch's outputs are split; the total ends when the response is written.
TIMES: Final = {"queue": "halfserve.queue_ms", "compute": "halfserve.compute_ms", "total": "halfserve.total_ms"}
TIMINGS_HEADER: Final = b"halfserve-timings"  # header of an HTTP request that asks for the times; its value is true or false
# A ModelInferRequest that asks for the times, to be appended to a request.
TIMED: Final = ModelInferRequest(parameters={TIMINGS: InferParameter(bool_param=True)}).SerializeToString()
SERVER_TIMING: Final = "server-timing"


def timing_parameters(arrived_ns: int, batch: BatchTimes | None) -> bytes:
    """Return a ModelInferResponse with the times of a request, which is to be appended to its response.

    `batch`: the request's batch; None for a response of a decoupled model, whose queue and computing are not told apart.
    """
    message = ModelInferResponse()
    now = time.monotonic_ns()
    if batch is not None:
        message.parameters[TIMES["queue"]].double_param = _ms(batch.started - arrived_ns)
        message.parameters[TIMES["compute"]].double_param = _ms(batch.split - batch.started)
    message.parameters[TIMES["total"]].double_param = _ms(now - arrived_ns)
    return message.SerializeToString(deterministic=True)


def server_timing(parameters: Mapping[str, Parameter]) -> str:
    """Return the value of Server-Timing for a response's parameters, such as "queue;dur=1.2, compute;dur=3.4, total;dur=5.0";
    empty for a response without times.
    """
    return ", ".join(f"{name};dur={parameters[key]}" for name, key in TIMES.items() if key in parameters)


def longest(messages: Iterable[bytes], total_ns: int | None = None) -> dict[str, Parameter]:
    """Return the longest time of each kind in some serialized ModelInferResponse; `total_ns` replaces the total if given."""
    found: dict[str, Parameter] = {}
    for message in messages:
        parameters = ModelInferResponse.FromString(split_response(message)[0]).parameters
        for key in TIMES.values():
            if key in parameters:
                found[key] = max(float(found.get(key, 0.0)), parameters[key].double_param)
    if found and total_ns is not None:
        found[TIMES["total"]] = _ms(total_ns)
    return found


def _ms(nanoseconds: int) -> float:
    """Return milliseconds to three decimals."""
    return max(nanoseconds, 0) // 1000 / 1000
