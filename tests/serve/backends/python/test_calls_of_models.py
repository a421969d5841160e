from __future__ import annotations

import os
import queue
import re
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from halfserve.serve.engine.caching.caching_scheduler import cache_answers
from halfserve.serve.engine.caching.response_cache import ResponseCache
from halfserve.serve.engine.errors import InferenceError
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.tensors import Tensors
from halfserve.serve.observability.exposition import exposition
from tests.models import save_mlp
from tests.serve.backends.python.python_models import X_TO_Y, save_python_model, serving
from tests.serve.backends.python.test_python_models import infer
from tests.serve.engine.ensembles.scene import serve

CALLS = """
class TritonPythonModel:
    def execute(self, requests):
        request = pb_utils.InferenceRequest(
            model_name="NAME", requested_output_names=["y"], inputs=requests[0].inputs(), request_id=requests[0].request_id()
        )
        response = request.exec()
        if response.has_error():
            return [pb_utils.InferenceResponse(error=response.error())]
        y = pb_utils.get_output_tensor_by_name(response, "y").as_numpy()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", y + 1)])]
"""
AWAITS = """
import asyncio

class TritonPythonModel:
    async def execute(self, requests):
        def call(tensor):
            return pb_utils.InferenceRequest(model_name="twice", requested_output_names=["y"], inputs=[tensor]).async_exec()

        responses = await asyncio.gather(*(call(requests[0].inputs()[0]) for _ in range(3)))
        total = sum(response.output_tensors()[0].as_numpy() for response in responses)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", total)])]
"""


@pytest.mark.parametrize("elements", [pytest.param(3, marks=pytest.mark.long), 200_000])
def test_a_model_calls_a_model_and_awaits_several(tmp_path: Path, elements: int) -> None:
    save_python_model(tmp_path, "twice")
    save_python_model(tmp_path, "calls", CALLS.replace("NAME", "twice"))
    save_python_model(tmp_path, "outer", CALLS.replace("NAME", "calls"))
    save_python_model(tmp_path, "awaits", AWAITS)
    x = np.random.default_rng(0).standard_normal(elements).astype(np.float32)
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        np.testing.assert_array_equal(infer(client, "outer", x), x * 2 + 1 + 1)
        np.testing.assert_array_equal(infer(client, "awaits", x), x * 2 + x * 2 + x * 2)


