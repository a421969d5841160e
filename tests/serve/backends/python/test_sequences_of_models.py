"""Python models with `sequence_batching`."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient

from tests.serve.backends.python.python_models import save_python_model, serving
from tests.serve.backends.python.test_decoupled_models import Stream
from tests.serve.backends.python.test_python_models import infer

# Answers the sum of its sequence, which it keeps itself, and checks what the server tells it.
ADDS = """
class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", self.add(request))]) for request in requests]

    def add(self, request):
        given = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        assert set(given) == {"x", "START", "ID", "READY"}, given
        assert all(array.shape == (1, 1) for array in given.values()) or given["x"].ndim == 1, given
        if given["READY"].ravel()[0] == 0:
            assert request.correlation_id() == given["ID"].ravel()[0] == given["START"].ravel()[0] == 0, given
            return given["x"]
        starts, key = bool(given["START"].ravel()[0]), int(given["ID"].ravel()[0])
        assert key == request.correlation_id() and given["READY"].ravel()[0] == 1, given
        assert starts == bool(request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START), given
        self.sums[key] = given["x"] + (0 if starts else self.sums[key])
        return self.sums[key]
"""
CONTROLS = """
input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }
sequence_batching {
  STRATEGY
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
  control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } }
  control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
}
"""
STATE = """
input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }
sequence_batching { oldest { } state { input_name: "sum" output_name: "new" data_type: TYPE_FP32 dims: [ 1 ] } }
"""


def place(step: int, key: int = 5) -> dict[str, Any]:
    return {"sequence_id": key, "sequence_start": step == 0, "sequence_end": step == 2}


@pytest.mark.parametrize(
    ("strategy", "rows"),
    [
        ("direct { }", 0),
        pytest.param("oldest { max_candidate_sequences: 4 }", 0, marks=pytest.mark.long),
        ("oldest { }", 4),
    ],
)
def test_a_model_gets_controls_that_its_inputs_do_not_list(tmp_path: Path, strategy: str, rows: int) -> None:
    save_python_model(tmp_path, "adds", ADDS, f"max_batch_size: {rows} {CONTROLS.replace('STRATEGY', strategy)}")
    x = np.ones((1, 1) if rows else 1, np.float32)
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        assert [tensor.name for tensor in client.get_model_metadata("adds").inputs] == ["x"]
        sums = [float(infer(client, "adds", x, client_timeout=60, **place(step)).ravel()[0]) for step in range(3)]
    assert sums == [1, 2, 3]


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { }"])
def test_a_sequence_stays_with_the_copy_that_it_began_on(tmp_path: Path, strategy: str) -> None:
    seen = tmp_path / "seen"
    seen.mkdir()
    code = ADDS.replace("return self", f"open(f'{seen}/{{os.getpid()}}-{{key}}', 'w').close()\n        return self")
    config = f"{CONTROLS.replace('STRATEGY', strategy)} max_batch_size: 2 instance_group {{ count: 2 kind: KIND_CPU }}"
    models = tmp_path / "models"
    save_python_model(models, "adds", f"import os\n{code}", config)
    x, keys = np.ones((1, 1), np.float32), range(1, 5)
    with serving(models) as server, InferenceServerClient(server.address) as client, ThreadPoolExecutor(4) as threads:

        def ask(step: int, key: int) -> int:
            return int(infer(client, "adds", x, client_timeout=60, **place(step, key)).item())

        answers = [list(threads.map(partial(ask, step), keys)) for step in range(3)]
    assert answers == [[1] * 4, [2] * 4, [3] * 4]
    copies = Counter(path.name.partition("-")[0] for path in seen.iterdir())
    assert list(copies.values()) == [2, 2]


def test_the_server_keeps_the_state_of_a_model(tmp_path: Path) -> None:
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            return [self.add(request) for request in requests]

        def add(self, request):
            x, total = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("x", "sum"))
            return pb_utils.InferenceResponse([pb_utils.Tensor("y", x + total), pb_utils.Tensor("new", x + total)])
    """
    save_python_model(tmp_path, "adds", code, STATE)
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        sums = [float(infer(client, "adds", np.ones(1, np.float32), client_timeout=60, **place(n))[0]) for n in range(3)]
    assert sums == [1, 2, 3]


def test_a_decoupled_model_answers_the_requests_of_a_sequence(tmp_path: Path) -> None:
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            for request in requests:
                sender, flags = request.get_response_sender(), request.flags()
                for y in (flags, request.correlation_id()):
                    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([y], np.float32))]))
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    """
    decoupled = "model_transaction_policy { decoupled: true }"
    tensors = STATE.partition("sequence_batching")[0]
    save_python_model(tmp_path, "tells", code, f"{tensors} sequence_batching {{ oldest {{ }} }} {decoupled}")
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        stream = Stream(client)
        for step in range(3):
            stream.ask("tells", 1, request_id=str(step), **place(step))
        got = [stream.next()[:2] for _ in range(6)]
        client.stop_stream()
    assert got == [("0", 1), ("0", 5), ("1", 0), ("1", 5), ("2", 2), ("2", 5)]


# Answers x, x - 1, ... 0, each in an execution of its own; START says which is the first.
COUNTS_DOWN = """
class TritonPythonModel:
    def initialize(self, args):
        self.left = {}

    def execute(self, requests):
        for request in requests:
            given = {tensor.name(): tensor.as_numpy().ravel()[0] for tensor in request.inputs()}
            starts = bool(request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START)
            told = {"ID": request.correlation_id(), "START": starts}
            assert given == {**given, **told} or "START" not in given, (given, told)
            given |= told
            left = self.left[given["ID"]] = int(given["x"]) if given["START"] else self.left[given["ID"]] - 1
            answer = pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([left], np.float32))])
            if left:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            request.get_response_sender().send(answer, 0 if left else pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


@pytest.mark.parametrize("has_controls", [True, False])
def test_each_request_of_an_iterative_model_is_a_sequence(tmp_path: Path, has_controls: bool) -> None:
    controls = CONTROLS.replace("STRATEGY", "iterative_sequence: true")
    if not has_controls:
        controls = controls.partition("sequence_batching")[0] + "sequence_batching { iterative_sequence: true }"
    decoupled = "model_transaction_policy { decoupled: true }"
    save_python_model(tmp_path, "counts_down", COUNTS_DOWN, controls + decoupled)
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        stream = Stream(client)
        for name in "ab":
            stream.ask("counts_down", 5, request_id=name)
        got = [stream.next() for _ in range(12)]
        client.stop_stream()
    for name in "ab":
        assert [one for one in got if one[0] == name] == [(name, float(left), left == 0) for left in reversed(range(6))]
