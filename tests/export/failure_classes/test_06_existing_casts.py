"""Class 6: Cast nodes that are there already, types written down beside them, and pairs that cancel out."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.export.failure_classes.converters import OURS, Converter, both, named, normal, ours, parse

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


@both
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