# Its workers are forks: those that `initialize` has made, and one that such a worker makes itself.
POOLS = """
from multiprocessing import Pool

def call(x):
    request = pb_utils.InferenceRequest(
        model_name="counts", requested_output_names=["y"], inputs=[pb_utils.Tensor("x", x)]
    )
    return [response.output_tensors()[0].as_numpy() for response in request.exec(decoupled=True) if response.output_tensors()]

def fork_and_call(x):
    reads, writes = os.pipe()
    if os.fork() == 0:
        os.write(writes, bytes([len(call(x))]))
        os._exit(0)
    return os.read(reads, 1)[0]

class TritonPythonModel:
    def initialize(self, arguments):
        self.pool = Pool(2)

    def execute(self, requests):
        x = requests[0].inputs()[0].as_numpy()
        with Pool(2) as pool:
            answers = pool.map(call, [x] * 4) + self.pool.map(call, [x] * 4)
        if answers[0][0].nbytes < 100 and self.pool.map(fork_and_call, [x] * 2) != [len(answers[0])] * 2:
            raise ValueError("a fork of a fork got other responses")
        total = np.sum([np.sum(responses, axis=0) for responses in answers], axis=0)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", total.astype(np.float32))])]
"""
COUNTS_TWO = """
class TritonPythonModel:
    def execute(self, requests):
        sender = requests[0].get_response_sender()
        for factor in (1, 2):
            y = requests[0].inputs()[0].as_numpy() * factor
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", y)]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


@pytest.mark.parametrize("elements", [3, pytest.param(200_000, marks=pytest.mark.long)])
def test_forked_workers_of_a_model_call_models(tmp_path: Path, elements: int) -> None:
    save_python_model(tmp_path, "pools", POOLS)
    save_python_model(tmp_path, "counts", COUNTS_TWO, X_TO_Y + "model_transaction_policy { decoupled: true }")
    x = np.random.default_rng(0).standard_normal(elements).astype(np.float32)
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        np.testing.assert_allclose(infer(client, "pools", x), x * 24, rtol=1e-5)


def test_a_model_calls_an_onnx_model(tmp_path: Path) -> None:
    save_mlp(tmp_path / "mlp" / "1" / "model.onnx")
    tensors = 'input { name: "x" data_type: TYPE_FP16 dims: [ 64 ] } output { name: "y" data_type: TYPE_FP16 dims: [ 10 ] }'
    save_python_model(tmp_path, "calls", CALLS.replace("NAME", "mlp"), f"max_batch_size: 4 {tensors}")
    x = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float16)
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        alone = infer(client, "mlp", x, datatype="FP16")
        np.testing.assert_array_equal(infer(client, "calls", x, datatype="FP16"), alone + np.float16(1))


@pytest.mark.long
@pytest.mark.parametrize(
    ("called", "status", "expected"),
    [
        ("nothing", "NOT_FOUND", "model 'nothing' is not served here"),
        ("other_input", "INVALID_ARGUMENT", "input 'x' is not one of model 'other_input': 'z'"),
        ("whole", "INVALID_ARGUMENT", "input 'x' of model 'whole' has datatype 'FP32', expected 'INT32'"),
        (
            "calls",
            "UNIMPLEMENTED",
            r"model 'calls' is called by itself \(calls/1 -> calls\), and its 1 instance.* end the cycle",
        ),
        ("many", "UNIMPLEMENTED", "model 'many' is decoupled, .* call it with decoupled=True"),
    ],
)
def test_a_call_that_cannot_be_made_is_an_error_of_its_response(
    tmp_path: Path, called: str, status: str, expected: str
) -> None:
    save_python_model(tmp_path, "calls", CALLS.replace("NAME", called))
    save_python_model(tmp_path, "other_input", config=X_TO_Y.replace('"x"', '"z"'))
    save_python_model(tmp_path, "whole", config=X_TO_Y.replace('"x" data_type: TYPE_FP32', '"x" data_type: TYPE_INT32'))
    save_python_model(tmp_path, "many", config=X_TO_Y + "model_transaction_policy { decoupled: true }")
    with (
        serving(tmp_path) as server,
        InferenceServerClient(server.address) as client,
        pytest.raises(InferenceServerException, match=rf"{status}\] {expected}"),
    ):
        infer(client, "calls", np.ones(1, np.float32))


def test_a_call_has_the_time_of_the_request_that_it_is_made_for(tmp_path: Path) -> None:
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            time.sleep(0.3)
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", requests[0].inputs()[0].as_numpy())])]
    """
    save_python_model(tmp_path, "slow", code)
    twice_slow = CALLS.replace("response = request.exec()", "request.exec(); request.exec(); response = request.exec()")
    save_python_model(tmp_path, "calls", twice_slow.replace("NAME", "slow"))
    x = np.ones(1, np.float32)
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        failures = server.call(lambda: server.core.model("slow").statistics.totals.failures)
        while not failures.get("deadline_exceeded", 0) + failures.get("cancelled", 0):  # the time may be up before the call
            # The client's own deadline, or the server's word that comes at the same moment.
            with pytest.raises(InferenceServerException, match="[Dd]eadline|the time of the request|longer than"):
                infer(client, "calls", x, client_timeout=0.4)
            failures = server.call(lambda: server.core.model("slow").statistics.totals.failures)
        assert infer(client, "calls", x) == [2]


