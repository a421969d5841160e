from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest

from halfserve.export.conversion_settings import ConversionSettings
from halfserve.export.export_errors import ExportError
from halfserve.export.onnx_files.model_file import densify, open_model
from halfserve.export.onnx_fp16.conversion_report import Repair
from halfserve.export.onnx_fp16.convert import convert, convert_file, convert_float_to_float16
from halfserve.export.onnx_fp16.opset_upgrade import upgrade_opset
from halfserve.export.onnx_fp16.repair import PassError, run_passes
from halfserve.export.onnx_fp16.repair.edits import RepairPass
from tests.export.onnx_fp16.models import FLOAT, FLOAT16, assert_clean_both_ways, halve, normal, ops, reasons, run
from tests.export.stored_models import in_one_file, parse, with_data_files

FUNCTIONS = """
<ir_version: 9, opset_import: ["": 20, "local": 1]>
g (float[3] x, int64[3] i) => (float[3] y) {
    [first] a = local.twice <factor: float = 2.0> (x)
    [second] b = local.twice <factor: float = 3.0> (a)
    f = Cast <to = 1> (i)
    y = Add (b, f)
}
<domain: "local", opset_import: ["": 20]>
twice <factor: float> (v) => (w) { k = Constant <value_float: float = @factor> () s = Mul (v, k) w = Tanh (s) }
"""


def test_functions_are_inlined() -> None:
    model = onnx.parser.parse_model(FUNCTIONS)
    converted = assert_clean_both_ways(model, {"x": normal(3), "i": np.array([1, 2, 3])})
    assert list(converted.functions) == []
    assert [op for op in ops(converted) if op in ("Mul", "Tanh")] == ["Mul", "Tanh"] * 2


def test_a_blocked_call_keeps_all_that_it_stands_for() -> None:
    kept = reasons(halve(onnx.parser.parse_model(FUNCTIONS), keep_fp32_nodes=["second"])[1])
    assert len(kept) == 2
    assert set(kept.values()) == {"in keep_fp32_nodes"}


def test_functions_that_call_each_other_in_a_ring_are_an_error() -> None:
    text = FUNCTIONS.replace("w = Tanh (s)", "w = local.twice <factor: float = 1.0> (s)").replace(
        'opset_import: ["": 20]>\ntwice', 'opset_import: ["": 20, "local": 1]>\ntwice'
    )
    with pytest.raises(ExportError, match="functions cannot be inlined: .*inline them before"):
        halve(onnx.parser.parse_model(text))


def sparse(indices: list[int] | list[list[int]], dims: list[int]) -> onnx.SparseTensorProto:
    values = onnx.helper.make_tensor("w", FLOAT, [2], [1.5, 2.5])
    where = np.asarray(indices)
    return onnx.helper.make_sparse_tensor(
        values, onnx.helper.make_tensor("i", onnx.TensorProto.INT64, where.shape, where.ravel()), dims
    )


@pytest.mark.parametrize("indices", [[1, 3], [[0, 1], [1, 1]]])
def test_sparse_weights_become_dense(indices: list[int] | list[list[int]]) -> None:
    model = parse("g (float[2, 2] x) => (float[2, 2] y) { y = Add (x, w) }")
    model.graph.sparse_initializer.append(sparse(indices, [2, 2]))
    converted = convert_float_to_float16(model)
    onnx.checker.check_model(converted, full_check=True)
    assert [tensor.data_type for tensor in converted.graph.initializer] == [FLOAT16]
    np.testing.assert_array_equal(run(converted, x=np.zeros((2, 2), np.float32))[0], [[0, 1.5], [0, 2.5]])


