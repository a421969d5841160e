"""Class 7: inputs and outputs that the operator's schema wants in float32."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from tests.export.failure_classes.converters import Converter, both, both_all, normal, parse


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
