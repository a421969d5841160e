from __future__ import annotations

from pathlib import Path

import pytest
from onnx import TensorProto, helper

from halfserve.export.placement.cuda_kernels import TABLE, Kernel, cuda_kernels, parse_table, predict_cuda
from tests.export.placement.half_models import half_model, one_node
from tests.export.stored_models import parse, sums, with_a_body
from tests.serve.cuda_emulator.kernel_table import OPEN_END, make_table, table_of


def test_what_goes_to_the_cpu_is_named_with_its_reason() -> None:
    tan, grid = predict_cuda(half_model())
    assert (tan.node, tan.kind) == ("tan", "on the CPU")
    assert tan.text.startswith("ONNX Runtime 1.31.1 has no CUDA kernel for Tan of opset 7; it runs on the CPU, and its inputs")
    assert (grid.node, grid.kind) == ("grid_sample", "no float16 kernel")
    assert "has no float16 CUDA kernel for GridSample of opset 20; it runs on the CPU in float32" in grid.text


@pytest.mark.parametrize(
    ("dtype", "op_type", "opset", "kinds"),
    [
        ("float16", "Relu", 20, []),
        ("float16", "Clip", 12, []),
        ("float16", "Atan", 20, ["on the CPU"]),
        ("float16", "Hardmax", 20, ["on the CPU"]),
        ("float16", "Tanh", 20, []),
        ("float16", "Mish", 20, ["broken up"]),
        ("float", "Tan", 20, ["on the CPU"]),
        # Kernels without an end are for their first version alone.
        *[("float", op_type, 21, []) for op_type in ("Elu", "Selu", "ThresholdedRelu")],
        *[("float", op_type, 22, ["on the CPU"]) for op_type in ("Elu", "Selu", "ThresholdedRelu")],
        ("bfloat16", "Relu", 20, []),
        ("bfloat16", "Softplus", 22, []),
        ("bfloat16", "Mish", 22, ["broken up"]),
        ("bfloat16", "Elu", 21, ["refused"]),
        ("bfloat16", "LeakyRelu", 22, ["refused"]),
        ("bfloat16", "GlobalMaxPool", 22, ["refused"]),
        ("bfloat16", "Clip", 22, ["broken up"]),
    ],
)
def test_type_and_opset_of_a_node_decide(dtype: str, op_type: str, opset: int, kinds: list[str]) -> None:
    warnings = predict_cuda(one_node(op_type, opset, dtype))
    assert [warning.kind for warning in warnings] == kinds
    for warning in warnings:
        assert ("refuses the model: keep the node in float32" in warning.text) == (warning.kind == "refused")


@pytest.mark.parametrize(("opset", "kinds"), [(13, ["no float16 kernel"]), (14, [])])
def test_a_node_with_an_axis_is_found_by_its_opset(opset: int, kinds: list[str]) -> None:
    model = one_node("CumSum", opset)
    model.graph.node[0].input.append("axis")
    model.graph.initializer.append(helper.make_tensor("axis", TensorProto.INT64, [], [0]))
    assert [warning.kind for warning in predict_cuda(model)] == kinds


def test_other_domains() -> None:
    assert predict_cuda(sums()) == predict_cuda(one_node("Gelu", 20, domain="com.microsoft")) == ()
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


@pytest.mark.parametrize(
    ("attributes", "form"),
    [
        ("linear_before_reset = 1", None),
        ("", " without linear_before_reset"),
        ("linear_before_reset = 1, clip = 3.0", " with clip"),
    ],
)
def test_forms_of_an_operator_that_cuda_does_not_compute(attributes: str, form: str | None) -> None:
    text = f"""gru (float[4, 1, 2] x, float[1, 9, 2] w, float[1, 9, 3] r) => (float[4, 1, 1, 3] y) {{
        y = GRU <hidden_size = 3{", " if attributes else ""}{attributes}> (x, w, r) }}"""
    found = [warning.text for warning in predict_cuda(parse(text, opset=17, ir=8))]
    start = f"ONNX Runtime {cuda_kernels().release} has no CUDA kernel for GRU of opset 14{form}; it runs on the CPU"
    assert [text[: len(start)] for text in found] == ([] if form is None else [start])


def test_kernels_of_the_same_versions_are_one_entry() -> None:
    floats, others = ["tensor(float)"], ["tensor(float16)", "tensor(int8)", "tensor(string)"]
    kernels = [
        ("P", "", "Clip", (6, 10), {"T": floats}),
        ("P", "", "Clip", (11, 11), {"T": floats}),
        ("P", "", "Clip", (12, OPEN_END), {"T": floats}),
        ("P", "", "Clip", (12, OPEN_END), {"T": others}),
        ("P", "", "Norm", (1, OPEN_END), {"T": floats, "U": floats}),
        ("P", "", "Norm", (1, OPEN_END), {"T": ["tensor(bfloat16)"], "U": ["tensor(bfloat16)"]}),
        ("P", "com.microsoft", "Gelu", (1, OPEN_END), {"S": ["seq(tensor(double))"]}),
        ("P", "com.ms.internal.nhwc", "Conv", (1, OPEN_END), {"T": floats}),
        ("Q", "", "Tan", (7, OPEN_END), {}),
    ]
    table = table_of(kernels, "P")
    assert table == {
        "Clip": "6-10 T=f; 11 T=f; 12+ T=hfcn",
        "Norm": "1+ T=b U=b; 1+ T=f U=f",
        "com.microsoft:Gelu": "1+ S=d",
    }
    assert parse_table(table)["", "Clip"] == (
        Kernel(first=6, last=10, types=(("T", "f"),)),
        Kernel(first=11, last=11, types=(("T", "f"),)),
        Kernel(first=12, last=None, types=(("T", "hfcn"),)),
    )


@pytest.mark.parametrize("entries", ["", "T=f", "6-11 T=f, 12+ T=h", "6..11 T=f", "6 T="])
def test_entries_of_another_form_are_refused(entries: str) -> None:
    with pytest.raises(ValueError, match="is no entry of a kernel table"):
        parse_table({"Clip": entries})


@pytest.mark.long
def test_the_table_is_that_of_the_installed_runtime(tmp_path: Path) -> None:
    assert make_table(tmp_path) == TABLE.read_text(), "python -m tests.serve.cuda_emulator.kernel_table writes it"
