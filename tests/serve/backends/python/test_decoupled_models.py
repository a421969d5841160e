from __future__ import annotations

import asyncio
import json
import queue
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput, InferResult
from tritonclient.utils import InferenceServerException

from halfserve import AsyncClient, Client
from halfserve.protos.inference_pb2 import ModelInferResponse
from halfserve.serve.client.streaming import StreamAnswer
from tests.serve.backends.python.python_models import save_python_model, serving
from tests.serve.backends.python.test_python_models import infer
from tests.serve.engine.ensembles.configurations import ensemble, step
from tests.serve.ensemble_folders import save_ensemble
from tests.serve.running_server import TRANSPORTS
from tests.serve.test_server import serving as serve_process

DECOUPLED = """
input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }
model_transaction_policy { decoupled: true }
"""
# Answers n times for the input n, from a thread; a request for the number 9 waits for one for 1.
COUNTS = """
class TritonPythonModel:
    def initialize(self, args):
        self.others = threading.Event()

    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.count, args=(request.get_response_sender(), request)).start()

    def count(self, sender, request):
        n = int(request.inputs()[0].as_numpy()[0])
        if n == 9:
            self.others.wait()
        for at in range(n):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([at], np.float32))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        if n == 1:
            self.others.set()
"""


class Stream:
    """Requests to a model over one stream, and what comes back."""

    def __init__(self, client: InferenceServerClient) -> None:
        self._client = client
        self._got: queue.SimpleQueue[tuple[InferResult | None, InferenceServerException | None]] = queue.SimpleQueue()
        client.start_stream(lambda result, error: self._got.put((result, error)))

    def ask(self, model: str, x: float, **more: Any) -> None:
        asked = InferInput("x", [1], "FP32")
        asked.set_data_from_numpy(np.array([x], np.float32))
        self._client.async_stream_infer(model, [asked], **more)

    def next(self) -> tuple[str, float | None, bool]:
        """Id, value (None for an empty response) and whether it is final."""
        result, error = self._got.get(timeout=60)
        if error is not None:
            raise error
        assert result is not None
        response = result.get_response()
        y = result.as_numpy("y")
        return response.id, None if y is None else float(y[0]), response.parameters["triton_final_response"].bool_param


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_decoupled_model_gives_any_number_of_responses(tmp_path: Path, transport: str) -> None:
    save_python_model(tmp_path, "counts", COUNTS, DECOUPLED)
    with serving(tmp_path, TRANSPORTS[transport]) as server, InferenceServerClient(server.address) as client:
        stream = Stream(client)
        stream.ask("counts", 3, request_id="a", enable_empty_final_response=True)
        assert [stream.next() for _ in range(4)] == [("a", 0, False), ("a", 1, False), ("a", 2, False), ("a", None, True)]
        stream.ask("counts", 0, request_id="none")  # nothing comes: the client has not asked for an empty response
        stream.ask("counts", 2, request_id="b")
        assert [stream.next() for _ in range(2)] == [("b", 0, False), ("b", 1, False)]
        client.stop_stream()  # waits for the server to end the stream
        statistics = client.get_inference_statistics("counts").model_stats[0].inference_stats
        response_bytes = server.call(lambda: server.core.model("counts").statistics.response_bytes)
    response = ModelInferResponse(model_name="counts", model_version="1", id="a", raw_output_contents=[bytes(4)])
    response.outputs.add(name="y", datatype="FP32", shape=[1])
    assert (statistics.success.count, statistics.fail.count) == (3, 0)
    assert response_bytes == 5 * response.ByteSize()  # without the empty responses


def test_the_client_takes_all_responses_in_the_requests_order(tmp_path: Path) -> None:
    save_python_model(tmp_path, "counts", COUNTS, DECOUPLED)
    requests = [{"x": np.array([n], np.float32)} for n in (9, 0, 1)]  # the first one waits for the last one

    def told(answer: StreamAnswer) -> tuple[int, list[float], bool]:
        return answer.index, [float(y[0]) for y in answer.outputs.values()], answer.is_final

    async def ask(address: str) -> list[tuple[int, list[float], bool]]:
        async with AsyncClient(address) as client:
            return [told(answer) async for answer in client.stream_infer("counts", requests, in_flight=3)]

    expected = [*((0, [float(at)], False) for at in range(9)), (0, [], True), (1, [], True), (2, [0.0], False), (2, [], True)]
    with serving(tmp_path) as server, Client(server.address) as client:
        assert [told(answer) for answer in client.stream_infer("counts", requests, in_flight=3)] == expected
        assert asyncio.run(ask(server.address)) == expected


