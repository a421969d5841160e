from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from tests.export.onnx_fp16.models import FLOAT, FLOAT16, clean_both_ways, halve, judged, normal, ops, parse, reasons, types


def test_scales_of_a_resize_stay_float32() -> None:
    model = parse(
        'g (float[1, 1, 2, 3] x) => (float[A, B, C, D] y) { r = Relu (x) y = Resize <mode = "linear"> (r, , s) }',
        opset=13,
        s=[1.0, 1, 1.7, 2.3],
    )
    converted = clean_both_ways(model, {"x": normal(1, 1, 2, 3)})
    assert types(converted)["s"] == FLOAT
    assert halve(model)[1].share == 1.0


def test_an_upsample_of_the_old_days() -> None:
    model = parse(
        'g (float[1, 1, 2, 3] x) => (float[1, 1, 4, 6] y) { y = Upsample <mode = "nearest"> (x, s) }', opset=9, s=[1.0, 1, 2, 2]
    )
    assert types(clean_both_ways(model, {"x": normal(1, 1, 2, 3)}))["s"] == FLOAT


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
    converted = clean_both_ways(model, {"shape": np.array([2, 2]), "x": normal(2, 3)})
    fills = [node.attribute[0].t.data_type for node in converted.graph.node if node.op_type == "ConstantOfShape"]
    assert fills == [FLOAT16, FLOAT16]


@pytest.mark.parametrize("attribute", ["value = float {0.5}", "value_float = 0.5", "value_floats = [0.5]"])
def test_constants_in_all_their_forms(attribute: str) -> None:
    model = parse(f"g (float[3] x) => (float[3] y) {{ c = Constant <{attribute}> () y = Mul (x, c) }}")
    converted = clean_both_ways(model, {"x": normal(3)})
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
    clean_both_ways(model, {"x": normal(4), "u": normal(2)})
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
    clean_both_ways(model, {"x": normal(*shape)})


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
    assert reasons(report) == {"b": "nobody knows the types that mine:Mystery takes"}


def test_the_bits_of_a_float_are_read_from_float32() -> None:
    model = parse("g (float[3] x) => (int32[3] y) { r = Relu (x) y = BitCast <to = 6> (r) }", opset=26, ir=13)
    assert reasons(halve(model)[1]) == {"y": "BitCast reads the bits of float32"}


@pytest.mark.parametrize("opset", [9, 13])
def test_what_runtimes_take_apart_into_squares_stays_float32(opset: int) -> None:
    text = (
        "g (float[2, 3, 4, 4] x) => (float[2, 3, 4, 4] y) { n = MeanVarianceNormalization <axes = [0, 2, 3]> (x) y = Neg (n) }"
    )
    model = parse(text, opset=opset, ir=8)
    clean_both_ways(model, {"x": 100 * normal(2, 3, 4, 4)})
    assert "squares overflow" in reasons(halve(model)[1])["n"]
