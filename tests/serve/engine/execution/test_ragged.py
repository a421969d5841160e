"""Ragged batches: requests of different shapes joined, with Triton's batch inputs, and outputs dealt out."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio

from halfserve.protos.model_config_pb2 import BatchInput
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.execution.batch import run_batch
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.padding.ragged import MAKERS, Ragged
from halfserve.serve.engine.repository.model_loading import started
from halfserve.serve.engine.repository.model_repository import find_models
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.results import Answered, Failed
from halfserve.serve.engine.tensors import Tensors
from tests.models import save_text
from tests.serve.engine.fakes import FakeBackend
from tests.serve.model_control.controlled import loader
from tests.serve.running_server import running_server

SHAPES = [(1, 2), (2, 3), (1, 1)]
CONFIG = """
max_batch_size: 16
input [{ name: "VALUES" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }]
output [{ name: "SUM" data_type: TYPE_FP32 dims: [ 1 ] }, { name: "SQUARES" data_type: TYPE_FP32 dims: [ -1 ] }]
batch_input [{
  kind: BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO target_name: "BOUNDS" data_type: TYPE_INT32 source_input: "VALUES"
}]
batch_output [{ target_name: "SQUARES" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "VALUES" }]
"""


def save_segment_sums(folder: Path, config: str = CONFIG) -> Path:
    """VALUES FP32 [elements], BOUNDS INT32 [requests + 1] -> SUM FP32 [requests, 1], SQUARES FP32 [elements].

    A sum is the difference of the running sums at a request's bounds.
    """
    text = """(float[elements] VALUES, int32[bounds] BOUNDS) => (float[requests, 1] SUM, float[elements] SQUARES) {
        running = CumSum(VALUES, axis)  sums = Concat<axis = 0>(zero, running)  at = Gather(sums, BOUNDS)
        ends = Slice(at, one, all)  starts = Slice(at, first, last)  flat = Sub(ends, starts)  SUM = Unsqueeze(flat, one)
        SQUARES = Mul(VALUES, VALUES) }"""
    indices = {"axis": np.array(0), "first": np.array([0]), "one": np.array([1]), "last": np.array([-1])}
    save_text(folder / "1" / "model.onnx", text, zero=np.zeros(1, np.float32), all=np.array([2**31 - 1]), **indices)
    (folder / "config.pbtxt").write_text(config)
    return folder


def loaded(root: Path) -> Model:
    (files,) = find_models(root)
    return started(loader().load(files))


@pytest.mark.parametrize(
    ("kind", "shapes", "expected"),
    [
        (BatchInput.BATCH_ELEMENT_COUNT, SHAPES, [2, 6, 1]),
        (BatchInput.BATCH_ACCUMULATED_ELEMENT_COUNT, SHAPES, [2, 8, 9]),
        (BatchInput.BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO, SHAPES, [0, 2, 8, 9]),
        (BatchInput.BATCH_ITEM_SHAPE, SHAPES, [[2], [3], [3], [1]]),
        (BatchInput.BATCH_ITEM_SHAPE, [(2, 3, 1), (1, 2, 2)], [[3, 1], [3, 1], [2, 2]]),
        (BatchInput.BATCH_ITEM_SHAPE_FLATTEN, SHAPES, [2, 3, 3, 1]),
        (BatchInput.BATCH_ITEM_SHAPE_FLATTEN, [(2, 3, 1), (1, 2, 2)], [3, 1, 3, 1, 2, 2]),
        (BatchInput.BATCH_MAX_ELEMENT_COUNT_AS_SHAPE, SHAPES, [0] * 6),
    ],
)
def test_batch_inputs_describe_the_batch(kind: int, shapes: list[tuple[int, ...]], expected: list[Any]) -> None:
    made = MAKERS[kind](shapes)
    assert made.dtype == np.int64
    assert made.tolist() == expected


class Summing(FakeBackend):
    """x [elements] -> twice [elements]; fails on a negative value."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def run(self, inputs: Tensors) -> Tensors:
        self.seen.append(inputs["x"].tolist())
        if (inputs["x"] < 0).any():
            raise ValueError("negative values hurt")
        return {"twice": inputs["x"] * 2}