def test_sparse_weights_and_constants_of_files_become_dense(tmp_path: Path) -> None:
    model = parse("g (float[4] x) => (float[4] y) { a = Add (x, w) y = Add (a, c) }")
    model.graph.sparse_initializer.append(sparse([1, 3], [4]))
    model.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["c"], sparse_value=sparse([0, 2], [4])))
    onnx.save(model, tmp_path / "in.onnx")
    convert_file(tmp_path / "in.onnx", tmp_path / "out.onnx")
    converted = onnx.load(tmp_path / "out.onnx")
    onnx.checker.check_model(converted, full_check=True)
    np.testing.assert_array_equal(run(converted, x=np.zeros(4, np.float32))[0], [1.5, 1.5, 2.5, 2.5])


def test_a_sparse_weight_in_a_data_file_is_refused() -> None:
    model = parse("g (float[4] x) => (float[4] y) { y = Add (x, w) }")
    model.graph.sparse_initializer.append(sparse([1, 3], [4]))
    model.graph.sparse_initializer[0].values.data_location = onnx.TensorProto.EXTERNAL
    with pytest.raises(ExportError, match="sparse tensor 'w' lies in a data file, expected it in the model: save the model in"):
        densify(model)


def test_a_sparse_weight_that_does_not_fit_is_an_error() -> None:
    model = parse("g (float[4] x) => (float[4] y) { y = Add (x, w) }")
    model.graph.sparse_initializer.append(sparse([1, 9], [4]))
    with pytest.raises(ExportError, match=r"sparse tensor 'w': its indices do not fit shape \[4\]; export the model again"):
        convert_float_to_float16(model)


def step(name: str, steps: list[str], fails_in: str = "") -> RepairPass:
    def do(what: str) -> None:
        steps.append(f"{name} {what}")
        if what == fails_in:
            raise ValueError("no luck\nsecond line")

    def call(model: onnx_ir.Model) -> list[Repair]:
        do("call")
        return [Repair(pass_name=name, nodes=("a",), text="done")]

    def left(model: onnx_ir.Model) -> list[onnx_ir.Node]:
        do("ensures")
        return list(model.graph) if fails_in == "repair" else []

    return RepairPass(name=name, call=call, left=left)


def test_passes_run_in_order_and_are_checked() -> None:
    model = onnx_ir.from_proto(parse("g (float[3] x) => (float[3] y) { y = Relu (x) }"))
    steps: list[str] = []
    done = run_passes(model, [step("first", steps), step("second", steps)])
    assert [repair.pass_name for repair in done] == ["first", "second"]
    assert steps == ["first call", "first ensures", "second call", "second ensures"]


@pytest.mark.parametrize(
    ("fails_in", "reason"),
    [("call", r"`call` \(no luck\)"), ("ensures", r"`ensures` \(no luck\)"), ("repair", r"`ensures` \(y was not repaired\)")],
)
def test_a_pass_that_fails_is_named_with_its_step_and_those_before_it(fails_in: str, reason: str) -> None:
    model = onnx_ir.from_proto(parse("g (float[3] x) => (float[3] y) { y = Relu (x) }"))
    with pytest.raises(PassError, match=rf"the repair 'second' failed in {reason}; passes before it: first;"):
        run_passes(model, [step("first", []), step("second", [], fails_in), step("third", [])])


# A LayerNormalization in parts stays float32 below opset 17, and says so; with the opset raised, it is one operator.

NORM = """m = ReduceMean <axes = [-1]> (a) d = Sub (a, m) q = Pow (d, two) v = ReduceMean <axes = [-1]> (q)
    e = Add (v, epsilon) r = Sqrt (e) n = Div (d, r) g = Mul (n, gain) y = Add (g, shift)"""
# An attention over `n` rows that were split into heads by sizes which only running tells, as torch's older exporter writes it.
BEFORE_13 = """s = Shape (x) rows = Gather (s, zero) one = Unsqueeze <axes = [0]> (rows)
    shape = Concat <axis = 0> (one, heads) h = Reshape (x, shape) p = Softmax <axis = 2> (h)
    z = ReduceSum <axes = [1], keepdims = 0> (p) k = Squeeze <axes = [0]> (shift1) w = MatMul (z, mix) a = Add (w, k)"""
