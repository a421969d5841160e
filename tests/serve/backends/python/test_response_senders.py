"""Models that are not decoupled and answer by response senders, and models that want a request once more."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from tests.serve.backends.python.python_models import X_TO_Y, save_python_model, serving
from tests.serve.backends.python.test_decoupled_models import DECOUPLED, Stream
from tests.serve.backends.python.test_python_models import infer

# Answers the number x in its own way.
SENDS = """
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

def answer(y):
    return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([y], np.float32))])

class TritonPythonModel:
    def execute(self, requests):
        sender, x = requests[0].get_response_sender(), requests[0].inputs()[0].as_numpy()[0]
        if x == 1:
            return [answer(10)]
        if x == 2:
            sender.send(answer(20), FINAL)
        if x == 3:
            threading.Thread(target=self.send_later, args=(sender,)).start()
        if x == 4:
            sender.send(flags=FINAL)
        if x == 5:
            sender.send(answer(50))
            sender.send(answer(51))
        if x == 6:
            sender.send(answer(60))
            return [answer(61)]
        if x == 8:
            threading.Thread(target=self.die, args=(sender,)).start()
        if x == 9:
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("no nines", pb_utils.TritonError.NOT_FOUND)))
        if x == 10:
            self.kept = sender
            open(os.path.join(os.path.dirname(__file__), "gate"), "w").close()
        if x == 11:
            os._exit(1)

    def send_later(self, sender):
        sender.send(answer(30))
        sender.send(flags=FINAL)

    def die(self, sender):
        sys.exit()
"""
# Wants each request three times, and answers how often it has had it.
REPEATS = """
class TritonPythonModel:
    def initialize(self, args):
        self.seen = {}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        times = self.seen[request.request_id()] = self.seen.get(request.request_id(), 0) + 1
        if times < 3:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return None
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([times], np.float32))])
"""


@pytest.mark.parametrize("isolation", ["process", "thread"])
@pytest.mark.parametrize(("x", "y"), [(1, 10), (2, 20), (3, 30), (5, 50), (6, 60)])
def test_the_first_response_is_the_answer_of_a_plain_model(tmp_path: Path, x: float, y: float, isolation: str) -> None:
    parameter = f'parameters {{ key: "halfserve.python_isolation" value {{ string_value: "{isolation}" }} }}'
    save_python_model(tmp_path, "sends", SENDS, X_TO_Y + parameter)
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        assert infer(client, "sends", np.array([x], np.float32), client_timeout=60) == [y]
        statistics = client.get_inference_statistics("sends").model_stats[0].inference_stats
        assert (statistics.success.count, statistics.fail.count) == (1, 0)


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (4, r"INTERNAL\] .* cannot send the final flag before its response"),
        (8, r"INTERNAL\] .*without a final response"),
        (9, r"NOT_FOUND\] no nines"),
    ],
)
def test_a_plain_model_that_sends_no_response_ends_its_request(tmp_path: Path, x: float, expected: str) -> None:
    save_python_model(tmp_path, "sends", SENDS)
    with (
        serving(tmp_path) as server,
        InferenceServerClient(server.address) as client,
        pytest.raises(InferenceServerException, match=expected),
    ):
        infer(client, "sends", np.array([x], np.float32), client_timeout=60)


def test_a_request_left_to_a_process_that_ends_is_unavailable(tmp_path: Path) -> None:
    gate = save_python_model(tmp_path, "sends", SENDS).with_name("gate")
    os.mkfifo(gate)
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client, ThreadPoolExecutor(1) as pool:
        left = pool.submit(infer, client, "sends", np.full(1, 10, np.float32), client_timeout=60)
        gate.read_text()  # it is executed
        with pytest.raises(InferenceServerException, match=r"UNAVAILABLE\]"):
            infer(client, "sends", np.full(1, 11, np.float32), client_timeout=60)
        with pytest.raises(InferenceServerException, match=r"UNAVAILABLE\] the process of model 'sends' ended"):
            left.result()


def test_requests_are_executed_again_as_their_model_wants(tmp_path: Path) -> None:
    save_python_model(tmp_path, "repeats", REPEATS)
    x = np.ones(1, np.float32)
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client, ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(infer, client, "repeats", x, request_id=name, client_timeout=60) for name in "abc"]
        assert [one.result() for one in asked] == [[3]] * 3
        statistics = client.get_inference_statistics("repeats").model_stats[0].inference_stats
        assert (statistics.success.count, statistics.fail.count) == (3, 0)


def test_a_decoupled_model_sends_responses_in_each_execution(tmp_path: Path) -> None:
    code = """
    class TritonPythonModel:
        def initialize(self, args):
            self.left = {}

        def execute(self, requests):
            for request in requests:
                left = self.left.get(request.request_id(), int(request.inputs()[0].as_numpy()[0])) - 1
                self.left[request.request_id()] = left
                answer = pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([left], np.float32))])
                if left:
                    request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                request.get_response_sender().send(answer, 0 if left else pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    """
    save_python_model(tmp_path, "counts_down", code, DECOUPLED)
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        stream = Stream(client)
        for name in "ab":
            stream.ask("counts_down", 20, request_id=name)
        got = [stream.next() for _ in range(40)]
        client.stop_stream()
    for name in "ab":
        assert [one for one in got if one[0] == name] == [(name, float(left), left == 0) for left in reversed(range(20))]


def test_a_response_to_a_rescheduled_request_is_refused(tmp_path: Path) -> None:
    save_python_model(tmp_path, "answers", REPEATS.replace("return None", "return pb_utils.InferenceResponse([])"))
    with (
        serving(tmp_path) as server,
        InferenceServerClient(server.address) as client,
        pytest.raises(InferenceServerException, match="for a request that it reschedules, expected None"),
    ):
        infer(client, "answers", np.ones(1, np.float32))