# Waits until the test opens the pipe "gateN" beside the model, for an input N that has one.
GATE = """
def pass_gate(x):
    gate = os.path.join(os.path.dirname(__file__), f"gate{int(x[0])}")
    if os.path.exists(gate):
        open(gate).read()
"""
GATED = f"""{GATE}
class TritonPythonModel:
    def execute(self, requests):
        x = requests[0].inputs()[0].as_numpy()
        pass_gate(x)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])]
"""
CALLS_FOR_SMALL = f"""{GATE}
class TritonPythonModel:
    def execute(self, requests):
        x = requests[0].inputs()[0].as_numpy()
        pass_gate(x)
        if x[0] < 10:
            called = pb_utils.InferenceRequest(
                model_name="NAME", requested_output_names=["y"], inputs=[pb_utils.Tensor("x", x + 10)]
            ).exec()
            if called.has_error():
                return [pb_utils.InferenceResponse(error=called.error())]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])]
"""
PIPE = """
platform: "ensemble"
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
ensemble_scheduling { step { model_name: "calls" input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } }
"""
TWO_COPIES = f"{X_TO_Y} instance_group {{ count: 2 kind: KIND_CPU }}"


def test_a_cycle_through_an_ensemble_is_an_error_that_names_it(tmp_path: Path) -> None:
    save_python_model(tmp_path, "calls", CALLS.replace("NAME", "pipe"))
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        server.call(lambda: serve(server.core, PIPE))
        for asked, chain in (("calls", "calls/1 -> pipe/1 -> calls"), ("pipe", "calls/1 -> pipe/1 -> calls")):
            with pytest.raises(InferenceServerException, match=rf"UNIMPLEMENTED\] .*'calls' is called by itself \({chain}\)"):
                infer(client, asked, np.ones(1, np.float32), client_timeout=60)


@pytest.mark.parametrize("calling", ["calls", pytest.param("back", marks=pytest.mark.long)])
def test_a_cycle_through_the_response_cache_is_an_error(tmp_path: Path, calling: str) -> None:
    """Of a model with two copies that calls itself for the same answer, and of two models that call each other."""
    cached = f"{X_TO_Y} response_cache {{ enable: true }}"
    save_python_model(tmp_path, "calls", CALLS.replace("NAME", calling), cached + TWO_COPIES.removeprefix(X_TO_Y))
    save_python_model(tmp_path, "back", CALLS.replace("NAME", "calls"), cached)
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        for name in ("calls", "back"):
            server.call(partial(cache_answers, server.call(partial(server.core.model, name)), ResponseCache(2**20)))
        with pytest.raises(InferenceServerException, match="is called by itself"):
            infer(client, "calls", np.ones(1, np.float32), client_timeout=60)


@pytest.mark.parametrize("partner", ["calls", "other"])
def test_of_calls_that_wait_for_each_other_one_is_refused(tmp_path: Path, partner: str) -> None:
    """Both copies of a model are taken when each calls the model; and each of two models is when it calls the other."""
    alone = partner == "calls"
    folder = save_python_model(tmp_path, "calls", CALLS_FOR_SMALL.replace("NAME", partner), TWO_COPIES if alone else X_TO_Y)
    paths = [folder, folder]
    if not alone:
        paths[1] = save_python_model(tmp_path, "other", CALLS_FOR_SMALL.replace("NAME", "calls"))
    gates = [path.with_name(f"gate{number}") for number, path in enumerate(paths)]
    for gate in gates:
        os.mkfifo(gate)
    with (
        serving(tmp_path) as server,
        InferenceServerClient(server.address) as client,
        ThreadPoolExecutor(2) as pool,
    ):
        asked = [
            pool.submit(infer, client, model, np.full(1, number, np.float32), client_timeout=60)
            for number, model in enumerate(("calls", partner))
        ]
        opened = [gate.open("w") for gate in gates]  # both execute
        for one in opened:
            one.close()
        refused = [one.exception() for one in asked if one.exception() is not None]
    (error,) = refused
    assert re.search(r"UNAVAILABLE\] .*wait for calls that wait for this one", str(error))


