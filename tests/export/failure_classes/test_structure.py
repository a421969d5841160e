from __future__ import annotations

import numpy as np
import onnx
import pytest

from tests.export.conversions.closeness import difference
from tests.export.conversions.runtime import Session
from tests.export.failure_classes.converters import Converter, both, both_all, both_in_float16, normal, ours, parse

# Class 9: bodies, functions, sequences, optionals, names, old formats, other float types.

X = {"x": normal(3, 4)}
SCALAR = np.array(2.5, np.float32)


@both
@pytest.mark.parametrize("flag", [True, False])
def test_branches_that_capture_outer_values(flag: bool, converter: Converter) -> None:
    model = parse("""g (float[3, 4] x, bool flag) => (float[3, 4] y) {
        r = Relu (x)
        s = If (flag) <
            then_branch = a () => (float[3, 4] t) { [in_then] t = Mul (r, w) },
            else_branch = b () => (float[3, 4] e) { [in_else] e = Sub (x, r) }>
        y = Neg (s) }""", w=SCALAR)  # fmt: skip
    converter.try_on(model, X | {"flag": np.array(flag)})


@both
def test_a_branch_in_a_branch(converter: Converter) -> None:
    model = parse("""g (float[3, 4] x, bool flag) => (float[3, 4] y) {
        r = Relu (x)
        s = If (flag) <
            then_branch = a () => (float[3, 4] t) {
                [scaled] m = Mul (r, w)
                [inner] t = If (flag) <
                    then_branch = c () => (float[3, 4] u) { [sum] u = Add (m, x) },
                    else_branch = d () => (float[3, 4] v) { [same] v = Identity (r) }> },
            else_branch = b () => (float[3, 4] e) { [other] e = Sub (x, r) }>
        y = Neg (s) }""", w=SCALAR)  # fmt: skip
    converter.try_on(model, X | {"flag": np.array(True)}, X | {"flag": np.array(False)})


@both
def test_a_loop_with_carried_and_gathered_values(converter: Converter) -> None:
    model = parse("""g (float[3, 4] x) => (float[3, 4] y, float[K, 3, 4] all) {
        state = Relu (x)
        y, all = Loop (times, on, state) <body =
            b (int64 i, bool go, float[3, 4] s) => (bool still, float[3, 4] after, float[3, 4] seen) {
                [still_go] still = Identity (go)
                [turn] f = Cast <to = 1> (i)
                [grow] after = Mul (s, f)
                [note] seen = Add (after, x) }> }""",
        times=np.array(3, np.int64), on=np.array(True), w=SCALAR)  # fmt: skip
    converter.try_on(model, X)


@both
def test_a_scan(converter: Converter) -> None:
    model = parse("""g (int64[3, 4] n) => (float[4] total, float[3, 4] sums) {
        total, sums = Scan <num_scan_inputs = 1, body =
            b (float[4] s, int64[4] row) => (float[4] after, float[4] seen) {
                [widen] f = Cast <to = 1> (row)
                [step] after = Add (s, f)
                [note] seen = Mul (after, w) }> (start, n) }""", start=np.zeros(4, np.float32), w=SCALAR)  # fmt: skip
    converter.try_on(model, {"n": np.arange(12, dtype=np.int64).reshape(3, 4)})


