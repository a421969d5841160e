"""One inference as an exchange, driven by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.client.errors import (
    AlreadyExists,
    ClientError,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    Repeat,
    ServerUnavailable,
    Unsupported,
)
from halfserve.serve.client.exchange import Exchange, UnaryRpc
from halfserve.serve.client.infer_exchange import InferState, infer
from halfserve.serve.client.infer_messages import infer_request
from halfserve.serve.client.shared_regions import SharedRegion
from tests.serve.client.driving import drive, metadata

LARGE = np.ones(100_000, np.float32)
AGAIN = [*["SystemSharedMemoryUnregister"] * 2, *["SystemSharedMemoryRegister"] * 2, "ModelInfer"]


def state_with(datatype: str, *, shared_memory: bool = False) -> InferState:
    state = InferState(shared_memory=shared_memory)
    state.batching["m", ""] = True
    state.metadata["m", ""] = metadata(datatype)
    return state


def ask(state: InferState, value: Any, **options: Any) -> Exchange[Any]:
    return infer(state, "m", {"x": value}, **options)


def test_old_metadata_does_not_refuse_inputs_of_a_new_model() -> None:
    state = state_with("FP32")
    called, _ = drive(ask(state, np.array([1.0])), [metadata("FP64"), pb.ModelInferResponse()])
    assert called == ["ModelMetadata", "ModelInfer"]
    assert state.metadata["m", ""].inputs[0].datatype == "FP64"


def test_a_large_request_is_fixed_when_it_is_made() -> None:
    value = np.arange(40_000, dtype=np.float32)[::2]
    step = next(ask(state_with("FP32"), value, parameters={"n": 1}))
    assert isinstance(step, UnaryRpc)
    before = infer_request(metadata("FP32"), {"x": value}, parameters={"n": 1})
    value[:] = 0
    assert pb.ModelInferRequest.FromString(step.serialized()) == before


def test_fresh_metadata_decides() -> None:
    exchange = ask(InferState(), np.array([1.0]))
    next(exchange)
    with pytest.raises(InvalidRequest, match="takes FP32, but the array is float64"):
        exchange.send(metadata("FP32"))
    with pytest.raises(InvalidRequest, match="takes FP32, but the array is float64"):
        drive(ask(state_with("FP16"), np.array([1.0])), [metadata("FP32")])


@pytest.mark.parametrize("refusal", [InvalidRequest("wrong shape"), ModelNotFound("unloaded")])
def test_metadata_is_forgotten_when_the_server_refuses(refusal: ClientError) -> None:
    state = state_with("FP32")
    with pytest.raises(type(refusal), match=str(refusal)):
        drive(ask(state, [1]), [refusal])
    assert state.metadata == {}


def test_metadata_outlives_an_unreachable_server() -> None:
    state = state_with("FP32")
    with pytest.raises(ServerUnavailable, match="gone"):
        drive(ask(state, [1]), [ServerUnavailable("gone")])
    assert ("m", "") in state.metadata


@pytest.mark.parametrize(
    ("options", "expected"), [({}, True), ({"idempotent": False}, False), ({"parameters": {"sequence_id": 3}}, False)]
)
def test_what_counts_as_idempotent(options: dict[str, Any], expected: bool) -> None:
    step = next(ask(state_with("FP32"), [1], **options))
    assert isinstance(step, UnaryRpc)
    assert step.idempotent is expected


def shared(step: Any) -> list[str]:
    assert step.method == "ModelInfer"
    return [tensor.parameters["shared_memory_region"].string_param for tensor in step.request.inputs]


def register(exchange: Exchange[Any]) -> Any:
    """Answer the registrations of an input and an output; returns the ModelInfer call."""
    assert next(exchange).method == "SystemSharedMemoryRegister"  # type: ignore[union-attr]  # (a pause would fail the test too)
    assert exchange.send(None).method == "SystemSharedMemoryRegister"  # type: ignore[union-attr]  # (see above)
    return exchange.send(None)


def late(state: InferState) -> list[str]:
    """Make a request that gets no answer in time; returns its input's region."""
    exchange = ask(state, LARGE)
    regions = shared(register(exchange))
    with pytest.raises(DeadlineExceeded):
        exchange.throw(DeadlineExceeded("late"))
    return regions


def test_shared_memory_is_tried_once_on_a_server_without_it() -> None:
    state = state_with("FP32", shared_memory=True)
    called, _ = drive(ask(state, LARGE), [Unsupported("off"), pb.ModelInferResponse()])
    assert called == ["SystemSharedMemoryRegister", "ModelInfer"]
    assert drive(ask(state, LARGE), [pb.ModelInferResponse()])[0] == ["ModelInfer"]