def test_a_failing_request_of_a_ragged_batch_fails_alone() -> None:
    ragged = Ragged(inputs=frozenset({"x"}), scattered={"twice": ((-1,), "x")})
    xs = [np.full(shape, value, np.float32) for shape, value in zip(SHAPES, (1, -1, 3), strict=True)]
    requests = [InferRequest({"x": x}, ("twice",), len(x), (None,), None, print) for x in xs]
    backend = Summing()
    results = run_batch(backend, requests, ragged=ragged)
    assert backend.seen[0] == [1, 1, -1, -1, -1, -1, -1, -1, 3]
    assert [result.request for result in results if isinstance(result, Failed)] == [requests[1]]
    answers = [answer["twice"].tolist() for result in results if isinstance(result, Answered) for answer in result.answers]
    assert answers == [[[2, 2]], [[6]]]


def test_an_output_of_another_size_is_an_error() -> None:
    ragged = Ragged(inputs=frozenset({"x"}), scattered={})
    request = InferRequest({"x": np.ones((1, 3), np.float32)}, ("twice",), 1, (None,), None, print)
    (failed,) = run_batch(Summing(), [request], ragged=ragged)
    assert isinstance(failed, Failed)
    assert "output 'twice' has shape [3], expected 1 rows, one per row of the batch" in str(failed.error)


def test_requests_of_different_shapes_share_a_ragged_batch(tmp_path: Path) -> None:
    save_segment_sums(tmp_path / "sums")
    random = np.random.default_rng(0)
    asked = [random.integers(0, 9, (1, size)).astype(np.float32) for size in random.integers(1, 40, 60)]

    async def ask(address: str) -> list[triton.InferResult]:
        async with triton_aio.InferenceServerClient(address) as client:
            inputs = [triton.InferInput("VALUES", list(x.shape), "FP32").set_data_from_numpy(x) for x in asked]
            return list(await asyncio.gather(*(client.infer("sums", [one]) for one in inputs)))

    def make() -> list[Model]:
        return [loaded(tmp_path)]

    with running_server(make) as server:
        answers = asyncio.run(ask(server.address))
        totals = server.call(lambda: server.core.model("sums").statistics.totals)
        with triton.InferenceServerClient(server.address) as client:
            metadata = client.get_model_metadata("sums")
    assert [(one.name, list(one.shape)) for one in metadata.inputs] == [("VALUES", [-1, -1])], "clients do not send the bounds"
    for x, answer in zip(asked, answers, strict=True):
        assert answer.as_numpy("SUM").tolist() == [[x.sum()]]
        assert np.array_equal(answer.as_numpy("SQUARES"), x * x)
    assert totals.batches < len(asked) / 2


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("max_batch_size: 16", "max_batch_size: 0", "a ragged batch needs a max_batch_size of 1 or more"),
        (
            'source_input: "VALUES"\n}',
            'source_input: "X"\n}',
            r"batch_input has source_input \['X'\], expected one of the inputs",
        ),
        ("TYPE_INT32", "TYPE_INT64", "batch_input of 'VALUES' has data_type INT64, expected TYPE_INT32 or TYPE_FP32"),
        ("TYPE_INT32", "TYPE_FP32", "batch_input 'BOUNDS' has FP32, the model takes INT32"),
        ('"BOUNDS"', '"ENDS"', "batch_input names the input 'ENDS', the model's are 'VALUES', 'BOUNDS'"),
        ('"BOUNDS"', '"VALUES"', "batch_input names 'VALUES', which is also among the inputs that clients send"),
        ('target_name: "SQUARES"', 'target_name: "CUBES"', "batch_output names 'CUBES', which is not among the outputs"),
        ("dims: [ -1 ] }]", "dims: [ 4, -1 ] }]", r"batch_output 'SQUARES' has dims \[4, -1\], whose open sizes come from"),
    ],
)
def test_ragged_settings_that_contradict_each_other_are_errors(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in CONFIG
    save_segment_sums(tmp_path / "sums", CONFIG.replace(old, new))
    with pytest.raises(ModelLoadError, match=message):
        loaded(tmp_path)


def test_a_model_that_takes_rows_is_no_ragged_model(tmp_path: Path) -> None:
    save_text(tmp_path / "m" / "1" / "model.onnx", "(float[batch, n] x) => (float[batch, n] y) { y = Relu(x) }")
    config = 'max_batch_size: 4 input [{ name: "x" data_type: TYPE_FP32 dims: [-1] allow_ragged_batch: true }]'
    (tmp_path / "m" / "config.pbtxt").write_text(config)
    with pytest.raises(
        ModelLoadError, match=r"input 'x' has allow_ragged_batch, but the model takes \[-1, -1\]; expected \[-1\]"
    ):
        loaded(tmp_path)