def test_a_call_ends_with_the_request_that_it_is_made_for(tmp_path: Path) -> None:
    save_python_model(tmp_path, "calls", CALLS_FOR_SMALL.replace("NAME", "gated"))
    gate = save_python_model(tmp_path, "gated", GATED).with_name("gate11")
    os.mkfifo(gate)
    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        asked = InferInput("x", [1], "FP32")
        asked.set_data_from_numpy(np.ones(1, np.float32))
        running = client.async_infer("calls", [asked], lambda result, error: ended.put(error))
        with gate.open("w"):  # the called model executes, and goes on at the end of this block
            running.cancel()
            assert ended.get(timeout=60) is not None
            assert infer(client, "calls", np.full(1, 10, np.float32), client_timeout=60) == [10]  # its only copy is free


def test_a_call_ends_when_the_deadline_of_its_request_has_passed(tmp_path: Path) -> None:
    save_python_model(tmp_path, "calls", CALLS_FOR_SMALL.replace("NAME", "gated"))
    gate = save_python_model(tmp_path, "gated", GATED).with_name("gate11")
    os.mkfifo(gate)
    answered: queue.SimpleQueue[Tensors | InferenceError] = queue.SimpleQueue()
    with serving(tmp_path) as server:
        model = server.call(lambda: server.core.model("calls"))
        x = {"x": np.ones(1, np.float32)}
        try:
            for allowed_s in (0.5, 5.0, 30.0):  # on a busy machine the time may be up before the call is made
                # Its client does not cancel it, unlike one of gRPC.
                asked = InferRequest(x, ("y",), 1, (), time.monotonic() + allowed_s, answered.put)
                server.call(lambda asked=asked: server.core.submit(model, asked))  # type: ignore[misc]  # (bound now)
                text = str(answered.get(timeout=60))
                if "the time of the request for which this call is made was up" in text:
                    break
            else:
                raise AssertionError(text)
        finally:  # the called model goes on, if it waits
            opened = os.open(gate, os.O_RDWR)
            gate.unlink()
            os.close(opened)


def test_the_configuration_is_completed_by_the_model(tmp_path: Path) -> None:
    code = """
    class TritonPythonModel:
        @staticmethod
        def auto_complete_config(config):
            config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [2]})
            config.add_output({"name": "y", "data_type": "TYPE_FP32", "dims": [2]})
            config.set_max_batch_size(4)
            config.set_dynamic_batching()
            return config

        def execute(self, requests):
            return [
                pb_utils.InferenceResponse([pb_utils.Tensor("y", request.inputs()[0].as_numpy() * 3)]) for request in requests
            ]
    """
    save_python_model(tmp_path, "completes", code, config=None)
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        config = client.get_model_config("completes").config
        assert infer(client, "completes", np.ones((3, 2), np.float32)).tolist() == [[3, 3]] * 3
    assert (config.max_batch_size, config.HasField("dynamic_batching"), list(config.input[0].dims)) == (4, True, [2])


def test_custom_metrics_are_shown_and_shared_by_their_labels(tmp_path: Path) -> None:
    code = """
    class TritonPythonModel:
        def initialize(self, args):
            self.seen = pb_utils.MetricFamily(name="texts_seen", description="Texts", kind=pb_utils.MetricFamily.COUNTER)
            self.counter = self.seen.Metric(labels={"language": "en"})
            self.length = pb_utils.MetricFamily(name="text_length", description="Length", kind=pb_utils.MetricFamily.HISTOGRAM)
            self.lengths = self.length.Metric(buckets=[1.0, 2.5])

        def execute(self, requests):
            x = requests[0].inputs()[0].as_numpy()
            self.counter.increment(float(x.sum()))
            self.lengths.observe(float(x.sum()))
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([self.counter.value()], np.float32))])]
    """
    for name in ("one", "other"):
        save_python_model(tmp_path, name, code)
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        assert infer(client, "one", np.array([2, 3], np.float32)) == [5]
        assert infer(client, "other", np.array([0.5], np.float32)) == [5.5]
        told = {metric.name: metric.samples for metric in server.call(server.core.figures.custom_metrics)}
    assert told["texts_seen"] == [("", {"language": "en"}, 5.5)]
    assert told["text_length"] == [
        ("_bucket", {"le": "1"}, 1),
        ("_bucket", {"le": "2.5"}, 1),
        ("_bucket", {"le": "+Inf"}, 2),
        ("_sum", {}, 5.5),
        ("_count", {}, 2),
    ]


