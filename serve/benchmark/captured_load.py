"""Captured requests as a load: the requests to send, and the times of a replay."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from halfserve.protos.captured_requests import (
    CapturedRequest,
    CapturedRequestsError,
    CapturedTraffic,
    SampledTraffic,
    read_traffic,
)
from halfserve.protos.inference_pb2 import ModelInferRequest, ModelMetadataResponse
from halfserve.protos.request_parameters import SEQUENCE_END, SEQUENCE_ID, SEQUENCE_START
from halfserve.serve.benchmark import BenchmarkArgumentError
from halfserve.serve.benchmark.level import Load
from halfserve.serve.benchmark.request_inputs import MAX_BYTES
from halfserve.serve.client.array_conversion import Array, converted, datatype_named
from halfserve.serve.client.errors import InvalidRequest
from halfserve.serve.client.infer_messages import Parameter, infer_request

MAX_ROWS = 10_000
# A sequence is at another step when its requests come again, so each request is sent as one of its own.
OF_ITS_TIME = frozenset({SEQUENCE_ID, SEQUENCE_START, SEQUENCE_END})
FLOATS = frozenset({"FP16", "BF16", "FP32", "FP64"})


def read_captured(folder: Path, model: str) -> CapturedTraffic:
    """Read what fits the limit of memory of a capture's requests of `model`, or of the only model that it has.

    Raises BenchmarkArgumentError: there are none, or a shard cannot be used.
    """
    try:
        return read_traffic(folder, model, most_rows=MAX_ROWS, most_bytes=MAX_BYTES)
    except CapturedRequestsError as error:
        raise BenchmarkArgumentError(f"--data {error}") from None


def captured_messages(
    traffic: CapturedTraffic,
    metadata: ModelMetadataResponse,
    required: Collection[str],
    *,
    version: str,
    parameters: Mapping[str, Parameter],
) -> tuple[list[ModelInferRequest], float, SampledTraffic]:
    """Make the requests that fit the model; return them, their mean number of rows, and what reports say of them.

    Floats of another width are rounded to the model's. The id of each request is its position among the captured ones.

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
        rows += request.rows
    if not messages:
        raise BenchmarkArgumentError(
            f"--data {traffic.folder}: no captured request fits the model: {misfit}; nothing was sent: "
            "name the --version that they were captured of, or capture others"
        )
    return messages, rows / len(messages), traffic.sampled(len(messages))


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
        raise BenchmarkArgumentError(f"--replay: {traffic.folder} has no two requests at different times; leave --replay out")
    return Load(rate=len(times_s) / length_s, speed=speed, times_s=times_s)