@both
def test_a_model_local_function(converter: Converter) -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17, "own": 1]>
        g (float[3, 4] x) => (float[3, 4] y) { r = own.gate (x) y = Neg (r) }
        <domain: "own", opset_import: ["": 17]>
        gate (a) => (b) {
            half = Constant <value = float {0.5}> ()
            s = Mul (a, half)
            t = Tanh (s)
            b = Add (t, a) }""")
    converter.try_on(model, X)


@both
def test_sequences(converter: Converter) -> None:
    model = parse("""g (float[3, 4] x) => (float[3, 4] y, seq(float[3, 4]) parts) {
        r = Relu (x)
        parts = SequenceConstruct (r, x)
        one = SequenceAt (parts, index)
        y = Mul (one, w) }""", index=np.array(0, np.int64), w=SCALAR)  # fmt: skip
    converter.try_on(model, X)


@both
def test_a_sequence_as_input(converter: Converter) -> None:
    model = parse("""g (seq(float[3, 4]) parts) => (float[6, 4] y) {
        joined = ConcatFromSequence <axis = 0> (parts)
        y = Mul (joined, w) }""", w=SCALAR)  # fmt: skip
    converter.try_on(model, {"parts": [normal(3, 4), normal(3, 4, seed=1)]})


@both
def test_an_optional(converter: Converter) -> None:
    model = parse("""g (float[3, 4] x) => (float[3, 4] y) {
        r = Relu (x)
        o = Optional (r)
        v = OptionalGetElement (o)
        y = Mul (v, w) }""", 18, w=SCALAR)  # fmt: skip
    converter.try_on(model, X)


def unnamed(converter: Converter, model: onnx.ModelProto) -> None:
    """As `try_on`, with the names of the nodes taken away for the conversion."""

    def convert(given: onnx.ModelProto) -> onnx.ModelProto:
        bare = onnx.ModelProto.FromString(given.SerializeToString())
        for node in bare.graph.node:
            node.name = ""
        return converter.convert(bare)

    Converter(convert=convert, survives=converter.survives).try_on(model, {"x": normal(3, 4)})


@both_in_float16
def test_nodes_without_names(converter: Converter) -> None:
    unnamed(
        converter,
        parse("""g (float[3, 4] x) => (float[3, 4] y) {
        a = Relu (x)
        b = Sigmoid (x)
        y = Add (a, b) }"""),
    )


@both
def test_names_that_are_taken(converter: Converter) -> None:
    model = parse("""g (float[3, 4] x, float[3, 4] graph_input_cast_0) => (float[3, 4] graph_output_cast_0) {
        x_cast_to_Sigmoid_1 = Relu (graph_input_cast_0)
        s = Sigmoid (x)
        x_float16 = Mul (x_cast_to_Sigmoid_1, s)
        graph_output_cast_0 = Neg (x_float16) }""")
    converter.try_on(model, X | {"graph_input_cast_0": normal(3, 4, seed=2)})


@both_in_float16
def test_an_output_that_is_read_inside_and_given_twice(converter: Converter) -> None:
    model = parse("""g (float[3, 4] x) => (float[3, 4] r, float[3, 4] y, float[3, 4] same) {
        r = Relu (x)
        y = Mul (r, r)
        same = Identity (y) }""")
    unnamed(converter, model)


@both
def test_format_3_with_weights_as_inputs(converter: Converter) -> None:
    model = parse("g (float[3, 4] x, float[4, 5] w, float[5] b) => (float[3, 5] y) { m = MatMul (x, w) y = Add (m, b) }",
        8, 3, w=normal(4, 5), b=normal(5))  # fmt: skip
    converter.try_on(onnx.shape_inference.infer_shapes(model), X)


def test_a_weight_that_callers_may_replace_still_can_be() -> None:
    model = parse("g (float[3, 4] x, float[4] w) => (float[3, 4] y) { r = Relu (x) y = Mul (r, w) }", w=normal(4))
    other = {"x": normal(3, 4), "w": normal(4, seed=5)}
    (right,) = Session(model.SerializeToString()).run(other)
    (answer,) = Session(ours(model).SerializeToString()).run(other)
    assert difference(answer, [right]) is None


@both
def test_float64_stays(converter: Converter) -> None:
    model = parse("""g (float[3, 4] x, double[3, 4] d) => (float[3, 4] y, double[3, 4] z) {
        wide = Cast <to = 11> (x)
        z = Mul (wide, d)
        back = Cast <to = 1> (z)
        y = Mul (back, x) }""")
    converter.try_on(onnx.shape_inference.infer_shapes(model), X | {"d": normal(3, 4).astype(np.float64)})


@both
def test_constants_in_every_form(converter: Converter) -> None:
    model = parse("""g (float[3, 4] x) => (float[3, 4] y) {
        a = Constant <value_float = 2.5> ()
        b = Constant <value_floats = [1.0, 2.0, 3.0, 4.0]> ()
        c = Constant <value = float[4] {1, 2, 3, 4}> ()
        d = ConstantOfShape <value = float[1] {0.5}> (shape)
        p = Mul (x, a)
        q = Mul (p, b)
        r = Add (q, c)
        y = Sub (r, d) }""", shape=np.array([3, 4], np.int64))  # fmt: skip
    converter.try_on(model, X)


# Class 10: sizes that are computed in floats and must stay exact.


@both
def test_a_size_over_2048_in_a_reshape(converter: Converter) -> None:
    model = parse("""g (float[1, N] x) => (float[M] y) {
        s = Shape (x)
        n = Gather (s, last)
        f = Cast <to = 1> (n)
        one = Div (f, unit)
        whole = Floor (one)
        size = Cast <to = 7> (whole)
        r = Relu (x)
        y = Reshape (r, size) }""", last=np.array([1], np.int64), unit=np.array([1], np.float32))  # fmt: skip
    converter.try_on(model, {"x": normal(1, 4099)})


@both
def test_the_end_of_a_slice(converter: Converter) -> None:
    model = parse("""g (float[1, N] x) => (float[1, M] y) {
        s = Shape (x)
        n = Gather (s, last)
        f = Cast <to = 1> (n)
        half = Mul (f, part)
        up = Ceil (half)
        end = Cast <to = 7> (up)
        r = Relu (x)
        y = Slice (r, start, end, last) }""",
        last=np.array([1], np.int64), start=np.array([0], np.int64), part=np.array([0.7], np.float32))  # fmt: skip
    converter.try_on(model, {"x": normal(1, 5003)}, {"x": normal(1, 10)})


@both_all
def test_the_scales_of_a_resize(converter: Converter) -> None:
    model = parse("""g (float[1, 1, H, W] x, float[1, 1, P, Q] like) => (float[1, 1, P, Q] y) {
        a = Shape (x)
        b = Shape (like)
        f = Cast <to = 1> (a)
        g = Cast <to = 1> (b)
        scales = Div (g, f)
        r = Relu (x)
        y = Resize <mode = "nearest"> (r, , scales) }""")
    converter.try_on(model, {"x": normal(1, 1, 2, 700), "like": normal(1, 1, 4, 2099)})


@both
def test_positions_counted_in_floats(converter: Converter) -> None:
    model = parse("""g (float[1, N] x) => (float[1, N] y) {
        s = Shape (x)
        n = Gather (s, last)
        f = Cast <to = 1> (n)
        places = Range (zero, f, one)
        i = Cast <to = 7> (places)
        r = Relu (x)
        y = Gather <axis = 1> (r, i) }""",
        last=np.array(1, np.int64), zero=np.array(0, np.float32), one=np.array(1, np.float32))  # fmt: skip
    converter.try_on(model, {"x": normal(1, 3001)})


@both
def test_indices_computed_in_floats(converter: Converter) -> None:
    model = parse("""g (float[1, N] x, int64[K] at) => (float[1, K] y) {
        f = Cast <to = 1> (at)
        half = Mul (f, part)
        down = Floor (half)
        i = Cast <to = 7> (down)
        r = Relu (x)
        y = Gather <axis = 1> (r, i) }""", part=np.array(0.5, np.float32))  # fmt: skip
    converter.try_on(model, {"x": normal(1, 4000), "at": np.array([5001, 7003, 4099], np.int64)})


# Class 11: positions times frequencies, whose sine needs the angle to a fraction of a turn.

INVERSE_FREQUENCIES = (10000.0 ** (-np.arange(0, 32, 2) / 32)).astype(np.float32)


@both
@pytest.mark.parametrize("wave", ["Cos", "Sin"])
def test_rotary_angles_of_far_positions(wave: str, converter: Converter) -> None:
    model = parse(f"""g (float[N, 16] x, int64[N, 1] positions) => (float[N, 16] y) {{
        f = Cast <to = 1> (positions)
        angles = Mul (f, inverse)
        w = {wave} (angles)
        y = Mul (x, w) }}""", inverse=INVERSE_FREQUENCIES)  # fmt: skip
    converter.try_on(model, {"x": normal(4, 16), "positions": np.array([[3], [2049], [4097], [9001]], np.int64)})


@both
def test_rotary_angles_by_a_matrix_product(converter: Converter) -> None:
    model = parse("""g (float[N, 32] x, int64[N, 1] positions) => (float[N, 32] y) {
        f = Cast <to = 1> (positions)
        angles = MatMul (f, inverse)
        both = Concat <axis = -1> (angles, angles)
        c = Cos (both)
        s = Sin (both)
        a = Mul (x, c)
        b = Mul (x, s)
        y = Add (a, b) }""", inverse=INVERSE_FREQUENCIES[None])  # fmt: skip
    converter.try_on(model, {"x": normal(3, 32), "positions": np.array([[1], [3001], [8191]], np.int64)})


@both
def test_a_range_of_positions(converter: Converter) -> None:
    model = parse("""g (float[N, 16] x) => (float[N, 16] y) {
        shape = Shape (x)
        n = Gather (shape, first)
        counted = Range (zero, n, one)
        f = Cast <to = 1> (counted)
        column = Unsqueeze (f, axes)
        angles = Mul (column, inverse)
        s = Sin (angles)
        y = Add (x, s) }""",
        inverse=INVERSE_FREQUENCIES, first=np.array(0, np.int64), zero=np.array(0, np.int64), one=np.array(1, np.int64),
        axes=np.array([1], np.int64))  # fmt: skip
    converter.try_on(model, {"x": normal(3000, 16, scale=0.1)})


@both
def test_a_table_of_positions(converter: Converter) -> None:
    table = np.arange(6000, dtype=np.float32)
    model = parse("""g (float[N, 16] x, int64[N] at) => (float[N, 16] y) {
        f = Gather (table, at)
        column = Unsqueeze (f, axes)
        angles = Mul (column, inverse)
        c = Cos (angles)
        y = Mul (x, c) }""", table=table, inverse=INVERSE_FREQUENCIES, axes=np.array([1], np.int64))  # fmt: skip
    converter.try_on(model, {"x": normal(3, 16), "at": np.array([7, 2051, 5003], np.int64)})
