from __future__ import annotations

from types import SimpleNamespace

import pytest
from onnx import TensorProto, helper

from halfserve.export.placement.cuda_kernels import Kernel, cuda_kernels, format_table, parse_table, predict_cuda, registry_of
from tests.export.placement.half_models import half_model, one_node
from tests.export.stored_models import sums, with_a_body


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
    assert [warning.kind for warning in predict_cuda(one_node("Tan", 20, "float"))] == ["on the CPU"]


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


ANY = 2**31 - 1


def definition(op_name: str, versions: tuple[int, int], domain: str = "", **types: list[str]) -> SimpleNamespace:
    return SimpleNamespace(provider="P", domain=domain, op_name=op_name, version_range=versions, type_constraints=types)


def test_kernels_of_one_opset_are_put_together_and_equal_ranges_joined() -> None:
    definitions = [
        definition("Clip", (6, 10), T=["tensor(float)"]),
        definition("Clip", (11, 11), T=["tensor(float)"]),
        definition("Clip", (12, ANY), T=["tensor(float)"]),
        definition("Clip", (12, ANY), T=["tensor(float16)", "tensor(int8)"]),
        definition("SequenceAt", (11, ANY), S=["seq(tensor(float16))"], I=["tensor(int64)"]),
        definition("Gelu", (1, ANY), domain="com.microsoft", T=["tensor(double)", "tensor(bfloat16)"]),
        definition("Conv", (1, ANY), domain="com.ms.internal.nhwc", T=["tensor(float)"]),
        SimpleNamespace(provider="Q", domain="", op_name="Tan", version_range=(7, ANY), type_constraints={}),
    ]
    registry = registry_of(definitions, "P")
    assert registry == {
        ("", "Clip"): (Kernel(first=6, last=11, types="f"), Kernel(first=12, last=ANY, types="hfn")),
        ("", "SequenceAt"): (Kernel(first=11, last=ANY, types="hn"),),
        ("com.microsoft", "Gelu"): (Kernel(first=1, last=ANY, types="db"),),
    }
    table = format_table(registry)
    assert table == {"Clip": "6-11 f; 12+ hfn", "SequenceAt": "11+ hn", "com.microsoft:Gelu": "1+ db"}
    assert parse_table(table) == registry


@pytest.mark.parametrize("ranges", ["", "6", "6-11 f, 12+ h", "6..11 f"])
def test_entries_of_another_form_are_refused(ranges: str) -> None:
    with pytest.raises(ValueError, match="is no entry of a kernel table"):
        parse_table({"Clip": ranges})


def test_the_table_holds_what_is_known_of_cuda() -> None:
    release, table = cuda_kernels()
    assert release
    assert len(table) > 200
    assert table == parse_table(format_table(table))
    only_fp32 = {"GridSample", "Range", "EyeLike"}
    assert not [name for name in only_fp32 if any("h" in kernel.types for kernel in table["", name])]
    for name in ("Tan", "Asin", "Det", "LpPool", "Hardmax", "AffineGrid", "MaxUnpool", "Multinomial", "Col2Im", "STFT"):
        assert ("", name) not in table
    for name in ("Conv", "MatMul", "LayerNormalization", "Softmax", "Resize", "LSTM"):
        assert "h" in table["", name][-1].types
