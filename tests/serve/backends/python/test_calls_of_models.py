from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from halfserve.serve.observability.exposition import exposition
from tests.models import save_mlp
from tests.serve.backends.python.python_models import X_TO_Y, save_python_model, serving
from tests.serve.backends.python.test_python_models import infer

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


@pytest.mark.parametrize("elements", [3, 200_000])
def test_a_model_calls_a_model_and_awaits_several(tmp_path: Path, elements: int) -> None:
    save_python_model(tmp_path, "twice")
    save_python_model(tmp_path, "calls", CALLS.replace("NAME", "twice"))
    save_python_model(tmp_path, "outer", CALLS.replace("NAME", "calls"))
    save_python_model(tmp_path, "awaits", AWAITS)
    x = np.random.default_rng(0).standard_normal(elements).astype(np.float32)
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        np.testing.assert_array_equal(infer(client, "outer", x), x * 2 + 1 + 1)
        np.testing.assert_array_equal(infer(client, "awaits", x), x * 2 + x * 2 + x * 2)


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
        with pytest.raises(InferenceServerException, match="Deadline"):
            infer(client, "calls", x, client_timeout=0.4)
        assert infer(client, "calls", x) == [2]
        failures = server.call(lambda: dict(server.core.model("slow").statistics.totals.failures))
    assert failures.get("deadline_exceeded", 0) >= 1


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
            family = pb_utils.MetricFamily(name="texts_seen", description="Texts", kind=pb_utils.MetricFamily.COUNTER)
            self.counter = family.Metric(labels={"language": "en"})
            family = pb_utils.MetricFamily(name="text_length", description="Length", kind=pb_utils.MetricFamily.HISTOGRAM)
            self.lengths = family.Metric(buckets=[1.0, 10.0])

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
        ("_bucket", {"le": "1.0"}, 1),
        ("_bucket", {"le": "10.0"}, 2),
        ("_bucket", {"le": "+Inf"}, 2),
        ("_sum", {}, 5.5),
        ("_count", {}, 2),
    ]


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
            gauge.Metric({"model": 'a\n"b" \\ \ud800'}).set(3)
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([refused], np.float32))])]
    """
    save_python_model(tmp_path, "measures", code)
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        assert infer(client, "measures", np.ones(1, np.float32)) == [7]
        text, _ = server.run(exposition(server.core))
    (depth,) = [family for family in text_string_to_metric_families(text.decode()) if family.name == "depth"]
    assert [(one.labels, one.value) for one in depth.samples] == [({"model": 'a\n"b" \\ ?'}, 3)]
