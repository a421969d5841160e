from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.export.failure_classes.converters import OURS, Converter, both, both_all, both_in_float16, named, normal, ours, parse

# Class 6: Cast nodes that are there already, types written down beside them, and pairs that cancel out.

X = {"x": normal(3, 8, scale=5)}


def typed(model: onnx.ModelProto) -> onnx.ModelProto:
    """With the types of all values written down, as torch's exporter does."""
    return onnx.shape_inference.infer_shapes(model, strict_mode=True)


@both
def test_a_cast_back_from_integers(converter: Converter) -> None:
    model = parse("""g (float[3, 8] x) => (float[3, 8] y) {
        i = Cast <to = 7> (x)
        f = Cast <to = 1> (i)
        y = Mul (f, x) }""")
    converter.try_on(typed(model), X)


@both
def test_a_mask_cast_to_float(converter: Converter) -> None:
    model = parse("""g (float[3, 8] x) => (float[3, 8] y) {
        b = Greater (x, zero)
        f = Cast <to = 1> (b)
        m = Mul (x, f)
        y = Add (m, f) }""", zero=np.float32(0))  # fmt: skip
    converter.try_on(typed(model), X)


@both
def test_an_integer_product_that_is_scaled_down(converter: Converter) -> None:
    model = parse(
        """g (float[3, 512] x) => (float[3, 4] y) {
        q, scale, zero = DynamicQuantizeLinear (x)
        sums = MatMulInteger (q, w, zero)
        wide = Cast <to = 1> (sums)
        both = Mul (scale, other)
        y = Mul (wide, both) }""",
        w=np.full((512, 4), 3, np.uint8),
        other=np.float32(0.01),
    )
    # The integer sums reach 200,000 before they are scaled to 20.
    converter.try_on(model, {"x": np.linspace(0, 2, 1536, dtype=np.float32).reshape(3, 512)})


def half_island() -> onnx.ModelProto:
    return parse("""g (float[3, 8] x) => (float[3, 8] y) {
        r = Relu (x)
        h = Cast <to = 10> (r)
        s = Sigmoid (h)
        f = Cast <to = 1> (s)
        y = Mul (f, x) }""")


@both_in_float16
def test_an_island_that_is_float16_already(converter: Converter) -> None:
    converter.try_on(typed(half_island()), X)


def test_casts_that_do_nothing_are_gone() -> None:
    converted = ours(named(typed(half_island())))
    casts = [node for node in converted.graph.node if node.op_type == "Cast"]
    assert len(casts) == 2, "one at the input, one at the output"


def test_types_written_down_wrong_are_not_believed() -> None:
    model = parse("g (float[3, 8] x) => (float[3, 8] y) { r = Relu (x) s = Sigmoid (r) y = Mul (s, x) }")
    model.graph.value_info.append(helper.make_tensor_value_info("s", TensorProto.FLOAT, ["a", "b", "c"]))
    converted = ours(named(model))
    onnx.checker.check_model(converted, full_check=True)
    del model.graph.value_info[:]
    OURS.try_on(model, X)


# Class 7: inputs and outputs that the operator's schema wants in float32.


@both_all
@pytest.mark.parametrize("opset", [13, 19])
def test_the_scales_of_resize(opset: int, converter: Converter) -> None:
    model = parse("""g (float[1, 2, 4, 4] x) => (float[1, 2, 7, 7] y) {
        r = Relu (x)
        y = Resize <mode = "linear"> (r, , scales) }""", opset, 9, scales=np.array([1, 1, 1.8, 1.8], np.float32))  # fmt: skip
    converter.try_on(model, {"x": normal(1, 2, 4, 4)})


@both_all
def test_the_region_and_scales_of_an_older_resize(converter: Converter) -> None:
    model = parse("g (float[1, 2, 4, 4] x) => (float[1, 2, 7, 7] y) { r = Relu (x) y = Resize (r, region, scales) }",
        11, 9, region=np.zeros(0, np.float32), scales=np.array([1, 1, 1.8, 1.8], np.float32))  # fmt: skip
    converter.try_on(model, {"x": normal(1, 2, 4, 4)})


@both_all
def test_the_scales_of_upsample(converter: Converter) -> None:
    model = parse("g (float[1, 2, 4, 4] x) => (float[1, 2, 8, 8] y) { r = Relu (x) y = Upsample (r, scales) }",
        9, 8, scales=np.array([1, 1, 2, 2], np.float32))  # fmt: skip
    converter.try_on(model, {"x": normal(1, 2, 4, 4)})