FROM_13 = "h = Reshape (x, fixed) p = Softmax <axis = 2> (h) z = ReduceSum <keepdims = 0> (p, ones) a = MatMul (z, mix)"


def model(opset: int, **more: Any) -> onnx.ModelProto:
    """x [n, 32] -> y [n, 16]: softmax over 2 heads of 16, their sum, a product, and a norm in parts."""
    random = np.random.default_rng(0)
    weights: dict[str, Any] = {"two": 2.0, "epsilon": 1e-5, "gain": random.normal(size=16), "shift": random.normal(size=16)}
    weights["mix"] = random.normal(size=(16, 16)) * 30
    if opset < 13:
        weights |= {"zero": np.array(0), "heads": np.array([2, 16]), "shift1": random.normal(size=(1, 16))}
    else:
        weights |= {"fixed": np.array([-1, 2, 16]), "ones": np.array([1])}
    text = f"g (float[n,32] x) => (float[n,16] y) {{ {BEFORE_13 if opset < 13 else FROM_13} {NORM} }}"
    return parse(text, opset=opset, ir=7, **(weights | more))


X = np.random.default_rng(1).normal(size=(5, 32)).astype(np.float32)


@pytest.mark.parametrize("opset", [11, 12, 13, 14, 16])
def test_parts_of_a_norm_say_what_makes_them_one_operator(opset: int) -> None:
    done = convert(onnx_ir.from_proto(model(opset)), ConversionSettings())
    assert done.model.opset_imports[""] == opset
    parts = {name for name, reason in reasons(done.report).items() if f"the model has {opset}: --upgrade-opset" in reason}
    assert parts == {"m", "d", "q", "v", "e", "r", "n", "g", "y"}


@pytest.mark.parametrize("opset", [11, 12, 13, 14, 16])
def test_with_its_opset_raised_the_norm_is_one_operator(opset: int) -> None:
    before = model(opset)
    after = convert_float_to_float16(before, upgrade_opset=True, keep_io_types=False)
    onnx.checker.check_model(after, full_check=True)
    assert [entry.version for entry in after.opset_import] == [17]
    found = ops(after)
    assert "LayerNormalization" in found
    assert not {"Cast", "Flatten", "Sqrt"} & set(found)
    np.testing.assert_allclose(run(after, x=X.astype(np.float16))[0], run(before, x=X)[0], atol=2e-2)


def test_a_norm_by_its_moments_is_named_too() -> None:
    text = """g (float[n,16] a) => (float[n,16] y) { m = ReduceMean <axes = [-1]> (a) q = Mul (a, a)
        v = ReduceMean <axes = [-1]> (q) z = Mul (m, m) w = Sub (v, z) e = Add (w, epsilon) r = Sqrt (e) d = Sub (a, m)
        y = Div (d, r) }"""
    before = parse(text, opset=14, ir=7, epsilon=1e-5)
    done = convert(onnx_ir.from_proto(before), ConversionSettings())
    assert all("the model has 14: --upgrade-opset" in reason for reason in reasons(done.report).values())
    assert len(done.report.kept) == 9
    assert "LayerNormalization" in ops(convert_float_to_float16(before, upgrade_opset=True))


def test_names_metadata_and_weights_in_files_stay(tmp_path: Path) -> None:
    before = model(11, table=np.ones((64, 64)))
    before.metadata_props.add(key="author", value="someone")
    before.graph.node[-1].doc_string = "the last one"
    source = with_data_files(before, tmp_path / "in.onnx")
    done = convert_file(source, tmp_path / "out.onnx", upgrade_opset=True, repair=False)
    assert [repair.text for repair in done.report.repairs] == ["opset 11 became 17"]
    opened = open_model(tmp_path / "out.onnx")
    assert len(opened.locations) == 1
    assert opened.outline.graph.node[-2].doc_string == "the last one"
    assert {"author": "someone"}.items() <= {entry.key: entry.value for entry in opened.outline.metadata_props}.items()
    assert {node.name for node in before.graph.node} <= {node.name for node in opened.outline.graph.node}
    np.testing.assert_allclose(run(opened.proto, x=X)[0], run(before, x=X)[0], atol=2e-2)


