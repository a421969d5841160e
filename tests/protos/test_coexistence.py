"""Our messages and tritonclient's, of the same names, in one process."""

from __future__ import annotations

import subprocess
import sys

import pytest

USE_BOTH = """
from protos import inference_pb2
from tritonclient.grpc import service_pb2
ours = inference_pb2.ModelInferRequest(model_name="m")
theirs = service_pb2.ModelInferRequest.FromString(ours.SerializeToString())
assert theirs.model_name == "m" and type(ours) is not type(theirs)
assert inference_pb2.ModelInferRequest.InferInputTensor.DESCRIPTOR.full_name == "inference.ModelInferRequest.InferInputTensor"
print("both work")
"""


@pytest.mark.parametrize(
    "order", [("protos.inference_pb2", "tritonclient.grpc"), ("tritonclient.grpc", "protos.inference_pb2")]
)
def test_both_import_in_either_order(order: tuple[str, str]) -> None:
    program = "".join(f"import {name}\n" for name in order) + USE_BOTH
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "both work\n"), done.stderr