def test_a_metric_whose_family_is_deleted_cannot_be_used(tmp_path: Path) -> None:
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            kept = pb_utils.MetricFamily("left", "Left", pb_utils.MetricFamily.GAUGE)
            family = pb_utils.MetricFamily("left", "Left", pb_utils.MetricFamily.GAUGE)
            kept, metric = (kept, kept.Metric()), family.Metric()
            metric.set(2)
            del family
            refused = 0
            for use in (metric.value, lambda: metric.set(3), lambda: metric.increment(1)):
                try:
                    use()
                except pb_utils.TritonModelException as error:
                    refused += "MetricFamily object of the metric 'left' has been deleted" in str(error)
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([refused, kept[1].value()], np.float32))])]
    """
    save_python_model(tmp_path, "deletes", code)
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        assert infer(client, "deletes", np.ones(1, np.float32)).tolist() == [3, 2]


def test_triton_s_c_module_has_the_classes_that_models_name(tmp_path: Path) -> None:
    code = """
    import c_python_backend_utils as c_utils

    class TritonPythonModel:
        def execute(self, requests: list[c_utils.InferenceRequest]) -> list[c_utils.InferenceResponse]:
            is_one = isinstance(requests[0], c_utils.InferenceRequest)
            return [c_utils.InferenceResponse([c_utils.Tensor("y", np.array([is_one], np.float32))])]
    """
    save_python_model(tmp_path, "names", code)
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        assert infer(client, "names", np.ones(1, np.float32)) == [1]


def test_a_family_declared_again_keeps_its_description_and_its_kind(tmp_path: Path) -> None:
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            first = pb_utils.MetricFamily("seen", "First", pb_utils.MetricFamily.HISTOGRAM)
            again = pb_utils.MetricFamily("seen", "Second", pb_utils.MetricFamily.HISTOGRAM)
            again.Metric(buckets=[]).observe(3)
            try:
                pb_utils.MetricFamily("seen", "First", pb_utils.MetricFamily.GAUGE)
            except pb_utils.TritonModelException as error:
                return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array(["a histogram" in str(error)], np.float32))])]
    """
    save_python_model(tmp_path, "declares", code)
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        assert infer(client, "declares", np.ones(1, np.float32)) == [1]
        (told,) = server.call(server.core.figures.custom_metrics)
    assert (told.text, told.kind) == ("First", "histogram")
    assert told.samples == [("_bucket", {"le": "+Inf"}, 1), ("_sum", {}, 3), ("_count", {}, 1)]


def test_metrics_that_prometheus_cannot_read_are_refused(tmp_path: Path) -> None:
    code = r"""
    class TritonPythonModel:
        def execute(self, requests):
            histogram = pb_utils.MetricFamily("seconds", "Seconds", pb_utils.MetricFamily.HISTOGRAM)
            gauge = pb_utils.MetricFamily("depth", 'a "text"\n# TYPE \ud800', pb_utils.MetricFamily.GAUGE)
            refused = 0
            for name in ("", "a b", 'a="1"} 1\n# ', "1st", "über", "__name__", "le"):
                try:
                    family, buckets = (histogram, [1.0]) if name == "le" else (gauge, None)
                    family.Metric({name: "value"}, buckets)
                except pb_utils.TritonModelException as error:
                    refused += repr(name) in str(error)
            depth = gauge.Metric({"model": 'a\n"b" \\ \ud800'})
            depth.set(3)
            depth.value()  # returns once the server has set it
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([refused], np.float32))])]
    """
    save_python_model(tmp_path, "measures", code)
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        assert infer(client, "measures", np.ones(1, np.float32)) == [7]
        text, _ = server.run(exposition(server.core))
    (depth,) = [family for family in text_string_to_metric_families(text.decode()) if family.name == "depth"]
    assert [(one.labels, one.value) for one in depth.samples] == [({"model": 'a\n"b" \\ ?'}, 3)]
