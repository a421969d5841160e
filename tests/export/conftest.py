from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import cache
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from halfserve.export.certificate.budget import Budget
from halfserve.export.certificate.certificate import Certificate
from halfserve.export.certificate.verdicts import OutputVerdict, Probe
from halfserve.export.to_onnx.export_onnx import serialize
from halfserve.export.verification.metrics import compare
from tests.export.stored_models import chain


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def _torch_operators_once() -> Iterator[None]:
    with _made_once():
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


@contextmanager
def _made_once() -> Iterator[None]:
    """Have `torch.onnx.export` take a copy of a table that is made on first use.

    It parses the sources of some five hundred functions for a table, which takes longer than the export of a small model.
    """
    from torch.onnx._internal.exporter._registration import ONNXRegistry  # noqa: PLC0415  (slow, and few tests export)

    make: Any = ONNXRegistry.from_torchlib
    table = cache(make)

    def copied(**version: int) -> Any:
        # An export adds translations of its own to the lists, and leaves what they hold as it is.
        fresh = copy(table(**version))
        fresh.functions = {operator: [*translations] for operator, translations in fresh.functions.items()}
        return fresh

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(copied))
        yield
