from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from tests.export.onnx_fp16.models import FLOAT, FLOAT16, assert_clean_both_ways, halve, judged, normal, ops, reasons, types
from tests.export.stored_models import parse


def test_scales_of_a_resize_stay_float32() -> None:
    model = parse(
        'g (float[1, 1, 2, 3] x) => (float[A, B, C, D] y) { r = Relu (x) y = Resize <mode = "linear"> (r, , s) }',
        opset=13,
        s=[1.0, 1, 1.7, 2.3],
    )
    converted = assert_clean_both_ways(model, {"x": normal(1, 1, 2, 3)})
    assert types(converted)["s"] == FLOAT
    assert halve(model)[1].share == 1.0


def test_an_upsample_of_the_old_days() -> None:
    model = parse(
        'g (float[1, 1, 2, 3] x) => (float[1, 1, 4, 6] y) { y = Upsample <mode = "nearest"> (x, s) }', opset=9, s=[1.0, 1, 2, 2]
    )
    assert types(assert_clean_both_ways(model, {"x": normal(1, 1, 2, 3)}))["s"] == FLOAT


def test_thresholds_of_a_non_max_suppression_stay_float32() -> None:
    model = parse(
        """g (float[1, 4, 4] boxes, float[1, 1, 4] scores) => (int64[N, 3] y) {
        b = Relu (boxes) s = Sigmoid (scores) y = NonMaxSuppression (b, s, most, iou) }""",
        most=np.int64(2),
        iou=0.5,
    )
    boxes = np.array([[[0, 0, 1, 1], [0, 0.5, 1, 1.5], [4, 4, 5, 5], [8, 8, 9, 9]]], np.float32)
    judged(model, {"boxes": boxes, "scores": np.array([[[0.9, 0.75, 0.6, 0.95]]], np.float32)})
    converted, report = halve(model)
    assert types(converted)["iou"] == FLOAT
    assert reasons(report)["y"] == "NonMaxSuppression takes no float16"
    assert (report.float_nodes, report.fp16_nodes, report.unsupported_nodes) == (2, 2, 1)


def test_statistics_of_a_layer_norm_stay_float32() -> None:
    model = parse(
        "g (float[3, 8] x) => (float[3, 8] y, float[3, 1] m, float[3, 1] d) { y, m, d = LayerNormalization (x, w, b) }",
        w=normal(8),
        b=normal(8),
    )
    converted = judged(model, {"x": normal(3, 8)}, keep=False)
    known = types(converted)
    assert (known["y"], known["m"], known["d"]) == (FLOAT16, FLOAT, FLOAT)


@pytest.mark.parametrize(
    ("op", "opset", "half_from"),
    [("CumSum", 13, 14), ("IsInf", 19, 20), ("Celu", 20, 28), ("Range", 20, 27), ("IsNaN", 13, None)],
)
def test_operators_that_take_float16_only_later_stay_float32_until_then(op: str, opset: int, half_from: int | None) -> None:
    calls = {"CumSum": "CumSum (a, axis)", "Range": "Range (a, b, c)"}
    outputs = {"IsInf": "bool", "IsNaN": "bool"}
    text = f"g (float[N] x) => ({outputs.get(op, 'float')}[M] y) {{ y = {calls.get(op, op + ' (a)')} }}"
    declared = "a = ReduceMax (x) b = Add (a, a) c = Abs (a)" if op == "Range" else "a = Neg (x)"
    if op == "Range":
        declared = "a = ReduceMax <keepdims = 0> (x) b = Add (a, a) c = Abs (a)"
    model = parse(text.replace("{ ", "{ " + declared + " "), opset=opset, axis=np.int64(0))
    if op != "CumSum":
        del model.graph.initializer[:]
    _, report = halve(model)
    if half_from is None:
        assert report.kept == ()
    elif op == "Range":
        assert reasons(report)["y"].startswith("Range takes float16 from opset 27")
    else:
        assert reasons(report) == {"y": f"{op} takes float16 from opset {half_from} on; the model has {opset}"}


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
    model = parse(f"g (float[3] x) => (float[3] y) {{ c = Constant <{attribute}> () y = Mul (x, c) }}")
    converted = assert_clean_both_ways(model, {"x": normal(3)})
    (constant,) = [node for node in converted.graph.node if node.op_type == "Constant"]
    assert constant.attribute[0].t.data_type == FLOAT16