def test_an_older_default_is_written_down() -> None:
    """RoiAlign moves its boxes by half a pixel from opset 16 on, unless told otherwise."""
    text = """g (float[1,1,8,8] x, float[1,4] boxes, int64[1] rows) => (float[1,1,2,2] y) {
        y = RoiAlign <output_height = 2, output_width = 2> (x, boxes, rows) }"""
    before = parse(text, opset=14, ir=7)
    work = onnx_ir.from_proto(before)
    upgrade_opset(work, ConversionSettings())
    feeds = {"x": np.arange(64.0, dtype=np.float32).reshape(1, 1, 8, 8), "boxes": np.array([[1, 1, 5, 5]], np.float32)}
    feeds["rows"] = np.zeros(1, np.int64)
    assert work.opset_imports[""] == 17
    np.testing.assert_array_equal(run(onnx_ir.to_proto(work), **feeds)[0], run(before, **feeds)[0])


@pytest.mark.parametrize("opset", [17, 20])
def test_a_newer_model_stays_as_it_is(opset: int) -> None:
    work = onnx_ir.from_proto(parse("g (float[2] x) => (float[2] y) { y = Relu (x) }", opset=opset))
    assert upgrade_opset(work, ConversionSettings()) == ()
    assert work.opset_imports[""] == opset


BODIES = """g (bool c, float[2] x) => (float[2] y) { y = If (c) <then_branch = t () => (float[2] p) <float[2] w = {1, 2}>
    { p = Add (x, w) }, else_branch = e () => (float[2] q) <float[2] w = {3, 4}> { q = Mul (x, w) }> }"""
TRAINING = """g (float[2,3] x, float[3] a) => (float[2,3] y, float[3] b, float[3] c, float[3] d, float[3] e) {
    y, b, c, d, e = BatchNormalization (x, a, a, a, a) }"""
OLD = "g (float[2,3] x, float[3] a) => (float[2,3] y) { y = BatchNormalization <is_test = 0> (x, a, a, a, a) }"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BODIES, "two bodies have a weight 'w'; leave --upgrade-opset out"),
        (TRAINING, "BatchNormalization 'y' trains; export the model for inference"),
        (OLD, "ONNX's version converter cannot raise the model to opset 13: .*; leave --upgrade-opset out"),
    ],
)
def test_what_cannot_be_raised_is_refused_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    opset = {TRAINING: 13, OLD: 6}.get(text, 11)
    source = in_one_file(parse(text, opset=opset, ir=7), tmp_path / "in.onnx")
    with pytest.raises(ExportError, match=message) as raised:
        convert_file(source, tmp_path / "out.onnx", upgrade_opset=True)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out.onnx").exists()


def test_functions_are_not_raised() -> None:
    text = """<ir_version: 8, opset_import: ["": 15, "local": 1]> g (float[2] x) => (float[2] y) { y = local.f (x) }
        <domain: "local", opset_import: ["": 15]> f (x) => (y) { y = Relu (x) }"""
    with pytest.raises(ExportError, match="the model has functions, whose opset is not raised from 15; inline them first"):
        convert_float_to_float16(onnx.parser.parse_model(text), upgrade_opset=True)


# Raising the opset so that more operators take bfloat16: the answers stay.


