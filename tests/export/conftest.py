from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from export.certificate.budget import Budget
from export.certificate.certificate import Certificate, OutputVerdict, Probe
from export.to_onnx.export_onnx import serialize
from export.verification.metrics import compare
from tests.export.chain import chain
from tests.export.torch_operators import made_once


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def _torch_operators_once() -> Iterator[None]:
    with made_once():
        yield


@pytest.fixture
def model() -> onnx.ModelProto:
    """x FP16 [batch, 1] -> y = 2 * x."""
    return chain(["Mul"], 2.0)


@pytest.fixture
def certify() -> Callable[[onnx.ModelProto], Certificate]:
    """Makes a certificate for a model, for tests that are not about its figures."""

    def certified(model: onnx.ModelProto) -> Certificate:
        content = serialize(model)
        ones = torch.ones(4, 2).numpy()
        verdict = OutputVerdict(name="y", execution="rounded", figures=compare(ones, ones), violations=())
        return Certificate(
            model="m",
            onnx_sha256=hashlib.sha256(content).hexdigest(),
            onnx_bytes=len(content),
            samples=4,
            budget=Budget(),
            outputs=(verdict,),
            probe=Probe(level="ORT_ENABLE_ALL"),
            created_utc="2026-01-01T00:00:00+00:00",
        )

    return certified


@pytest.fixture
def scalar_model() -> onnx.ModelProto:
    """x FP16 [batch] -> y = x: a tensor with nothing but a batch dimension."""
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["batch"]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "scalar", tensors[:1], tensors[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
