"""Captured requests as a load: the requests to send, and the times of a replay."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from halfserve.protos.captured_requests import CapturedRequest, CapturedTraffic, SampledTraffic
from halfserve.protos.inference_pb2 import ModelInferRequest, ModelMetadataResponse
from halfserve.protos.request_parameters import SEQUENCE_END, SEQUENCE_ID, SEQUENCE_START
from halfserve.serve.benchmark import BenchmarkArgumentError
from halfserve.serve.benchmark.level import Load
from halfserve.serve.client.errors import InvalidRequest
from halfserve.serve.client.infer_messages import Parameter, infer_request

# A sequence is at another step when its requests come again, so each request is sent as one of its own.
OF_ITS_TIME = frozenset({SEQUENCE_ID, SEQUENCE_START, SEQUENCE_END})
FLOATS = frozenset({"FP16", "BF16", "FP32", "FP64"})


def captured_messages(
    traffic: CapturedTraffic,
    metadata: ModelMetadataResponse,
    required: Collection[str],
    *,
    version: str,
    parameters: Mapping[str, Parameter],
) -> tuple[list[ModelInferRequest], float, SampledTraffic]:
    """Make the requests that fit the model; return them, their mean number of rows, and what reports say of them.

    Floats of another width are rounded to the model's. The id of each request is its position among the captured ones. Every
    request must have the `required` inputs; `parameters` replace a request's own.

    Raises:
        BenchmarkArgumentError: no request fits; the text names an input and both forms.
    """
    messages: list[ModelInferRequest] = []
    wires = {tensor.name: tensor.datatype for tensor in metadata.inputs}
    rows, misfit = 0, ""
    for position, request in enumerate(traffic.requests):
        missing = next((name for name in sorted(required) if name not in request.inputs), None)
        if missing is not None:
            misfit = misfit or f"they have the inputs {', '.join(request.inputs)}, and no {missing!r}, which the model takes"
            continue
        given = request.datatypes
        kept = {name: value for name, value in request.parameters.items() if name not in OF_ITS_TIME}
        try:
            message = infer_request(
                _taking_files(metadata, request),
                request.inputs,
                version=version,
                request_id=str(position),
                parameters=kept | dict(parameters),
                cast=all(own == wires.get(name) or {own, wires.get(name)} <= FLOATS for name, own in given.items()),
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


def _taking_files(metadata: ModelMetadataResponse, request: CapturedRequest) -> ModelMetadataResponse:
    """Return metadata of a request with picture files, which a server takes in place of pixels, uint8 [..., 3]."""
    changed = ModelMetadataResponse()
    changed.CopyFrom(metadata)
    for tensor in changed.inputs:
        if request.datatypes.get(tensor.name) == "BYTES" and tensor.datatype == "UINT8" and tensor.shape[-1:] == [3]:
            tensor.datatype, tensor.shape[:] = "BYTES", request.inputs[tensor.name].shape
    return changed


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