TO_BFLOAT16 = ConversionSettings(dtype="bfloat16")
IMAGES = normal(2, 4, 6, 6)
MODELS = {
    "reductions": "m = ReduceMax <axes = [2, 3]> (x) k = Conv (x, w) y = Sub (k, m)",
    "split": "a, b = Split <axis = 1> (x) c = Concat <axis = 1> (b, a) y = Conv (c, w)",
    "sampling": "k = Conv (x, w) y = GridSample <mode = 'bilinear'> (k, grid)".replace("'", '"'),
    "resizing": "k = Conv (x, w) y = Resize <mode = 'linear'> (k, , scales)".replace("'", '"'),
    "pools": "k = AveragePool <kernel_shape = [2, 2]> (x) y = MaxPool <kernel_shape = [2, 2]> (k)",
    "norms": "k = Conv (x, w) y = InstanceNormalization (k, s, s)",
    "body": """y = If (flag) <then_branch = t () => (float[a,b,c,d] p) { m = ReduceMax <axes = [1]> (x) p = Conv (x, w) },
        else_branch = e () => (float[a,b,c,d] q) { n = ReduceMax <axes = [1]> (x) z = Conv (x, w) q = Sub (z, n) }>""",
}


def raised_model(name: str, opset: int) -> onnx.ModelProto:
    weights: dict[str, Any] = {
        "w": normal(4, 4, 1, 1),
        "grid": normal(2, 5, 5, 2) / 2,
        "s": np.ones(4),
        "scales": np.array([1.0, 1, 2, 2]),
    }
    text = f"g (float[2,4,6,6] x, bool flag) => (float[a,b,c,d] y) {{ {MODELS[name]} }}"
    return parse(text, opset=opset, ir=8, **{key: value for key, value in weights.items() if re.search(rf"\b{key}\b", text)})


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("opset", [16, 17])
def test_a_raised_model_gives_the_same_answers(name: str, opset: int) -> None:
    before = raised_model(name, opset)
    work = onnx_ir.from_proto(before)
    (change,) = upgrade_opset(work, ConversionSettings(dtype="bfloat16", target_device="cpu"))
    after = onnx_ir.to_proto(work)
    onnx.checker.check_model(after, full_check=True)
    assert change.text == f"opset {opset} became 22"
    feeds = {"x": IMAGES, "flag": np.array(False)}
    np.testing.assert_allclose(run(after, **feeds)[0], run(before, **feeds)[0], rtol=0, atol=1e-6)


def test_it_is_not_raised_where_an_operator_loses_its_cuda_kernel() -> None:
    pools, convs, norms = (onnx_ir.from_proto(raised_model(name, 17)) for name in ("pools", "split", "norms"))
    assert upgrade_opset(norms, TO_BFLOAT16) == upgrade_opset(pools, replace(TO_BFLOAT16, repair=False)) == ()
    for work in (convs, pools):  # a repair writes MaxPool by other operators
        assert upgrade_opset(work, TO_BFLOAT16)
        assert work.opset_imports[""] == 22


def test_it_is_raised_only_as_far_as_bfloat16_gains() -> None:
    text = "g (float[n,4] x, bool[n,4] c) => (float[n,4] y) { a = MatMul (x, w) b = Softmax (a) y = Where (c, a, b) }"
    work = onnx_ir.from_proto(parse(text, opset=14, ir=7, w=normal(4, 4)))
    upgrade_opset(work, TO_BFLOAT16)
    assert work.opset_imports[""] == 17, "16 has Where, and 17 LayerNormalization"


def test_a_model_that_gains_nothing_stays_as_it_is() -> None:
    work = onnx_ir.from_proto(parse("g (float[n,4] x) => (float[n,4] y) { y = Softmax (x) }", opset=18, ir=8))
    assert upgrade_opset(work, TO_BFLOAT16) == ()


def test_a_group_norm_of_one_scale_for_each_group_is_refused() -> None:
    text = "g (float[2,4,6,6] x) => (float[2,4,6,6] y) { k = Conv (x, w) y = GroupNormalization <num_groups = 2> (k, s, s) }"
    work = onnx_ir.from_proto(parse(text, opset=18, ir=8, w=normal(4, 4, 1, 1), s=np.ones(2)))
    with pytest.raises(ExportError, match="GroupNormalization 'y' has one scale for each group, from opset 21 on one for each"):
        upgrade_opset(work, TO_BFLOAT16)
