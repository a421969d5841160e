"""Python models as steps of ensembles: with inputs that are left out, and with any number of responses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from tests.serve.backends.python.python_models import save_python_model, serving
from tests.serve.engine.ensembles.scene import serve

# Answers the names of its inputs, and each input by its own name.
TELLS = """
class TritonPythonModel:
    def execute(self, requests):
        return [self.answer({tensor.name(): tensor.as_numpy() for tensor in one.inputs()}) for one in requests]

    def answer(self, given):
        names = pb_utils.Tensor("names", np.array([" ".join(sorted(given))], object))
        return pb_utils.InferenceResponse([names, *(pb_utils.Tensor(f"{name}_out", x) for name, x in given.items())])
"""
OPTIONAL = """
input { name: "a" data_type: TYPE_FP32 dims: [ 1 ] optional: true }
input { name: "b" data_type: TYPE_FP32 dims: [ 1 ] optional: true }
output { name: "names" data_type: TYPE_STRING dims: [ 1 ] }
"""
OUTPUTS = """
output { name: "a_out" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "b_out" data_type: TYPE_FP32 dims: [ 1 ] }
"""
STEP = 'model_name: "tells" output_map { key: "names" value: "names" } input_map { key: "a" value: "a" }'
BOTH = f'{STEP} input_map {{ key: "b" value: "b" }}'
CHAIN = """
step {
  model_name: "tells" input_map { key: "a" value: "a" } input_map { key: "b" value: "b" }
  output_map { key: "a_out" value: "c" } output_map { key: "b_out" value: "d" }
}
step {
  model_name: "tells" input_map { key: "a" value: "c" } input_map { key: "b" value: "d" }
  output_map { key: "names" value: "names" }
}
"""


def names(client: InferenceServerClient, model: str, *given: str) -> str:
    """The inputs that the last step has got, for a request with these."""
    inputs = [InferInput(name, [1], "FP32").set_data_from_numpy(np.ones(1, np.float32)) for name in given]
    return str(client.infer(model, inputs, client_timeout=60).as_numpy("names")[0].decode())


@pytest.mark.parametrize(
    ("inputs", "steps", "given", "told"),
    [
        ("ab", f"step {{ {BOTH} }}", "ab", "a b"),
        ("ab", f"step {{ {BOTH} }}", "b", "b"),
        ("a", f"step {{ {STEP} }}", "a", "a"),
        ("ab", CHAIN, "ab", "a b"),
        ("ab", CHAIN, "b", "b"),
    ],
    ids=["all", "one left out", "one without a tensor", "chain", "chain, one left out"],
)
def test_an_optional_input_is_left_out_of_the_request_of_its_step(
    tmp_path: Path, inputs: str, steps: str, given: str, told: str
) -> None:
    save_python_model(tmp_path, "tells", TELLS, OPTIONAL + OUTPUTS)
    own = "\n".join(line for line in OPTIONAL.split("\n") if inputs == "ab" or '"b"' not in line)
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        server.call(lambda: serve(server.core, f'platform: "ensemble" {own} ensemble_scheduling {{ {steps} }}'))
        assert names(client, "pipe", *given) == told


def test_an_input_that_a_step_needs_may_not_be_left_out(tmp_path: Path) -> None:
    save_python_model(tmp_path, "tells", TELLS, OPTIONAL.replace("dims: [ 1 ] optional: true", "dims: [ 1 ]", 1) + OUTPUTS)
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        server.call(lambda: serve(server.core, f'platform: "ensemble" {OPTIONAL} ensemble_scheduling {{ step {{ {BOTH} }} }}'))
        with pytest.raises(InferenceServerException, match=r"INVALID_ARGUMENT\] .*input 'a'"):
            names(client, "pipe", "b")
