from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from halfserve.export.cli.output import placement_lines, placement_list
from halfserve.export.export_errors import ExportError
from halfserve.export.onnx_files.model_file import open_model
from halfserve.export.placement.audit import CPU, Placement, audit_placement, find_islands
from halfserve.export.placement.cuda_kernels import TABLE, Kernel, cuda_kernels, parse_table, predict_cuda
from tests.export.stored_models import parse, sums, with_a_body, with_data_files
from tests.serve.cuda_emulator.kernel_table import OPEN_END, make_table, table_of
from tests.whole_words import printed


def half_model() -> onnx.ModelProto:
    """x [2, 8] float16 -> MatMul, Tan, (Exp, Sqrt in float32), Reshape, GridSample -> y."""
    text = """half (float16[2, 8] x, float16[1, 1, 4, 4] image) => (float16[1, 1, 4, 2] y) {
        [matmul] a = MatMul (x, w) [tan] b = Tan (a)
        [up] c = Cast <to = 1> (b) [exp] d = Exp (c) [sqrt] e = Sqrt (d) [down] f = Cast <to = 10> (e)
        [reshape] g = Reshape (f, grid) [grid_sample] y = GridSample (image, g) }"""
    return parse(text, ir=10, w=np.ones((8, 8), np.float16), grid=np.array([1, 4, 2, 2]))


def one_node(op_type: str, opset: int, dtype: str = "float16", domain: str = "") -> onnx.ModelProto:
    """y = op(x), x of the given type and any shape."""
    operator, imports = (f"{domain}.{op_type}", f', "{domain}": 1') if domain else (op_type, "")
    return parse(f"one ({dtype}[n] x) => ({dtype}[n] y) {{ y = {operator} (x) }}", opset=opset, ir=10, imports=imports)


CUDA = "CUDAExecutionProvider"


@pytest.fixture(scope="module")
def placement() -> Placement:
    return audit_placement(half_model(), providers=[CPU], reasons={"exp": "its output overflows"})


def test_every_node_is_where_the_runtime_put_it(placement: Placement) -> None:
    assert placement.assigned == {
        CPU: {"MatMul": 1, "Tan": 1, "Cast": 2, "Exp": 1, "Sqrt": 1, "Reshape": 1, "GridSample": 1},
    }
    assert (placement.level, placement.crashes) == ("ORT_ENABLE_ALL", ())
    assert placement.runtime == onnxruntime.__version__


def test_casts_of_the_file_and_of_the_runtime_are_told_apart(placement: Placement) -> None:
    assert placement.casts_in_file == 2
    assert placement.casts_at_runtime is not None
    assert placement.casts_at_runtime > placement.casts_in_file, "the CPU has float16 kernels for none of these"
    assert placement.copies == 0


def test_it_travels_as_json(placement: Placement) -> None:
    content = placement.to_json()
    assert json.loads(json.dumps(content)) == content
    assert content["islands"][0]["reasons"] == ["its output overflows"]


def test_a_table_and_a_few_lines_for_people(placement: Placement) -> None:
    first, *rest = placement_lines(placement)
    assert first.startswith("placement in ONNX Runtime 1.31.1: 8 nodes on CPU; 2 casts in the file and ")
    assert any("tan: ONNX Runtime 1.31.1 has no CUDA kernel for Tan of opset 7" in line for line in rest)
    text = printed(placement_list(placement), 200)
    assert "exp, sqrt" in text
    assert "its output overflows" in text


def test_a_model_with_data_files_is_opened_where_it_lies(tmp_path: Path) -> None:
    found = audit_placement(with_data_files(sums(), tmp_path / "m.onnx"), providers=[CPU])
    assert found.assigned == {CPU: {"Add": 4, "Mul": 1}}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m.0.bin", "m.onnx"], "and nothing is left beside it"


def test_the_optimised_model_of_a_large_one_is_not_asked_for() -> None:
    found = audit_placement(half_model(), providers=[CPU], largest_optimized_bytes=100)
    assert found.assigned[CPU]["MatMul"] == 1
    assert (found.casts_at_runtime, found.copies, found.nodes_at_runtime) == (None, None, None)
    assert placement_lines(found)[0] == (
        "placement in ONNX Runtime 1.31.1: 8 nodes on CPU; 2 casts in the file; 1 group of float32 nodes between casts"
    )


