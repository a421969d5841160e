"""Streams that mix bad and good requests: each request gets its own answer, in order, and the stream continues."""

from __future__ import annotations

import random
from functools import partial

from google.protobuf.message import DecodeError

from halfserve.protos.inference_pb2 import ModelStreamInferResponse
from halfserve.serve.benchmark.load.calls import framed
from tests.serve.faults.exchange import Answer, call_headers, messages_in
from tests.serve.faults.malforming.case import Case, message_complaint
from tests.serve.faults.malforming.interfaces import good_request
from tests.serve.faults.malforming.messages import MAKERS
from tests.serve.faults.malforming.oracle import Due, due

STREAM_HEADERS = call_headers("/inference.GRPCInferenceService/ModelStreamInfer")
STATUS = "grpc-status"
REQUESTS = 8


def stream_case(chance: random.Random) -> Case:
    """One stream with half of the requests malformed."""
    makers = list(MAKERS.values())
    messages = [
        chance.choice(makers)(chance) if chance.random() < 0.5 else good_request(chance).SerializeToString()
        for _ in range(REQUESTS)
    ]
    check = partial(_complaint, [due(message) for message in messages])
    return Case("in streams", b"".join(map(framed, messages)), check, STREAM_HEADERS, messages=REQUESTS)


def _complaint(given: list[Due], answer: Answer) -> str:
    if answer.code != 0:
        return f"the stream ended with status {answer.code} ({answer.text[:200]}), expected 0"
    try:
        answers = [ModelStreamInferResponse.FromString(message) for message in messages_in(answer.body)]
    except (ValueError, DecodeError) as error:
        return f"an answer is no ModelStreamInferResponse: {error}"
    if len(answers) != len(given):
        return f"{len(answers)} answers to {len(given)} requests"
    for number, (one, message) in enumerate(zip(given, answers, strict=True)):
        code = message.infer_response.parameters[STATUS].int64_param if message.error_message else 0
        complaint = message_complaint(one, code, message.error_message, message.infer_response.SerializeToString())
        if complaint:
            return f"request {number} of the stream: {complaint}"
    return ""