def test_responses_of_different_requests_interleave(tmp_path: Path) -> None:
    save_python_model(tmp_path, "counts", COUNTS, DECOUPLED)
    save_python_model(tmp_path, "twice")
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        stream = Stream(client)
        stream.ask("counts", 9, request_id="waits")
        stream.ask("twice", 4, request_id="plain")
        assert stream.next() == ("plain", 8, True)
        stream.ask("counts", 1, request_id="wakes")
        assert stream.next() == ("wakes", 0, False)
        assert {stream.next()[0] for _ in range(9)} == {"waits"}
        client.stop_stream()


def test_each_response_goes_through_the_ensemble_of_its_model(tmp_path: Path) -> None:
    save_python_model(tmp_path, "counts", COUNTS, DECOUPLED)
    save_python_model(tmp_path, "twice")
    text = ensemble(step("counts", "x=x", "y=t"), step("twice", "x=t", "y=y"), output="y")
    save_ensemble(tmp_path / "doubled_counts", text, max_batch_size=0)
    with (
        serve_process(tmp_path, "--trust-python-models") as (_, told),
        InferenceServerClient(f"127.0.0.1:{told['grpc_port']}") as client,
    ):
        assert client.get_model_config("doubled_counts").config.model_transaction_policy.decoupled
        stream = Stream(client)
        stream.ask("doubled_counts", 3, request_id="a", enable_empty_final_response=True)
        responses = [stream.next() for _ in range(3)]
        if not responses[-1][2]:  # the final flag came after the last step's answer
            responses.append(stream.next())
        assert [(id_, y) for id_, y, _ in responses if y is not None] == [("a", 0), ("a", 2), ("a", 4)]
        assert [final for _, _, final in responses].count(True) == 1
        stream.ask("doubled_counts", 0, request_id="none", enable_empty_final_response=True)
        assert stream.next() == ("none", None, True)
        with pytest.raises(InferenceServerException, match=r"UNIMPLEMENTED\] model 'doubled_counts' is decoupled"):
            infer(client, "doubled_counts", np.ones(1, np.float32))
        client.stop_stream()
        statistics = client.get_inference_statistics("doubled_counts").model_stats[0].inference_stats
        generated = httpx.post(
            f"http://127.0.0.1:{told['http_port']}/v2/models/doubled_counts/generate_stream", json={"x": 2}, timeout=20
        )
    assert statistics.success.count == 2
    assert [json.loads(line[6:])["y"] for line in generated.text.splitlines() if line] == [0, 2]


def test_one_response_calls_to_a_decoupled_model_are_refused(tmp_path: Path) -> None:
    save_python_model(tmp_path, "counts", COUNTS, DECOUPLED)
    with (
        serving(tmp_path) as server,
        InferenceServerClient(server.address) as client,
        pytest.raises(InferenceServerException, match=r"UNIMPLEMENTED\] model 'counts' is decoupled: .* by ModelStreamInfer"),
    ):
        infer(client, "counts", np.ones(1, np.float32))


