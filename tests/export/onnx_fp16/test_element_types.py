"""Which nodes take float16, by operator, opset, runtime and body."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from tests.export.onnx_fp16.models import FLOAT, FLOAT16, assert_clean_both_ways, halve, judged, normal, ops, reasons, types
from tests.export.stored_models import parse

X, ROW = {"x": normal(3)}, "g (float[3] x) => (float[3] y)"


def test_thresholds_of_a_non_max_suppression_stay_float32() -> None:
    model = parse(
        """g (float[1, 4, 4] boxes, float[1, 1, 4] scores) => (int64[N, 3] y) {
        b = Relu (boxes) s = Sigmoid (scores) y = NonMaxSuppression (b, s, most, iou) }""",
        most=np.int64(2),
        iou=0.5,
    )
    converted, report = halve(model)
    assert types(converted)["iou"] == FLOAT
    assert reasons(report)["y"] == "NonMaxSuppression takes no float16"
    assert (report.float_nodes, report.fp16_nodes, report.unsupported_nodes) == (2, 2, 1)


def test_statistics_of_a_layer_norm_stay_float32() -> None:
    text = "g (float[3, 8] x) => (float[3, 8] y, float[3, 1] m, float[3, 1] d) { y, m, d = LayerNormalization (x, w, b) }"
    converted = judged(parse(text, w=normal(8), b=normal(8)), {"x": normal(3, 8)}, keep=False)
    known = types(converted)
    assert (known["y"], known["m"], known["d"]) == (FLOAT16, FLOAT, FLOAT)


MVN = "g (float[2, 3, 4, 4] x) => (float[2, 3, 4, 4] y) { n = MeanVarianceNormalization <axes = [0, 2, 3]> (x) y = Neg (n) }"
LATER = "takes float16 from opset"
RANDOM: dict[str, Any] = {"zero": 0.0}


@pytest.mark.parametrize(
    ("text", "opset", "weights", "kept"),
    [
        (f"{ROW} {{ y = CumSum (x, axis) }}", 13, {"axis": np.int64(0)}, {"y": f"CumSum {LATER} 14 on; the model has 13"}),
        (f"{ROW} {{ y = Celu (x) }}", 20, {}, {"y": f"Celu {LATER} 28 on; the model has 20"}),
        (f"{ROW} {{ m = ReduceMax <keepdims = 0> (x) y = Range (m, m, m) }}", 20, {}, {"m": "", "y": f"Range {LATER} 27"}),
        ("g (float[3] x) => (bool[3] y) { y = IsInf (x) }", 19, {}, {"y": f"IsInf {LATER} 20 on; the model has 19"}),
        ("g (float[3] x) => (bool[3] y) { y = IsNaN (x) }", 13, {}, {}),
        (f'{ROW} {{ y = ScatterND <reduction = "add"> (x, i, x) }}', 20, {"i": [[0], [1], [2]]}, {"y": "no float16 kernel"}),
        (f"{ROW} {{ n = RandomNormal <shape = [3]> () z = Mul (n, zero) y = Add (x, z) }}", 20, RANDOM, {"n": ""}),
        (f"{ROW} {{ n = RandomUniform <shape = [3]> () z = Mul (n, zero) y = Add (x, z) }}", 20, RANDOM, {"n": ""}),
        ("g (float[3] x) => (int32[3] y) { y = BitCast <to = 6> (x) }", 26, {}, {"y": "BitCast reads the bits of float32"}),
        (MVN, 9, {}, {"n": "squares overflow"}),
        (MVN, 13, {}, {"n": "squares overflow"}),
        (f"{ROW} {{ b = com.microsoft.BiasGelu (x, bias) y = Neg (b) }}", 20, {"bias": normal(3)}, {}),
    ],
)  # fmt: skip
def test_a_node_that_float16_or_a_runtime_lacks_stays_float32(
    text: str, opset: int, weights: dict[str, Any], kept: dict[str, str]
) -> None:
    imports = ', "com.microsoft": 1' if "microsoft" in text else ""
    found = reasons(halve(parse(text, opset=opset, ir=13 if opset > 20 else 8, imports=imports, **weights))[1])
    assert found.keys() == kept.keys()
    assert all(reason in found[name] for name, reason in kept.items())


@pytest.mark.parametrize("opset", [9, 13])
def test_what_runtimes_take_apart_into_squares_answers_right(opset: int) -> None:
    assert_clean_both_ways(parse(MVN, opset=opset, ir=8), {"x": 100 * normal(2, 3, 4, 4)})


@pytest.mark.parametrize(("perm", "shape"), [("1, 0, 2", (2, 3, 4)), ("1, 2, 0", (4, 2, 3)), ("1, 2, 0, 3", (2, 3, 2, 4))])
def test_a_transpose_whose_fusion_crashes_the_runtime_stays_float32(perm: str, shape: tuple[int, ...]) -> None:
    dims = ", ".join("NTHK"[: len(shape)])
    model = parse(
        f"""g (float[{dims}] x) => (float y) {{ r = Relu (x) t = Transpose <perm = [{perm}]> (r)
        m = MatMul (t, w) y = ReduceSum (m) }}""",
        w=normal(4, 5),
    )
    model.graph.output[0].type.tensor_type.ClearField("shape")
    assert "crashes" in reasons(halve(model)[1])["t"]
    assert_clean_both_ways(model, {"x": normal(*shape)})


def test_operators_that_nobody_knows_stay_float32() -> None:
    model = parse(
        "g (float[2, 4] x) => (float[2, 4] y) { r = Relu (x) b = mine.Mystery (r, w) n = Neg (b) y = Abs (n) }",
        imports=', "mine": 1',
        w=normal(4),
    )
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("b", FLOAT, [2, 4]))
    converted, report = halve(model)
    assert ops(converted) == ["Cast", "Relu", "Cast", "Mystery", "Cast", "Neg", "Abs", "Cast"]
    assert reasons(report) == {"b": "the types that mine:Mystery takes are unknown"}


def test_type_attributes_follow() -> None:
    model = parse(
        """g (int64[2] shape, float[2, 3] x) => (float[N, M] y, float[2, 3] e) {
        f = ConstantOfShape (shape) g = ConstantOfShape <value = float[1] {0.25}> (shape) s = Add (f, g) y = Neg (s)
        e = EyeLike (x) }"""
    )
    converted = assert_clean_both_ways(model, {"shape": np.array([2, 2]), "x": normal(2, 3)})
    fills = [node.attribute[0].t.data_type for node in converted.graph.node if node.op_type == "ConstantOfShape"]
    assert fills == [FLOAT16, FLOAT16]


@pytest.mark.parametrize("attribute", ["value = float {0.5}", "value_float = 0.5", "value_floats = [0.5]"])
def test_constants_in_all_their_forms(attribute: str) -> None:
    converted = assert_clean_both_ways(parse(f"{ROW} {{ c = Constant <{attribute}> () y = Mul (x, c) }}"), X)
    (constant,) = [node for node in converted.graph.node if node.op_type == "Constant"]
    assert constant.attribute[0].t.data_type == FLOAT16


def bodies(model: onnx.ModelProto) -> list[onnx.GraphProto]:
    return [attribute.g for node in model.graph.node for attribute in node.attribute if attribute.HasField("g")]


@pytest.mark.parametrize("yes", [True, False])
def test_branches_agree_on_a_type(yes: bool) -> None:
    model = parse(
        """g (bool c, float[3] x, int64[3] i) => (float[3] y) {
        b = If (c) <then_branch = t () => (float[3] p) { q = Relu (x) p = Mul (q, w) },
                    else_branch = e () => (float[3] r) { r = Cast <to = 1> (i) }>
        y = Neg (b) }""",
        w=normal(3),
    )
    converted = assert_clean_both_ways(model, X | {"c": np.array(yes), "i": np.array([1, 2, 3])})
    assert {body.output[0].type.tensor_type.elem_type for body in bodies(converted)} == {FLOAT16}


def test_a_branch_in_float32_inside_a_model_in_float16() -> None:
    model = parse(
        """g (bool c, float[3] x) => (float[3] y) {
        b = If (c) <then_branch = t () => (float[3] p) { [q] q = Exp (x) [p] p = Log (q) },
            else_branch = e () => (float[3] r) { r = Neg (x) }>
        y = Neg (b) }"""
    )
    converted = judged(model, X | {"c": np.array(True)}, keep_fp32_nodes=["[qp]"])
    then = bodies(converted)[0]
    assert [node.op_type for node in then.node] == ["Exp", "Log", "Cast"]
    assert then.output[0].name == "p"


LOOP = "Loop (n, , {}) <body = b (int64 i, bool c, float[3] v) => (bool d, float[3] w) {{ d = Identity (c) {} }}>"


@pytest.mark.parametrize(
    ("text", "options", "kind"),
    [
        (f"y = {LOOP.format('x', 'u = Max (v, k) w = Mul (u, k)')}", {}, FLOAT16),
        (f"r = Relu (x) l = {LOOP.format('r', 'u = Exp (v) w = Log (u)')} y = Neg (l)", {"keep_fp32_nodes": ["l"]}, FLOAT),
        (f"y = {LOOP.format('low', 'w = Max (v, x)')}", {}, FLOAT),
    ],
    ids=["carries float16", "blocked", "starts out of float16's range"],
)
def test_a_loop_has_one_type_for_what_it_carries(text: str, options: dict[str, Any], kind: int) -> None:
    known = {"k": normal(3), "low": np.full(3, -1e9)}
    used: dict[str, Any] = {name: array for name, array in known.items() if f"{name})" in text or f", {name}" in text}
    model = parse(f"g (int64 n, float[3] x) => (float[3] y) {{ {text} }}", **used)
    (body,) = bodies(judged(model, X | {"n": np.array(4)}, **options))
    assert body.input[2].type.tensor_type.elem_type == kind
    assert "Cast" not in [node.op_type for node in body.node]


def test_a_body_reads_a_weight_that_others_want_in_float32() -> None:
    model = parse(
        """g (bool c, float[3] x) => (float[3] y) {
        o = Exp (w)
        b = If (c) <then_branch = t () => (float[3] p) { p = Mul (x, w) },
            else_branch = e () => (float[3] r) { r = Mul (x, o) }>
        y = Neg (b) }""",
        w=normal(3),
    )
    converted = judged(model, X | {"c": np.array(True)}, keep_fp32_ops=["Exp"])
    kinds = {tensor.name: tensor.data_type for tensor in converted.graph.initializer}
    assert kinds == {"w": FLOAT, "w_float16": FLOAT16}


def test_nested_bodies_reach_out_two_levels() -> None:
    model = parse(
        """g (int64 n, bool c, float[3] x) => (float[3] y) {
        r = Relu (x)
        y = Loop (n, , r) <body = b (int64 i, bool k, float[3] v) => (bool d, float[3] w) {
            d = Identity (k)
            w = If (c) <then_branch = t () => (float[3] p) { p = Add (v, r) },
                else_branch = e () => (float[3] q) { q = Sub (v, r) }> }> }"""
    )
    assert_clean_both_ways(model, X | {"n": np.array(3), "c": np.array(True)})
