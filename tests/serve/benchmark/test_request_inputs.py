from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfserve.protos import inference_pb2 as pb
from halfserve.protos.datatypes import BY_WIRE, DATATYPES
from halfserve.serve.benchmark import BenchmarkArgumentError, request_inputs
from halfserve.serve.benchmark.request_inputs import RequestPlan, parse_parameters, parse_shapes, random_values, zero_values
from halfserve.serve.protocol.raw_tensors import from_raw

Array = np.ndarray[Any, Any]


def plan(shape: tuple[int, ...] = (-1, 2), datatype: str = "FP32", **changes: Any) -> RequestPlan:
    tensor = pb.ModelMetadataResponse.TensorMetadata(name="x", datatype=datatype, shape=shape)
    metadata = pb.ModelMetadataResponse(name="m", inputs=[tensor])
    options: dict[str, Any] = {"metadata": metadata, "max_batch_size": 8, "batch_size": 1, "shapes": {}, "given": {}}
    return RequestPlan(**(options | changes))


def tensors(requests: list[pb.ModelInferRequest]) -> list[Array]:
    """The input x of each request."""
    rows = {row.wire: row for row in DATATYPES}
    return [from_raw(r.raw_input_contents[0], rows[r.inputs[0].datatype], r.inputs[0].shape) for r in requests]


def test_random_requests_differ_from_each_other_and_not_from_run_to_run() -> None:
    first, again = plan(batch_size=3).requests(), plan(batch_size=3).requests()
    assert first == again
    assert len({request.SerializeToString() for request in first}) == len(first) == 8
    assert {x.shape for x in tensors(first)} == {(3, 2)}


def test_given_rows_are_sent_in_turn() -> None:
    rows = np.arange(10, dtype=np.float32).reshape(5, 2)
    sent = tensors(plan(batch_size=2, given={"x": rows}).requests())
    assert [x[:, 0].tolist() for x in sent] == [[0, 2], [4, 6], [8, 0]]


def test_fewer_rows_than_a_batch_are_repeated() -> None:
    sent = tensors(plan(batch_size=5, given={"x": np.array([[1, 1], [2, 2]], np.float32)}).requests())
    assert [x[:, 0].tolist() for x in sent] == [[1, 2, 1, 2, 1]]


def test_a_model_without_batches_gets_its_tensors_whole() -> None:
    given_whole = np.array([1, 2, 3], np.float32)
    assert [x.tolist() for x in tensors(plan((3,), max_batch_size=0, given={"x": given_whole}).requests())] == [[1, 2, 3]]
    assert {x.shape for x in tensors(plan((3,), max_batch_size=0).requests())} == {(3,)}


def test_variable_sizes_are_chosen() -> None:
    sent = tensors(plan((-1, -1, 4), shapes={"x": [6, 4]}, batch_size=2).requests())
    assert {x.shape for x in sent} == {(2, 6, 4)}


def test_another_datatype_gets_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_inputs, "MAX_BYTES", 48)  # three requests of two inputs in fp32, six in fp16

    def sent(datatype: str) -> list[list[Array]]:
        inputs = [pb.ModelMetadataResponse.TensorMetadata(name=name, datatype=datatype, shape=[-1, 2]) for name in "ab"]
        requests = plan(metadata=pb.ModelMetadataResponse(name="m", inputs=inputs)).requests()
        return [[from_raw(raw, BY_WIRE[datatype], [1, 2]) for raw in request.raw_input_contents] for request in requests]

    wide, narrow = sent("FP32"), sent("FP16")
    assert (len(wide), len(narrow)) == (3, 6)
    np.testing.assert_array_equal(np.array(wide).astype(np.float16), np.array(narrow[:3]))
    assert not np.array_equal(wide[0][0], wide[0][1])


def test_few_distinct_requests_if_they_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_inputs, "MAX_BYTES", 3 * 8)  # one row of two fp32 has 8 bytes
    assert len(plan().requests()) == 3
    monkeypatch.setattr(request_inputs, "MAX_BYTES", 1)
    assert len(plan().requests()) == 1


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"shapes": {"x": [3]}}, r"--shape x: \[3\] does not fit the model's \[2\] \(-1: any size\)"),
        ({"shapes": {"x": [1, 2]}}, r"--shape x: \[1, 2\] does not fit the model's \[2\]"),
        ({"shapes": {"z": [2]}}, "--shape z: model 'm' has the inputs x"),
        ({"given": {"x": np.zeros((0, 2), np.float32)}}, "--input x: the given array has no rows, expected at least one"),
        ({"batch_size": 9}, "--batch-size 9: model 'm' takes 1 to 8 rows a request"),
        ({"batch_size": 2, "max_batch_size": 0}, "model 'm' has no batch dimension: leave --batch-size at 1, not 2"),
    ],
)
def test_options_that_do_not_fit_the_model_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(BenchmarkArgumentError, match=text):
        plan(**changes).requests()


@given(st.sampled_from(DATATYPES), st.integers(0, 2**32))
def test_random_values_are_finite_and_of_the_datatype(datatype: Any, seed: int) -> None:
    values = random_values(datatype, [3, 4], np.random.default_rng(seed))
    assert values.shape == (3, 4)
    assert values.dtype == (np.uint16 if datatype.wire == "BF16" else datatype.numpy)
    if datatype.wire == "BYTES":
        assert all(isinstance(v, bytes) and len(v) == 8 for v in values.ravel())
    elif datatype.wire == "BF16":
        assert np.isfinite((values.astype(np.uint32) << 16).view(np.float32)).all()
    else:
        assert np.isfinite(values).all()
        assert values.dtype.kind == "f" or set(values.ravel().tolist()) <= {0, 1}


def test_shapes_are_parsed() -> None:
    assert parse_shapes([]) == [{}]
    assert parse_shapes(["x:1,8,8", "a:b:3"]) == [{"x": [1, 8, 8], "a:b": [3]}]
    assert parse_shapes(["x:1", "y:5", "x:2"]) == [{"x": [1], "y": [5]}, {"x": [2], "y": [5]}]


@pytest.mark.parametrize("argument", ["x", "x:", ":1", "x:0", "x:1,-2", "x:1;2", "x:1,", "x:²", f"x:{'9' * 5000}"])
def test_malformed_shapes_are_refused(argument: str) -> None:
    with pytest.raises(BenchmarkArgumentError, match=f"--shape {argument}: expected NAME:SIZE,... without the batch size"):
        parse_shapes([argument])


def test_parameters_are_parsed_and_sent() -> None:
    parameters = parse_parameters(
        ["priority=1", "wait=0.5", "fast=true", "name=a=b", "list=[1]", "empty=", f"long={'7' * 5000}"]
    )
    assert parameters == {
        "priority": 1,
        "wait": 0.5,
        "fast": True,
        "name": "a=b",
        "list": "[1]",
        "empty": "",
        "long": "7" * 5000,
    }
    (request, *_) = plan(parameters=parameters).requests()
    assert request.parameters["priority"].int64_param == 1
    assert request.parameters["fast"].bool_param
    with pytest.raises(BenchmarkArgumentError, match="--parameter priority: expected NAME=VALUE, such as priority=1"):
        parse_parameters(["priority"])


def test_zeros_of_every_datatype() -> None:
    (sent,) = {x.tobytes() for x in tensors(plan(zeros=True).requests())}
    assert not any(sent)
    assert zero_values(BY_WIRE["BYTES"], [2, 1]).tolist() == [[b""], [b""]]