def test_errors_end_only_their_request(tmp_path: Path) -> None:
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            sender, n = requests[0].get_response_sender(), requests[0].inputs()[0].as_numpy()[0]
            answer = pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([n], np.float32))])
            if n == 1:
                raise ValueError("no ones")
            if n == 2:
                os._exit(1)
            if n == 3:
                answer = pb_utils.InferenceResponse(error=pb_utils.TritonError("not three"))
            sender.send(answer, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    """
    save_python_model(tmp_path, "picky", code, DECOUPLED)
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        stream = Stream(client)
        for x, expected in ((1, "execute: ValueError: no ones"), (2, "ended before its final response"), (3, "not three")):
            stream.ask("picky", x)
            with pytest.raises(InferenceServerException, match=expected):
                stream.next()
        stream.ask("picky", 4, request_id="four")
        assert stream.next() == ("four", 4, True)
        client.stop_stream()


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_request_ends_when_no_one_is_left_to_answer_it(tmp_path: Path, isolation: str) -> None:
    """The thread with its response sender has died, execute has dropped it, or a coroutine has failed."""
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            sender, n = requests[0].get_response_sender(), requests[0].inputs()[0].as_numpy()[0]
            if n == 1:
                threading.Thread(target=self.die, args=(sender,)).start()
            if n == 2:
                return self.fail(requests)
            if n == 4:
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([n], np.float32))]), flags=1)

        def die(self, sender):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([7], np.float32))]))

        async def fail(self, requests):
            raise ValueError("no twos")
    """
    parameter = f'parameters {{ key: "halfserve.python_isolation" value {{ string_value: "{isolation}" }} }}'
    save_python_model(tmp_path, "forgets", code, DECOUPLED + parameter)
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        stream = Stream(client)
        stream.ask("forgets", 1, request_id="one")
        assert stream.next() == ("one", 7, False)
        with pytest.raises(InferenceServerException, match="without a final response"):
            stream.next()
        for n, expected in ((2, "execute: ValueError: no twos"), (3, "without a final response")):
            stream.ask("forgets", n)
            with pytest.raises(InferenceServerException, match=expected):
                stream.next()
        stream.ask("forgets", 4, request_id="four")
        assert stream.next() == ("four", 4, True)
        client.stop_stream()


def test_a_model_finalizes_although_a_request_never_ends(tmp_path: Path) -> None:
    """It keeps the response sender, and sends nothing more."""
    code = """
    class TritonPythonModel:
        def initialize(self, args):
            self.kept = []

        def execute(self, requests):
            sender = requests[0].get_response_sender()
            self.kept.append(sender)
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.ones(1, np.float32))]))

        def finalize(self):
            print("finalized", file=sys.stderr)
    """
    save_python_model(tmp_path, "keeps", code, DECOUPLED)
    with (
        serve_process(tmp_path, "--trust-python-models", "--no-http", "--drain-seconds", "0.2") as (process, told),
        InferenceServerClient(f"127.0.0.1:{told['grpc_port']}") as client,
    ):
        stream = Stream(client)
        stream.ask("keeps", 1, request_id="one")
        assert stream.next() == ("one", 1, False)
        process.terminate()
        _, errors = process.communicate(timeout=500)
    assert "finalized" in errors
    assert "Traceback" not in errors


def test_cancellation_reaches_the_model(tmp_path: Path) -> None:
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            threading.Thread(target=self.stream, args=(requests[0],)).start()

        def stream(self, request):
            sender = request.get_response_sender()
            while not request.is_cancelled():
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.ones(1, np.float32))]))
                time.sleep(0.001)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            family = pb_utils.MetricFamily("endless_ended", "Ended", pb_utils.MetricFamily.COUNTER)
            family.Metric().increment(1)
    """
    save_python_model(tmp_path, "endless", code, DECOUPLED)
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        stream = Stream(client)
        stream.ask("endless", 1)
        stream.next()
        client.stop_stream(cancel_requests=True)
        server.until(lambda: server.core.model("endless").statistics.totals.failures == {"cancelled": 1})


@pytest.mark.parametrize("ignores", [False, True])
def test_a_model_cancels_the_responses_of_a_decoupled_one(tmp_path: Path, ignores: bool) -> None:
    endless = f"""
    class TritonPythonModel:
        def execute(self, requests):
            sender = requests[0].get_response_sender()
            for at in range(9):
                if requests[0].is_cancelled() and not {ignores}:
                    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("ended", pb_utils.TritonError.CANCELLED)))
                    break
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.ones(1, np.float32))]))
                time.sleep(0.05)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    """
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            call = pb_utils.InferenceRequest(model_name="endless", requested_output_names=["y"], inputs=requests[0].inputs())
            responses, seen = call.exec(decoupled=True), []
            for response in responses:
                seen.append(response.error().code() if response.has_error() else len(response.output_tensors()))
                if len(seen) == 1:
                    responses.cancel()
            responses.cancel()  # it has ended, so that nothing happens
            seen = [seen.count(1), seen.count(pb_utils.TritonError.CANCELLED)]
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array(seen, np.float32))])]
    """
    save_python_model(tmp_path, "endless", endless, DECOUPLED)
    save_python_model(tmp_path, "cancels", code)
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        answers, cancellations = infer(client, "cancels", np.ones(1, np.float32), client_timeout=60)
    assert (answers == 9) == ignores
    assert cancellations == (0 if ignores else 1)


def test_a_model_iterates_over_the_responses_of_a_decoupled_one(tmp_path: Path) -> None:
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            call = pb_utils.InferenceRequest(model_name="counts", requested_output_names=["y"], inputs=requests[0].inputs())
            responses = call.exec(decoupled=True)
            for _ in range(2):  # the second time they have all come
                values = [r.output_tensors()[0].as_numpy()[0] for r in responses if r.output_tensors()]
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([sum(values)], np.float32))])]
    """
    save_python_model(tmp_path, "counts", COUNTS, DECOUPLED)
    save_python_model(tmp_path, "sums", code)
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        assert infer(client, "sums", np.array([5], np.float32)) == [10]