@both_all
def test_boxes_and_thresholds_of_non_max_suppression(converter: Converter) -> None:
    model = parse("""g (float[1, 6, 4] boxes, float[1, 1, 6] scores) => (int64[K, 3] y) {
        b = Relu (boxes)
        s = Sigmoid (scores)
        y = NonMaxSuppression (b, s, most, overlap, least) }""",
        most=np.array([3], np.int64), overlap=np.array([0.5], np.float32), least=np.array([0.1], np.float32))  # fmt: skip
    corners = np.array([[0, 0, 1, 1], [0, 0.1, 1, 1.1], [0, 10, 1, 11], [0, 10.1, 1, 11.1], [0, 20, 1, 21], [5, 5, 6, 6]])
    converter.try_on(model, {"boxes": corners[None].astype(np.float32), "scores": normal(1, 1, 6)})


@both
def test_the_scales_of_quantized_operators(converter: Converter) -> None:
    model = parse("""g (float[1, 8] x) => (float[1, 8] y) {
        r = Relu (x)
        q = QuantizeLinear (r, scale, zero)
        m = QLinearMatMul (q, scale, zero, w, scale, zero, wide, zero)
        d = DequantizeLinear (m, wide, zero)
        y = Sigmoid (d) }""", scale=np.float32(0.02), wide=np.float32(0.5), zero=np.array(3, np.uint8),
        w=np.arange(64, dtype=np.uint8).reshape(8, 8))  # fmt: skip
    converter.try_on(model, {"x": normal(1, 8)})


@both
def test_dynamic_quantization(converter: Converter) -> None:
    model = parse("""g (float[1, 8] x) => (float[1, 8] y) {
        r = Relu (x)
        q, s, z = DynamicQuantizeLinear (r)
        m = MatMulInteger (q, w, z)
        f = Cast <to = 1> (m)
        y = Mul (f, s) }""", w=np.arange(64, dtype=np.uint8).reshape(8, 8) % 7)  # fmt: skip
    converter.try_on(model, {"x": normal(1, 8)})


@both
def test_the_statistics_that_layer_normalization_gives(converter: Converter) -> None:
    model = parse("""g (float[2, 8] x) => (float[2, 8] y, float[2, 1] z) {
        n, mean, spread = LayerNormalization (x, gain)
        y = Relu (n)
        z = Add (mean, spread) }""", gain=normal(8))  # fmt: skip
    converter.try_on(model, {"x": normal(2, 8)})


@both
@pytest.mark.parametrize("op", ["HannWindow", "HammingWindow", "BlackmanWindow"])
def test_windows(op: str, converter: Converter) -> None:
    model = parse(f"g (float[2, 8] x) => (float[2, 8] y) {{ w = {op} (size) y = Mul (x, w) }}", size=np.array(8, np.int64))
    converter.try_on(onnx.shape_inference.infer_shapes(model), {"x": normal(2, 8)})


# Class 8: operators that take float16 only from an opset later than the model's.

LATER_X = {"x": normal(2, 8)}


@both
@pytest.mark.parametrize("opset", [12, 17])
def test_celu(opset: int, converter: Converter) -> None:
    model = parse("g (float[2, 8] x) => (float[2, 8] y) { r = Neg (x) c = Celu <alpha = 2.0> (r) y = Neg (c) }", opset)
    converter.try_on(model, LATER_X)


@both_all
def test_range(converter: Converter) -> None:
    model = parse("g (float[2, 8] x) => (float[2, 8] y) { r = Range (start, limit, step) y = Mul (x, r) }",
        start=np.float32(0), limit=np.float32(4), step=np.float32(0.5))  # fmt: skip
    converter.try_on(model, LATER_X)


@both_all
def test_cumulative_sums(converter: Converter) -> None:
    model = parse("g (float[2, 8] x) => (float[2, 8] y) { r = Relu (x) c = CumSum (r, axis) y = Neg (c) }",
        13, axis=np.array(1, np.int64))  # fmt: skip
    converter.try_on(model, LATER_X)


@both
def test_is_inf(converter: Converter) -> None:
    model = parse("""g (float[2, 8] x) => (float[2, 8] y) {
        r = Relu (x)
        i = IsInf (r)
        y = Where (i, zero, r) }""", 13, zero=np.float32(0))  # fmt: skip
    converter.try_on(model, LATER_X)