def test_an_absent_provider_is_named() -> None:
    with pytest.raises(ExportError, match="this ONNX Runtime has no 'NoneExecutionProvider'; it has .*CPUExecutionProvider"):
        audit_placement(half_model(), providers=["NoneExecutionProvider"])


def test_what_the_runtime_refuses_is_one_line() -> None:
    model = half_model()
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    with pytest.raises(ExportError, match=r"ONNX Runtime .* cannot open the model: .*Type Error.*"):
        audit_placement(model, providers=[CPU])


def test_a_crash_is_recorded_and_the_next_level_is_tried(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    real = Path(audit_placement.__code__.co_filename).with_name("session_worker.py")
    worker.write_text(
        "import os, runpy, signal, sys\n"
        "if sys.argv[2] == 'ORT_ENABLE_ALL': os.kill(os.getpid(), signal.SIGSEGV)\n"
        f"runpy.run_path({str(real)!r}, run_name='__main__')\n"
    )
    found = audit_placement(sums(), providers=[CPU], worker=worker)
    assert (found.level, found.crashes) == ("ORT_ENABLE_EXTENDED", ("ORT_ENABLE_ALL: killed by SIGSEGV",))
    with pytest.raises(ExportError, match="crashes when it opens the model \\(ORT_ENABLE_ALL: killed by SIGSEGV\\)"):
        audit_placement(sums(), providers=[CPU], worker=worker, levels=["ORT_ENABLE_ALL"])


def test_the_libraries_of_cuda_are_looked_for_where_pip_puts_them(tmp_path: Path) -> None:
    if CUDA not in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime is built without CUDA")
    worker, sought = tmp_path / "worker.py", tmp_path / "sought"
    real = Path(audit_placement.__code__.co_filename).with_name("session_worker.py")
    worker.write_text(
        "import pathlib, runpy\n"
        "from halfserve import nvidia_libraries\n"
        f"nvidia_libraries.load_nvidia_libraries = pathlib.Path({str(sought)!r}).touch\n"
        f"runpy.run_path({str(real)!r}, run_name='__main__')\n"
    )
    assert audit_placement(sums(), providers=[CPU], worker=worker).assigned.keys() == {CPU}
    assert not sought.exists()
    assert audit_placement(sums(), providers=[CUDA, CPU], worker=worker).nodes_at_runtime
    assert sought.exists()


@pytest.mark.gpu
def test_cuda_bounces_what_was_predicted() -> None:
    if CUDA not in onnxruntime.get_available_providers() or not Path("/dev/nvidia0").exists():
        pytest.skip("no CUDA device")
    found = audit_placement(half_model(), providers=[CUDA, CPU])
    assert {"Tan", "GridSample"} <= found.assigned[CPU].keys()
    assert found.assigned[CUDA]["MatMul"] == 1
    assert found.copies


def test_connected_float32_nodes_are_one_island() -> None:
    (island,) = find_islands(open_model(half_model()), {"sqrt": "kept", "exp": "kept", "tan": "not there"})
    assert island.nodes == ("exp", "sqrt")
    assert island.op_types == {"Exp": 1, "Sqrt": 1}
    assert island.reasons == ("kept",)


def test_casts_part_islands() -> None:
    model = half_model()
    between = [
        helper.make_node("Cast", ["d"], ["d16"], name="there", to=TensorProto.FLOAT16),
        helper.make_node("Cast", ["d16"], ["d32"], name="back", to=TensorProto.FLOAT),
    ]
    model.graph.node[4].input[0] = "d32"
    nodes = [*model.graph.node[:4], *between, *model.graph.node[4:]]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    assert [island.nodes for island in find_islands(open_model(model))] == [("exp",), ("sqrt",)]


def test_a_float32_model_is_one_island_and_a_float16_one_has_none() -> None:
    (island,) = find_islands(open_model(sums()))
    assert len(island.nodes) == 5
    assert find_islands(open_model(sums(dtype=np.float16))) == ()


def test_bodies_have_islands_of_their_own() -> None:
    groups = [island.nodes for island in find_islands(open_model(with_a_body()))]
    assert sorted(groups) == [("if",), ("inner_add",), ("other",)]


def test_float32_scales_do_not_make_a_node_float32() -> None:
    text = "g (float16[1, 1, 2, 2] x) => (float16[1, 1, 4, 4] y) { [resize] y = Resize (x, , scales) }"
    model = parse(text, ir=10, scales=np.array([1.0, 1, 2, 2]))
    onnx.checker.check_model(model, full_check=True)
    assert find_islands(open_model(model)) == ()


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