@pytest.mark.parametrize(
    ("call", "declared"),
    [
        ('ScatterND <reduction = "add"> (r, i, u)', {}),
        ('ScatterElements <reduction = "mul"> (r, j, u)', {}),
    ],
)
def test_what_the_cpu_refuses_stays_float32(call: str, declared: dict[str, Any]) -> None:
    model = parse(
        f"g (float[4] x, float[2] u) => (float[4] y) {{ r = Relu (x) s = {call} y = Neg (s) }}",
        i=np.array([[1], [3]]),
        j=np.array([1, 3]),
    )
    unused = "j" if "ScatterND" in call else "i"
    model.graph.initializer.remove(next(tensor for tensor in model.graph.initializer if tensor.name == unused))
    assert_clean_both_ways(model, {"x": normal(4), "u": normal(2)})
    assert "has no float16 kernel" in reasons(halve(model)[1])["s"]


@pytest.mark.parametrize("call", ["RandomNormal <shape = [3], seed = 1.0>", "RandomUniform <shape = [3], seed = 1.0>"])
def test_numbers_from_nowhere_stay_float32(call: str) -> None:
    model = parse(f"g (float[3] x) => (float[3] y) {{ n = {call} () z = Mul (n, zero) y = Add (x, z) }}", zero=0.0)
    judged(model, {"x": normal(3)})
    assert "n" in reasons(halve(model)[1])


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


def test_operators_of_the_runtimes_own_domain_are_known() -> None:
    model = parse(
        "g (float[2, 4] x) => (float[2, 4] y) { b = com.microsoft.BiasGelu (x, bias) y = Neg (b) }",
        imports=', "com.microsoft": 1',
        bias=normal(4),
    )
    model.graph.node[0].name = "b"
    _, report = halve(model)
    assert (report.float_nodes, report.fp16_nodes) == (2, 2)


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


def test_the_bits_of_a_float_are_read_from_float32() -> None:
    model = parse("g (float[3] x) => (int32[3] y) { r = Relu (x) y = BitCast <to = 6> (r) }", opset=26, ir=13)
    assert reasons(halve(model)[1]) == {"y": "BitCast reads the bits of float32"}


@pytest.mark.parametrize("opset", [9, 13])
def test_what_runtimes_take_apart_into_squares_stays_float32(opset: int) -> None:
    text = (
        "g (float[2, 3, 4, 4] x) => (float[2, 3, 4, 4] y) { n = MeanVarianceNormalization <axes = [0, 2, 3]> (x) y = Neg (n) }"
    )
    model = parse(text, opset=opset, ir=8)
    assert_clean_both_ways(model, {"x": 100 * normal(2, 3, 4, 4)})
    assert "squares overflow" in reasons(halve(model)[1])["n"]


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
    feeds = {"c": np.array(yes), "x": normal(3), "i": np.array([1, 2, 3])}
    converted = assert_clean_both_ways(model, feeds)
    assert {body.output[0].type.tensor_type.elem_type for body in bodies(converted)} == {FLOAT16}


def test_a_branch_that_gives_what_is_outside() -> None:
    model = parse(
        """g (bool c, float[3] x) => (float[3] y) {
        s = Sigmoid (x)
        y = If (c) <then_branch = t () => (float[3] p) { p = Identity (x) },
            else_branch = e () => (float[3] r) { r = Identity (s) }>
        }"""
    )
    assert_clean_both_ways(model, {"c": np.array(True), "x": normal(3)})


