"""Requests whose tensors lie in system shared memory, in and out, on the server's own machine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from protos import inference_pb2 as pb

if TYPE_CHECKING:
    from serve.client import InferenceClient

ALIGNMENT = 64  # of a tensor's first byte, as CPUs like to read them
REGION, OFFSET, BYTE_SIZE = "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"


class _Places:
    """Gives out parts of a region, of which `end` bytes are taken."""

    def __init__(self) -> None:
        self.end = 0

    def take(self, size: int) -> int:
        """The offset of a new part."""
        offset = -(-self.end // ALIGNMENT) * ALIGNMENT
        self.end = offset + size
        return offset


def shared_requests(
    client: InferenceClient,
    requests: Sequence[pb.ModelInferRequest],
    answers: Sequence[pb.ModelInferResponse],
    stack: ExitStack,
) -> list[pb.ModelInferRequest]:
    """Requests that tell where their tensors lie, instead of having them inside.

    Inputs lie in shared memory once per distinct request. Outputs have a place per distinct request too, which requests in
    flight at the same time may share: the answers are not read.

    Args:
        client: of the server, which must be on this machine.
        requests: with raw inputs.
        answers: to each of them; tell the outputs and their sizes.
        stack: holds the memory for as long as it is needed.

    Raises:
        InferenceClientError: the server does not take shared memory, is not on this machine, or there is not enough of it.
    """
    places = _Places()
    plans = [[places.take(len(content)) for content in request.raw_input_contents] for request in requests]
    results = [[places.take(len(content)) for content in answer.raw_output_contents] for answer in answers]
    region = stack.enter_context(client.shared_region(max(places.end, 1)))
    memory = region.array(max(places.end, 1), np.uint8)
    rewritten = []
    for request, answer, offsets, outputs in zip(requests, answers, plans, results, strict=True):
        for offset, content in zip(offsets, request.raw_input_contents, strict=True):
            memory[offset : offset + len(content)] = np.frombuffer(content, np.uint8)
        rewritten.append(_rewritten(request, answer, region.name, offsets, outputs))
    return rewritten


def _rewritten(
    request: pb.ModelInferRequest, answer: pb.ModelInferResponse, region: str, offsets: Sequence[int], outputs: Sequence[int]
) -> pb.ModelInferRequest:
    changed = pb.ModelInferRequest()
    changed.CopyFrom(request)
    del changed.raw_input_contents[:]
    for tensor, content, offset in zip(changed.inputs, request.raw_input_contents, offsets, strict=True):
        _point(tensor.parameters, region, offset, len(content))
    for output, content, offset in zip(answer.outputs, answer.raw_output_contents, outputs, strict=True):
        _point(changed.outputs.add(name=output.name).parameters, region, offset, len(content))
    return changed


def _point(parameters: Any, region: str, offset: int, size: int) -> None:
    parameters[REGION].string_param = region
    parameters[OFFSET].int64_param = offset
    parameters[BYTE_SIZE].int64_param = size
