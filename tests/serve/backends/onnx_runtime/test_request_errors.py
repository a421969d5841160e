"""Whose error it is when ONNX Runtime fails on a request."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from onnx import TensorProto, helper
from tritonclient.utils import InferenceServerException

from halfserve.serve.backends.onnx_runtime.request_errors import IndexRange, RequestErrors, index_ranges
from halfserve.serve.engine.backend import DevicePlacement
from halfserve.serve.engine.errors import BackendError, InvalidArgumentError
from halfserve.serve.engine.execution.tensor_runner import EVERY_S, FailureLog
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.results import Answered, Failed
from tests.models import save_model, save_picky
from tests.serve.backends.support import load_backend
from tests.serve.conftest import load_repository
from tests.serve.running_server import running_server

INT64, FLOAT = TensorProto.INT64, TensorProto.FLOAT
WORDS, LENGTH = 5, 4


def save_embedding(path: Path) -> Path:
    """ids INT64 [batch, n] -> y FP32 [batch, n]: the sum of a word's number (5 words) and a position's (4 positions)."""
    nodes = [
        helper.make_node("Cast", ["ids"], ["narrow"], to=TensorProto.INT32),
        helper.make_node("Gather", ["words", "narrow"], ["word"]),
        helper.make_node("Shape", ["ids"], ["length"], start=1),
        helper.make_node("Slice", ["positions", "zero", "length"], ["position"]),
        helper.make_node("Add", ["word", "position"], ["y"]),
    ]
    weights = {
        "words": np.arange(WORDS, dtype=np.float16),
        "positions": np.arange(LENGTH, dtype=np.float16),
        "zero": np.array([0]),
    }
    half = TensorProto.FLOAT16
    return save_model(path, nodes, [("ids", INT64, ["batch", "n"])], [("y", half, ["batch", "n"])], weights)


def save_sum(path: Path) -> Path:
    """a FP32 [batch, n], b FP32 [batch, m] -> y: a + b."""
    ins: list[Any] = [("a", FLOAT, ["batch", "n"]), ("b", FLOAT, ["batch", "m"])]
    return save_model(path, [helper.make_node("Add", ["a", "b"], ["y"])], ins, [("y", FLOAT, ["batch", "k"])])


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Models "embedding", "sum" and "picky"."""
    root = tmp_path_factory.mktemp("callers")
    save_embedding(root / "embedding" / "1" / "model.onnx")
    save_sum(root / "sum" / "1" / "model.onnx")
    save_picky(root / "picky" / "1" / "model.onnx")
    with running_server(lambda: load_repository(root)) as server, triton.InferenceServerClient(server.address) as connected:
        yield connected


def ids_of(values: list[list[int]], name: str = "ids") -> list[Any]:
    ids = np.array(values, np.int64)
    return [triton.InferInput(name, list(ids.shape), "INT64").set_data_from_numpy(ids)]


def refused(client: Any, model: str, inputs: list[Any], **how: Any) -> tuple[str, str]:
    with pytest.raises(InferenceServerException) as error:
        client.infer(model, inputs, **how)
    return str(error.value.status()), str(error.value.message())


@pytest.mark.parametrize("value", [WORDS, -WORDS - 1, 2**30])
def test_an_index_out_of_the_vocabulary_is_the_callers_error(client: Any, value: int) -> None:
    status, text = refused(client, "embedding", ids_of([[0, 1], [1, value]]))
    assert status == "StatusCode.INVALID_ARGUMENT"
    assert text == f"input 'ids' has the value {value}, expected -5 to 4: it is the index of one of 5 rows"


def test_only_the_request_at_fault_fails(client: Any) -> None:
    def ask(value: int) -> Any:
        results: list[Any] = []
        client.async_infer("embedding", ids_of([[value, 0]]), callback=lambda result, error: results.append(error or result))
        return results

    waiting = [ask(value) for value in (1, 2, 9, 3)]
    answers = []
    for results in waiting:
        while not results:
            client.is_server_live()
        answers.append(results[0])
    texts = [
        str(answer) if isinstance(answer, InferenceServerException) else answer.as_numpy("y").tolist() for answer in answers
    ]
    assert texts[:2] + texts[3:] == [[[1, 1]], [[2, 1]], [[3, 1]]]
    assert "'ids' has the value 9" in texts[2]


def test_a_length_beyond_the_models_is_the_callers_error(client: Any) -> None:
    assert client.infer("embedding", ids_of([[0] * LENGTH])).as_numpy("y").tolist() == [[0, 1, 2, 3]]
    status, text = refused(client, "embedding", ids_of([[0] * (LENGTH + 1)]))
    assert status == "StatusCode.INVALID_ARGUMENT"
    assert text.startswith("the model cannot compute inputs of these sizes: 'ids' [1, 5]; expected sizes that fit each other")
    assert "/onnxruntime_src/" not in text


