"""Captured requests as a load: the requests to send, and the times of a replay."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfserve.protos.captured_requests import CapturedRequest, CapturedRequestsError
from halfserve.protos.captured_traffic import CapturedTraffic, read_traffic, request_bytes
from halfserve.protos.inference_pb2 import ModelInferRequest, ModelMetadataResponse
from halfserve.protos.request_parameters import SEQUENCE_END, SEQUENCE_ID, SEQUENCE_START
from halfserve.serve.benchmark import BenchmarkArgumentError
from halfserve.serve.benchmark.level import Load
from halfserve.serve.benchmark.request_inputs import MAX_BYTES
from halfserve.serve.client.array_conversion import Array, converted, datatype_named
from halfserve.serve.client.errors import InvalidRequest
from halfserve.serve.client.infer_messages import Parameter, infer_request

MAX_REQUESTS = 10_000
# A sequence is at another step when its requests come again, so each request is sent as one of its own.
OF_ITS_TIME = frozenset({SEQUENCE_ID, SEQUENCE_START, SEQUENCE_END})
FLOATS = frozenset({"FP16", "BF16", "FP32", "FP64"})


@dataclass(frozen=True, eq=False, kw_only=True)
class CapturedMessages:
    """Messages for one model that are made of captured requests; the id of each is its position among these."""

    messages: Sequence[ModelInferRequest]
    rows: float  # mean size of the first dimension
    misfits: int  # requests that do not fit the model and are left out
    traffic: CapturedTraffic

    @property
    def text(self) -> str:
        traffic, sent = self.traffic, len(self.messages)
        first, last = traffic.period
        left_out = [
            (len(traffic.requests) - sent, "of another signature"),
            (len(traffic.times_s) - len(traffic.requests), "beyond the limit of memory, spread over the time"),
            (traffic.refused, "refused when they were captured"),
        ]
        reasons = "; ".join(f"{count:,} {reason}" for count, reason in left_out if count)
        return (
            f"requests: {sent:,} different ones of {traffic.captured:,} captured of {traffic.model} in {traffic.folder}, "
            f"{first} to {last}" + (f"; left out: {reasons}" if reasons else "")
        )

    def to_json(self) -> dict[str, Any]:
        """Return the object of bench.json's "capture"; see serve/benchmark/benchmark_report.py."""
        traffic = self.traffic
        return {
            "folder": str(traffic.folder),
            "model": traffic.model,
            "captured": traffic.captured,
            "sent": len(self.messages),
            "misfits": self.misfits,
            "refused": traffic.refused,
            "first": traffic.period[0],
            "last": traffic.period[1],
        }


def read_captured(folder: Path, model: str) -> CapturedTraffic:
    """Read what fits the limit of memory of a capture's requests of `model`, or of the only model that it has.

    Raises BenchmarkArgumentError: there are none, or a shard cannot be used.
    """

    def share(request: CapturedRequest) -> float:
        return max(request_bytes(request) / MAX_BYTES, 1 / MAX_REQUESTS)

    try:
        return read_traffic(folder, share, prefer=model)
    except CapturedRequestsError as error:
        raise BenchmarkArgumentError(f"--data {error}") from None


def captured_messages(
    traffic: CapturedTraffic,
    metadata: ModelMetadataResponse,
    required: Collection[str],
    *,
    version: str,
    parameters: Mapping[str, Parameter],
) -> CapturedMessages:
    """Make the requests that fit the model. Floats of another width are rounded to the model's.

    Args:
        traffic: the captured requests.
        metadata: the model's metadata.
        required: names of the inputs that every request must have.
        version: version of the model; "" for the server's choice.
        parameters: parameters of every request; they replace a request's own.

    Raises:
        BenchmarkArgumentError: no request fits; the text names an input and both forms.
    """
    messages: list[ModelInferRequest] = []
    rows, misfit = 0, ""
    for position, request in enumerate(traffic.requests):
        missing = next((name for name in sorted(required) if name not in request.inputs), None)
        if missing is not None:
            misfit = misfit or f"they have the inputs {', '.join(request.inputs)}, and no {missing!r}, which the model takes"
            continue
        own = {name: value for name, value in request.parameters.items() if name not in OF_ITS_TIME}
        try:
            message = infer_request(
                metadata,
                _rounded(request, metadata),
                version=version,
                request_id=str(position),
                parameters=own | dict(parameters),
            )
        except InvalidRequest as error:
            misfit = misfit or str(error)
            continue
        messages.append(message)
        rows += max((tensor.shape[0] for tensor in message.inputs if tensor.shape), default=1)
    if not messages:
        raise BenchmarkArgumentError(
            f"--data {traffic.folder}: no captured request fits the model: {misfit}; nothing was sent: "
            "name the --version that they were captured of, or capture others"
        )
    return CapturedMessages(
        messages=messages, rows=rows / len(messages), misfits=len(traffic.requests) - len(messages), traffic=traffic
    )


def _rounded(request: CapturedRequest, metadata: ModelMetadataResponse) -> dict[str, Array]:
    """Return the inputs of a request, with floats in the datatypes of the model. Raises InvalidRequest: one is out of range."""
    wires = {tensor.name: tensor.datatype for tensor in metadata.inputs}
    inputs = dict(request.inputs)
    for name, array in request.inputs.items():
        given, wanted = request.datatypes[name], wires.get(name, "")
        if given != wanted and {given, wanted} <= FLOATS:
            inputs[name] = converted(array, datatype_named(wanted), f"input {name!r} of model {metadata.name!r}")
    return inputs


def replay(traffic: CapturedTraffic, speed: float, *, seconds: float | None, requests: int | None) -> Load:
    """Return a load with the captured arrivals, `speed` times as fast, up to a time or a number of requests.

    Raises BenchmarkArgumentError: there are no times to replay.
    """
    times_s = (traffic.times_s - traffic.times_s[0]) / speed
    times_s = times_s[: requests if seconds is None else int((times_s < seconds).sum())]
    length_s = seconds if seconds is not None and len(times_s) < len(traffic.times_s) else float(times_s[-1])
    if length_s <= 0:
        raise BenchmarkArgumentError(
            f"--replay: {traffic.folder} has {len(traffic.times_s)} requests within {traffic.seconds:g} s, expected two at "
            "different times at least; leave --replay out"
        )
    return Load(rate=len(times_s) / length_s, speed=speed, times_s=times_s)