def test_memory_that_the_server_may_still_write_is_not_reused() -> None:
    state = state_with("FP32", shared_memory=True)
    (region,) = late(state)
    called, _ = drive(ask(state, LARGE), [None] * 4 + [pb.ModelInferResponse()])
    assert called == AGAIN
    assert region not in shared(next(ask(state, LARGE)))


def test_failed_unregistrations_are_repeated() -> None:
    state = state_with("FP32", shared_memory=True)
    late(state)
    gone = ServerUnavailable("gone", repeat=Repeat.SAFE)
    with pytest.raises(ServerUnavailable, match="gone"):
        drive(ask(state, LARGE), [gone, gone])
    called, _ = drive(ask(state, LARGE), [None, None, AlreadyExists("known"), None, pb.ModelInferResponse()])
    assert called == AGAIN


@pytest.mark.parametrize("failure", [DeadlineExceeded("late"), GeneratorExit()])
def test_memory_that_may_be_registered_is_unregistered(failure: BaseException) -> None:
    state = state_with("FP32", shared_memory=True)
    given_up = ask(state, LARGE)
    assert next(given_up).method == "SystemSharedMemoryRegister"  # type: ignore[union-attr]  # (see above)
    with pytest.raises(type(failure)):
        given_up.throw(failure)
    called, _ = drive(ask(state, LARGE), [None] * 3 + [pb.ModelInferResponse()])
    assert called == ["SystemSharedMemoryUnregister", *["SystemSharedMemoryRegister"] * 2, "ModelInfer"]


def test_a_cancelled_unregistration_is_done_later() -> None:
    state = state_with("FP32", shared_memory=True)
    late(state)
    given_up = ask(state, LARGE)
    assert next(given_up).method == "SystemSharedMemoryUnregister"  # type: ignore[union-attr]  # (see above)
    given_up.close()
    called, _ = drive(ask(state, LARGE), [None] * 4 + [pb.ModelInferResponse()])
    assert called == AGAIN


def test_memory_of_a_refused_request_is_reused() -> None:
    state = state_with("FP32", shared_memory=True)
    refused = ask(state, LARGE)
    register(refused)
    with pytest.raises(Overloaded):
        refused.throw(Overloaded("full"))
    assert drive(ask(state, LARGE), [pb.ModelInferResponse()])[0] == ["ModelInfer"]


def test_memory_is_registered_again_at_a_restarted_server() -> None:
    state = state_with("FP32", shared_memory=True)
    answers = [None, None, ModelNotFound("not registered"), None, None, pb.ModelInferResponse()]
    called, _ = drive(ask(state, LARGE), answers)
    assert called == [*["SystemSharedMemoryRegister"] * 2, "ModelInfer", *["SystemSharedMemoryRegister"] * 2, "ModelInfer"]


def test_requests_with_forgotten_memory_are_both_repeated() -> None:
    state, region = state_with("FP32"), SharedRegion(64)
    state.add_region(region)
    first, second = (ask(state, region.array(4, np.float32)) for _ in range(2))
    steps: list[Any] = [next(exchange) for exchange in (first, second)]
    steps += [exchange.throw(ModelNotFound("not registered")) for exchange in (first, second)]
    steps += [first.send(None), second.throw(AlreadyExists("by the first"))]
    assert [step.method for step in steps] == [*["ModelInfer"] * 2, *["SystemSharedMemoryRegister"] * 2, *["ModelInfer"] * 2]


@pytest.mark.parametrize(
    ("said", "reserved"),
    [
        (pb.ModelConfigResponse(), False),
        (Unsupported("no"), False),
        (pb.ModelConfigResponse(config={"max_batch_size": 2}), True),
    ],
)
def test_room_is_made_for_outputs_of_batching_models(said: Any, reserved: bool) -> None:
    state = state_with("FP32", shared_memory=True)
    state.batching.clear()
    memory = [None] * (2 if reserved else 1)
    called, _ = drive(ask(state, LARGE), [said, *memory, pb.ModelInferResponse()])
    assert called == ["ModelConfig", *["SystemSharedMemoryRegister"] * len(memory), "ModelInfer"]
    assert drive(ask(state, LARGE), [pb.ModelInferResponse()])[0] == ["ModelInfer"]


def test_a_shared_output_without_parameters_in_the_answer() -> None:
    state, region = state_with("FP32"), SharedRegion(64)
    state.add_region(region)
    room = region.array(4, np.float32)
    exchange = ask(state, [1], into={"y": room})
    next(exchange)
    room[:] = [5, 6, 7, 8]
    response = pb.ModelInferResponse(raw_output_contents=[b""])
    response.outputs.add(name="y", datatype="FP32", shape=[3])
    with pytest.raises(StopIteration) as finished:
        exchange.send(response)
    y = finished.value.value.outputs["y"]
    assert y.tolist() == [5, 6, 7]
    assert np.shares_memory(y, room)