def test_a_branch_in_float32_inside_a_model_in_float16() -> None:
    model = parse(
        """g (bool c, float[3] x) => (float[3] y) {
        b = If (c) <then_branch = t () => (float[3] p) { q = Exp (x) p = Log (q) },
            else_branch = e () => (float[3] r) { r = Neg (x) }>
        y = Neg (b) }"""
    )
    for body in bodies(model):
        for node in body.node:
            node.name = node.output[0]
    converted = judged(model, {"c": np.array(True), "x": normal(3)}, keep_fp32_nodes=["[qp]"])
    then = bodies(converted)[0]
    assert [node.op_type for node in then.node] == ["Exp", "Log", "Cast"]
    assert then.output[0].name == "p"


def test_a_loop_carries_float16_and_gathers_it() -> None:
    model = parse(
        """g (int64 n, float[3] x) => (float[3] y, float[K, 3] all) {
        y, all = Loop (n, , x) <body = b (int64 i, bool c, float[3] v) => (bool d, float[3] w, float[3] s) {
            d = Identity (c) f = Cast <to = 1> (i) u = Max (v, k) w = Mul (u, half) s = Add (w, f) }> }""",
        k=normal(3),
        half=0.5,
    )
    converted = assert_clean_both_ways(model, {"n": np.array(4), "x": normal(3)})
    (body,) = bodies(converted)
    assert body.input[2].type.tensor_type.elem_type == FLOAT16


def test_a_blocked_loop_stays_float32_with_all_that_is_in_it() -> None:
    model = parse(
        """g (int64 n, float[3] x) => (float[3] y) {
        r = Relu (x)
        l = Loop (n, , r) <body = b (int64 i, bool c, float[3] v) => (bool d, float[3] w) {
            d = Identity (c) u = Exp (v) w = Log (u) }>
        y = Neg (l) }"""
    )
    converted = judged(model, {"n": np.array(2), "x": normal(3)}, keep_fp32_nodes=["l"])
    (body,) = bodies(converted)
    assert body.input[2].type.tensor_type.elem_type == FLOAT
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
    converted = judged(model, {"c": np.array(True), "x": normal(3)}, keep_fp32_ops=["Exp"])
    kinds = {tensor.name: tensor.data_type for tensor in converted.graph.initializer}
    assert kinds == {"w": FLOAT, "w_float16": FLOAT16}


def test_a_scan_over_float16() -> None:
    model = parse(
        """g (float[3] start, float[4, 3] xs) => (float[3] y, float[4, 3] ys) {
        y, ys = Scan <num_scan_inputs = 1, body = b (float[3] s, float[3] x) => (float[3] t, float[3] o) {
            t = Add (s, x) o = Mul (t, k) }> (start, xs) }""",
        k=0.5,
    )
    assert_clean_both_ways(model, {"start": normal(3), "xs": normal(4, 3)})


def test_nested_bodies_reach_out_two_levels() -> None:
    model = parse(
        """g (int64 n, bool c, float[3] x) => (float[3] y) {
        r = Relu (x)
        y = Loop (n, , r) <body = b (int64 i, bool k, float[3] v) => (bool d, float[3] w) {
            d = Identity (k)
            w = If (c) <then_branch = t () => (float[3] p) { p = Add (v, r) },
                else_branch = e () => (float[3] q) { q = Sub (v, r) }> }> }"""
    )
    assert_clean_both_ways(model, {"n": np.array(3), "c": np.array(True), "x": normal(3)})


def test_a_constant_that_starts_a_loop_out_of_range_keeps_its_variable_in_float32() -> None:
    model = parse(
        """g (int64 n, float[3] x) => (float[3] y) {
        y = Loop (n, , low) <body = b (int64 i, bool c, float[3] v) => (bool d, float[3] w) {
            d = Identity (c) w = Max (v, x) }> }""",
        low=np.full(3, -1e9, np.float32),
    )
    converted = judged(model, {"n": np.array(1), "x": normal(3)})
    assert bodies(converted)[0].input[2].type.tensor_type.elem_type == FLOAT