def test_free_sizes_that_do_not_fit_each_other_are_the_callers_error(client: Any) -> None:
    def ask(n: int, m: int) -> list[Any]:
        return [
            triton.InferInput(name, [1, size], "FP32").set_data_from_numpy(np.ones((1, size), np.float32))
            for name, size in (("a", n), ("b", m))
        ]

    assert client.infer("sum", ask(3, 3)).as_numpy("y").tolist() == [[2, 2, 2]]
    status, text = refused(client, "sum", ask(3, 4))
    assert (status, "'a' [1, 3], 'b' [1, 4]" in text) == ("StatusCode.INVALID_ARGUMENT", True)


def test_the_models_own_failure_is_internal_and_logged_with_its_cause(client: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        status, _ = refused(client, "picky", ids_of([[7]], "i"), request_id="gr\u00fcn 7")
        refused(client, "embedding", ids_of([[9]]))
    assert status == "StatusCode.INTERNAL"
    (line,) = caplog.messages
    assert line.startswith("picky/1 instance 0: failed on request 'gr\u00fcn 7': the model failed on this request: ")
    assert "indices element out of data bounds" in line


def test_failures_are_logged_once_a_second(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    log = FailureLog("m/1 instance 0", lambda: now)

    def failed(error: InvalidArgumentError | BackendError) -> list[Answered | Failed]:
        return [Failed(InferRequest({}, (), 1, None, None, lambda _: None), error)]

    for _ in range(3):
        log.note(failed(BackendError("it broke")))
    log.note(failed(InvalidArgumentError("not the model's")))
    now += EVERY_S
    log.note(failed(BackendError("it broke")))
    assert caplog.messages == [
        "m/1 instance 0: failed on a request without an id: it broke",
        "m/1 instance 0: failed on a request without an id: it broke (2 more failed since the last such line)",
    ]


def graph_of(nodes: list[Any], inputs: list[str], tables: dict[str, int], number: int = INT64) -> onnx.GraphProto:
    values = [helper.make_tensor_value_info(name, number, ["n"]) for name in inputs]
    weights = [TensorProto(name=name, dims=[rows, 2], data_type=FLOAT) for name, rows in tables.items()]  # bytes left out
    return helper.make_graph(nodes, "g", values, [], weights)


def test_ranges_are_read_through_what_changes_no_index() -> None:
    gather = helper.make_node("Gather", ["table", "c"], ["y"])
    ways = {
        "Identity": [helper.make_node("Identity", ["i"], ["c"])],
        "Reshape": [helper.make_node("Cast", ["i"], ["b"], to=INT64), helper.make_node("Reshape", ["b", "s"], ["c"])],
        "Add": [helper.make_node("Add", ["i", "i"], ["c"])],
        "other domain": [helper.make_node("Identity", ["i"], ["c"], domain="own")],
    }
    found = {name: index_ranges(graph_of([*nodes, gather], ["i"], {"table": 7})) for name, nodes in ways.items()}
    known = {"i": IndexRange(-7, 6)}
    assert found == {"Identity": known, "Reshape": known, "Add": {}, "other domain": {}}


def test_the_smallest_table_of_an_input_counts_along_the_axis() -> None:
    nodes = [
        helper.make_node("Gather", ["large", "i"], ["x"]),
        helper.make_node("Cast", ["small"], ["wide"], to=FLOAT),
        helper.make_node("Gather", ["wide", "i"], ["y"]),
        helper.make_node("Gather", ["large", "j"], ["z"], axis=-1),
        helper.make_node("Gather", ["k", "i"], ["w"]),
        helper.make_node("Gather", ["large", "k"], ["v"], axis=5),
    ]
    graph = graph_of(nodes, ["i", "j", "k"], {"large": 9, "small": 3})
    assert index_ranges(graph) == {"i": IndexRange(-3, 2), "j": IndexRange(-2, 1)}


def test_on_a_device_inputs_are_checked_before_the_batch(tmp_path: Path) -> None:
    errors = RequestErrors({"i": IndexRange(-2, 1)}, on_device=True)
    assert errors.checks_first
    errors.check({"i": np.array([[-2, 1]]), "x": np.ones(3)})
    errors.check({"i": np.empty((0, 1), np.int64)})
    with pytest.raises(InvalidArgumentError, match="input 'i' has the value -3, expected -2 to 1"):
        errors.check({"i": np.array([[-3, 0]])})
    backend = load_backend(save_embedding(tmp_path / "m.onnx"), DevicePlacement(use_gpu=False, threads=1))
    backend._errors.checks_first = True
    with pytest.raises(InvalidArgumentError) as refused:
        backend.run({"ids": np.array([[9]])})
    assert refused.value.__cause__ is None, "the runtime was not asked"


def test_sizes_are_the_models_defect_until_it_has_computed_some() -> None:
    text = "Attempting to broadcast an axis by a dimension other than 1. 4 by 5"
    errors, inputs = RequestErrors({}, ("a",)), {"a": np.ones((1, 5))}
    assert isinstance(errors.explain(inputs, text), BackendError)
    errors.has_computed = True
    assert isinstance(errors.explain(inputs, text), InvalidArgumentError)
    assert isinstance(errors.explain(inputs, "out of luck"), BackendError)
    fixed = RequestErrors({})
    fixed.has_computed = True
    assert isinstance(fixed.explain(inputs, text), BackendError)
