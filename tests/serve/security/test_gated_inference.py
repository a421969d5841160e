"""The way in of one caller, before an engine that only notes what comes."""

from __future__ import annotations

import time

import pytest

from protos.inference_pb2 import ModelInferRequest
from serve.engine.errors import InferenceError, PermissionDeniedError, RateLimitedError
from serve.protocol.inference import Cancel, Reply, Watch
from serve.security.client_limits import Share
from serve.security.gated_inference import GatedInference
from serve.security.options import ClientLimits


class Noting:
    """Notes requests, and which were cancelled.

    Attributes:
        replies: of the requests, in order.
        cancelled: their places.
    """

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.cancelled: list[int] = []

    def infer(self, data: bytes | memoryview, time_left_s: float | None, reply: Reply, watch: Watch | None = None) -> Cancel:
        place = len(self.replies)
        self.replies.append(reply)
        return lambda: self.cancelled.append(place)

    def failed(self, data: bytes, error: Exception) -> None:
        """Nothing."""

    def gone(self, data: bytes) -> None:
        """Nothing."""


def gated(engine: Noting, share: Share | None = None, *, may_share: bool = True) -> GatedInference:
    return GatedInference(engine, share=share, check=None, may_share=may_share, count=lambda _: None)


def test_a_place_is_given_back_once_however_a_request_ends() -> None:
    engine, answers = Noting(), list[bytes | InferenceError]()
    caller = gated(engine, Share(ClientLimits(max_concurrent=1), time.monotonic))
    answered = caller.infer(b"", None, answers.append)
    engine.replies[0](b"answer")
    answered()  # too late to be of use
    cancelled = caller.infer(b"", None, answers.append)
    with pytest.raises(RateLimitedError, match="1 requests in progress"):
        caller.infer(b"", None, answers.append)
    cancelled()
    assert 1 in engine.cancelled, "the engine is told, too"
    caller.infer(b"", None, answers.append)
    with pytest.raises(RateLimitedError, match="1 requests in progress"):
        caller.infer(b"", None, answers.append)
    assert answers == [b"answer"]


@pytest.mark.parametrize("where", ["first input", "last input", "first output", "last output"])
def test_shared_memory_is_found_wherever_a_request_names_it(where: str) -> None:
    message = ModelInferRequest(model_name="m")
    which, kind = where.split()
    tensors = message.inputs if kind == "input" else message.outputs
    for name in ("a", "b"):
        message.inputs.add(name=name)
        message.outputs.add(name=name)
    engine = Noting()
    caller = gated(engine, may_share=False)
    caller.infer(message.SerializeToString(), None, lambda _: None)
    tensors[0 if which == "first" else 1].parameters["shared_memory_region"].string_param = "theirs"
    with pytest.raises(PermissionDeniedError, match="the token may not use shared memory"):
        caller.infer(message.SerializeToString(), None, lambda _: None)
    assert len(engine.replies) == 1


def test_a_tensor_may_hold_the_parameters_name() -> None:
    engine = Noting()
    message = ModelInferRequest(model_name="m", raw_input_contents=[b"shared_memory_region"])
    message.inputs.add(name="a")
    message.outputs.add(name="b")
    gated(engine, may_share=False).infer(message.SerializeToString(), None, lambda _: None)
    assert len(engine.replies) == 1
