from __future__ import annotations

import pytest
from onnx import TensorProto, helper

from export.placement.predict_cuda import predict_cuda
from tests.export.onnx_files import sums, with_a_body
from tests.export.placement.half_models import half_model, one_node


def test_what_goes_to_the_cpu_is_named_with_its_reason() -> None:
    tan, grid = predict_cuda(half_model())
    assert (tan.node, tan.kind) == ("tan", "on the CPU")
    assert tan.text.startswith("ONNX Runtime 1.31.1 has no CUDA kernel for Tan of opset 7; it runs on the CPU, and its inputs")
    assert (grid.node, grid.kind) == ("grid_sample", "no float16 kernel")
    assert "has no float16 CUDA kernel for GridSample of opset 20; it runs on the CPU in float32" in grid.text


@pytest.mark.parametrize(
    ("op_type", "opset", "kinds"),
    [
        ("Relu", 20, []),
        ("Clip", 12, []),
        ("Atan", 20, ["on the CPU"]),
        ("Hardmax", 20, ["on the CPU"]),
        ("Tanh", 20, []),
        ("Mish", 20, ["broken up"]),
    ],
)
def test_operators_in_float16(op_type: str, opset: int, kinds: list[str]) -> None:
    assert [warning.kind for warning in predict_cuda(one_node(op_type, opset))] == kinds


def test_the_opset_decides() -> None:
    def cumulative(opset: int) -> list[str]:
        model = one_node("CumSum", opset)
        model.graph.node[0].input.append("axis")
        model.graph.initializer.append(helper.make_tensor("axis", TensorProto.INT64, [], [0]))
        return [warning.kind for warning in predict_cuda(model)]

    assert cumulative(13) == ["no float16 kernel"]
    assert cumulative(14) == []


def test_float32_has_other_kernels() -> None:
    assert predict_cuda(sums()) == ()
    assert [warning.kind for warning in predict_cuda(one_node("Tan", 20, TensorProto.FLOAT))] == ["on the CPU"]


def test_other_domains() -> None:
    assert predict_cuda(one_node("Gelu", 20, domain="com.microsoft")) == ()
    (warning,) = predict_cuda(one_node("Mystery", 20, domain="com.example"))
    assert (warning.node, warning.kind) == ("y", "on the CPU")


def test_nodes_in_bodies_are_seen() -> None:
    model = with_a_body()
    (inner,) = next(entry.g.node for entry in model.graph.node[1].attribute if entry.name == "then_branch")
    inner.op_type = "Asin"
    del inner.input[1:]
    (warning,) = predict_cuda(model)
    assert (warning.node, warning.op_type) == ("inner_add", "Asin")


def test_own_functions_are_not_judged() -> None:
    model = one_node("Own", 20)
    body = [helper.make_node("Relu", ["a"], ["b"])]
    model.functions.append(helper.make_function("", "Own", ["a"], ["b"], body, list(model.opset_import)))
    assert predict_cuda(model) == ()
