"""Failure classes 6 to 11: casts, types, opsets, bodies, names, sizes and positions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx

from tests.export.failure_classes.converters import FailureCase, case, naive_all, tried
from tests.export.onnx_fp16.models import normal

# Cast nodes that are there already, types written down beside them, and pairs that cancel out.
EIGHT = {"x": normal(3, 8, scale=5)}
CASTS = {
    "a cast back from integers": case(
        "g (float[3, 8] x) => (float[3, 8] y) { i = Cast <to = 7> (x) f = Cast <to = 1> (i) y = Mul (f, x) }",
        EIGHT, typed=True),
    "a mask cast to float": case(
        """g (float[3, 8] x) => (float[3, 8] y) {
        b = Greater (x, zero) f = Cast <to = 1> (b) m = Mul (x, f) y = Add (m, f) }""", EIGHT, typed=True, zero=0.0),
    # The integer sums reach 200,000 before they are scaled to 20.
    "an integer product that is scaled down": case(
        """g (float[3, 512] x) => (float[3, 4] y) { q, scale, zero = DynamicQuantizeLinear (x)
        sums = MatMulInteger (q, w, zero) wide = Cast <to = 1> (sums) both = Mul (scale, other) y = Mul (wide, both) }""",
        {"x": np.linspace(0, 2, 1536, dtype=np.float32).reshape(3, 512)},
        kept="q both y", w=np.full((512, 4), 3, np.uint8), other=0.01),
    "an island that is float16 already": case(
        """g (float[3, 8] x) => (float[3, 8] y) {
        r = Relu (x) h = Cast <to = 10> (r) s = Sigmoid (h) f = Cast <to = 1> (s) y = Mul (f, x) }""",
        EIGHT, typed=True, in_bfloat16=False),
}  # fmt: skip

# Inputs and outputs that the operator's schema wants in float32.
PICTURE, ROW = {"x": normal(1, 2, 4, 4)}, {"x": normal(1, 8)}
CORNERS = np.array([[0, 0, 1, 1], [0, 0.1, 1, 1.1], [0, 10, 1, 11], [0, 10.1, 1, 11.1], [0, 20, 1, 21], [5, 5, 6, 6]])
SCHEMAS = {
    **{
        f"the scales of Resize {opset}": case(
            'g (float[1, 2, 4, 4] x) => (float[1, 2, 7, 7] y) { r = Relu (x) y = Resize <mode = "linear"> (r, , scales) }',
            PICTURE, naive=naive_all, opset=opset, ir=9, scales=[1, 1, 1.8, 1.8])
        for opset in (13, 19)
    },
    "the region and scales of Resize 11": case(
        "g (float[1, 2, 4, 4] x) => (float[1, 2, 7, 7] y) { r = Relu (x) y = Resize (r, region, scales) }",
        PICTURE, naive=naive_all, opset=11, ir=9, region=np.zeros(0), scales=[1, 1, 1.8, 1.8]),
    "the scales of Upsample": case(
        "g (float[1, 2, 4, 4] x) => (float[1, 2, 8, 8] y) { r = Relu (x) y = Upsample (r, scales) }",
        PICTURE, naive=naive_all, opset=9, scales=[1.0, 1, 2, 2]),
    "boxes and thresholds of NonMaxSuppression": case(
        """g (float[1, 6, 4] boxes, float[1, 1, 6] scores) => (int64[K, 3] y) {
        b = Relu (boxes) s = Sigmoid (scores) y = NonMaxSuppression (b, s, most, overlap, least) }""",
        {"boxes": CORNERS[None].astype(np.float32), "scores": normal(1, 1, 6)}, kept="y",
        naive=naive_all, most=[3], overlap=[0.5], least=[0.1]),
    "the scales of quantized operators": case(
        """g (float[1, 8] x) => (float[1, 8] y) { r = Relu (x) q = QuantizeLinear (r, scale, zero)
        m = QLinearMatMul (q, scale, zero, w, scale, zero, wide, zero) d = DequantizeLinear (m, wide, zero)
        y = Sigmoid (d) }""",
        ROW, kept="q m d", scale=0.02, wide=0.5, zero=np.uint8(3), w=np.arange(64, dtype=np.uint8).reshape(8, 8)),
    "dynamic quantization": case(
        """g (float[1, 8] x) => (float[1, 8] y) { r = Relu (x) q, s, z = DynamicQuantizeLinear (r)
        m = MatMulInteger (q, w, z) f = Cast <to = 1> (m) y = Mul (f, s) }""",
        ROW, kept="q y", w=np.arange(64, dtype=np.uint8).reshape(8, 8) % 7),
    "the statistics of LayerNormalization": case(
        """g (float[2, 8] x) => (float[2, 8] y, float[2, 1] z) {
        n, mean, spread = LayerNormalization (x, gain) y = Relu (n) z = Add (mean, spread) }""",
        {"x": normal(2, 8)}, gain=normal(8)),
    **{
        op: case(
            f"g (float[2, 8] x) => (float[2, 8] y) {{ w = {op} (size) y = Mul (x, w) }}",
            {"x": normal(2, 8)}, kept="w", typed=True, size=np.int64(8))
        for op in ("HannWindow", "HammingWindow", "BlackmanWindow")
    },
}  # fmt: skip

# Operators that take float16 only from an opset later than the model's.
TWO_ROWS = {"x": normal(2, 8)}
OPSETS = {
    **{
        f"Celu of opset {opset}": case(
            "g (float[2, 8] x) => (float[2, 8] y) { r = Neg (x) c = Celu <alpha = 2.0> (r) y = Neg (c) }",
            TWO_ROWS, kept="c", opset=opset)
        for opset in (12, 17)
    },
    "Range": case(
        "g (float[2, 8] x) => (float[2, 8] y) { r = Range (start, limit, step) y = Mul (x, r) }",
        TWO_ROWS, kept="r", naive=naive_all, start=0.0, limit=4.0, step=0.5),
    "CumSum": case(
        "g (float[2, 8] x) => (float[2, 8] y) { r = Relu (x) c = CumSum (r, axis) y = Neg (c) }",
        TWO_ROWS, kept="c", naive=naive_all, opset=13, axis=np.int64(1)),
    "IsInf": case(
        "g (float[2, 8] x) => (float[2, 8] y) { r = Relu (x) i = IsInf (r) y = Where (i, zero, r) }",
        TWO_ROWS, kept="i", opset=13, zero=0.0),
}  # fmt: skip

# Bodies, functions, sequences, optionals, names, old formats, other float types.
X = {"x": normal(3, 4)}
BRANCH = """g (float[3, 4] x, bool flag) => (float[3, 4] y) { r = Relu (x)
    s = If (flag) <then_branch = a () => (float[3, 4] t) { THEN }, else_branch = b () => (float[3, 4] e) { e = Sub (x, r) }>
    y = Neg (s) }"""
NESTED = """m = Mul (r, w) t = If (flag) <then_branch = c () => (float[3, 4] u) { u = Add (m, x) },
    else_branch = d () => (float[3, 4] v) { v = Identity (r) }>"""
BOTH_BRANCHES = (X | {"flag": np.array(True)}, X | {"flag": np.array(False)})
FUNCTION = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17, "own": 1]>
    g (float[3, 4] x) => (float[3, 4] y) { [r] r = own.gate (x) [y] y = Neg (r) }
    <domain: "own", opset_import: ["": 17]>
    gate (a) => (b) { half = Constant <value = float {0.5}> () s = Mul (a, half) t = Tanh (s) b = Add (t, a) }""")
STRUCTURES = {
    "branches that capture outer values": case(BRANCH.replace("THEN", "t = Mul (r, w)"), *BOTH_BRANCHES, w=2.5),
    "a branch in a branch": case(BRANCH.replace("THEN", NESTED), *BOTH_BRANCHES, w=2.5),
    "a loop with carried and gathered values": case(
        """g (float[3, 4] x) => (float[3, 4] y, float[K, 3, 4] all) { state = Relu (x)
        y, all = Loop (times, on, state) <body =
            b (int64 i, bool go, float[3, 4] s) => (bool still, float[3, 4] after, float[3, 4] seen) {
                still = Identity (go) f = Cast <to = 1> (i) after = Mul (s, f) seen = Add (after, x) }> }""",
        X, times=np.int64(3), on=np.array(True)),
    "a scan": case(
        """g (int64[3, 4] n) => (float[4] total, float[3, 4] sums) {
        total, sums = Scan <num_scan_inputs = 1, body = b (float[4] s, int64[4] row) => (float[4] after, float[4] seen) {
            f = Cast <to = 1> (row) [after] after = Add (s, f) [seen] seen = Mul (after, w) }> (start, n) }""",
        {"n": np.arange(12, dtype=np.int64).reshape(3, 4)}, kept="after seen", start=np.zeros(4), w=2.5),
    "a model-local function": case(FUNCTION, X),
    "sequences": case(
        """g (float[3, 4] x) => (float[3, 4] y, seq(float[3, 4]) parts) {
        r = Relu (x) parts = SequenceConstruct (r, x) one = SequenceAt (parts, index) y = Mul (one, w) }""",
        X, kept="parts one", index=np.int64(0), w=2.5),
    "a sequence as input": case(
        """g (seq(float[3, 4]) parts) => (float[6, 4] y) {
        joined = ConcatFromSequence <axis = 0> (parts) y = Mul (joined, w) }""",
        {"parts": [normal(3, 4), normal(3, 4) + 1]}, kept="joined", w=2.5),
    "an optional": case(
        """g (float[3, 4] x) => (float[3, 4] y) {
        r = Relu (x) o = Optional (r) v = OptionalGetElement (o) y = Mul (v, w) }""", X, opset=18, w=2.5),
    "nodes without names": case(
        "g (float[3, 4] x) => (float[3, 4] y) { a = Relu (x) b = Sigmoid (x) y = Add (a, b) }",
        X, in_bfloat16=False, named=False),
    "names that are taken": case(
        """g (float[3, 4] x, float[3, 4] graph_input_cast_0) => (float[3, 4] graph_output_cast_0) {
        x_cast_to_Sigmoid_1 = Relu (graph_input_cast_0) [Sigmoid_1] s = Sigmoid (x)
        x_float16 = Mul (x_cast_to_Sigmoid_1, s) graph_output_cast_0 = Neg (x_float16) }""",
        X | {"graph_input_cast_0": normal(3, 4) + 1}),
    "an output that is read inside and given twice": case(
        """g (float[3, 4] x) => (float[3, 4] r, float[3, 4] y, float[3, 4] same) {
        r = Relu (x) y = Mul (r, r) same = Identity (y) }""", X, in_bfloat16=False, named=False),
    "format 3 with weights as inputs": case(
        "g (float[3, 4] x, float[4, 5] w, float[5] b) => (float[3, 5] y) { m = MatMul (x, w) y = Add (m, b) }",
        X, typed=True, opset=8, ir=3, w=normal(4, 5), b=normal(5)),
    "float64 that stays": case(
        """g (float[3, 4] x, double[3, 4] d) => (float[3, 4] y, double[3, 4] z) {
        wide = Cast <to = 11> (x) z = Mul (wide, d) back = Cast <to = 1> (z) y = Mul (back, x) }""",
        X | {"d": normal(3, 4).astype(np.float64)}, typed=True),
    "constants in every form": case(
        """g (float[3, 4] x) => (float[3, 4] y) {
        a = Constant <value_float = 2.5> () b = Constant <value_floats = [1.0, 2.0, 3.0, 4.0]> ()
        c = Constant <value = float[4] {1, 2, 3, 4}> () d = ConstantOfShape <value = float[1] {0.5}> (shape)
        p = Mul (x, a) q = Mul (p, b) r = Add (q, c) y = Sub (r, d) }""", X, shape=[3, 4]),
}  # fmt: skip

# Sizes that are computed in floats and must stay exact.
SIZE = "s = Shape (x) n = Gather (s, last) f = Cast <to = 1> (n)"
SIZES = {
    "a size over 2048 in a Reshape": case(
        f"""g (float[1, N] x) => (float[M] y) {{
        {SIZE} one = Div (f, unit) whole = Floor (one) size = Cast <to = 7> (whole) r = Relu (x) y = Reshape (r, size) }}""",
        {"x": normal(1, 4099)}, kept="one whole", last=[1], unit=[1.0]),
    "the end of a Slice": case(
        f"""g (float[1, N] x) => (float[1, M] y) {{ {SIZE} half = Mul (f, part) up = Ceil (half)
        end = Cast <to = 7> (up) r = Relu (x) y = Slice (r, start, end, last) }}""",
        {"x": normal(1, 5003)}, {"x": normal(1, 10)}, kept="half up", last=[1], start=[0], part=[0.7]),
    "the computed scales of a Resize": case(
        """g (float[1, 1, H, W] x, float[1, 1, P, Q] like) => (float[1, 1, P, Q] y) { a = Shape (x) b = Shape (like)
        f = Cast <to = 1> (a) g = Cast <to = 1> (b) k = Div (g, f) r = Relu (x) y = Resize <mode = "nearest"> (r, , k) }""",
        {"x": normal(1, 1, 2, 700), "like": normal(1, 1, 4, 2099)}, kept="k", naive=naive_all),
    "positions counted in floats": case(
        f"""g (float[1, N] x) => (float[1, N] y) {{
        {SIZE} places = Range (zero, f, one) i = Cast <to = 7> (places) r = Relu (x) y = Gather <axis = 1> (r, i) }}""",
        {"x": normal(1, 3001)}, kept="places", last=np.int64(1), zero=0.0, one=1.0),
    "indices computed in floats": case(
        """g (float[1, N] x, int64[K] at) => (float[1, K] y) {
        f = Cast <to = 1> (at) half = Mul (f, part) down = Floor (half) i = Cast <to = 7> (down) r = Relu (x)
        y = Gather <axis = 1> (r, i) }""",
        {"x": normal(1, 4000), "at": np.array([5001, 7003, 4099])}, kept="half down", part=0.5),
}  # fmt: skip

# Positions times frequencies, whose sine needs the angle to a fraction of a turn.
INVERSE = (10000.0 ** (-np.arange(0, 32, 2) / 32)).astype(np.float32)
FAR = np.array([[3], [2049], [4097], [9001]])
POSITIONS = {
    **{
        f"the {wave} of far positions": case(
            f"""g (float[N, 16] x, int64[N, 1] positions) => (float[N, 16] y) {{
            f = Cast <to = 1> (positions) angles = Mul (f, inverse) w = {wave} (angles) y = Mul (x, w) }}""",
            {"x": normal(4, 16), "positions": FAR}, kept="angles w", inverse=INVERSE)
        for wave in ("Cos", "Sin")
    },
    "rotary angles by a matrix product": case(
        """g (float[N, 32] x, int64[N, 1] positions) => (float[N, 32] y) { f = Cast <to = 1> (positions)
        angles = MatMul (f, inverse) both = Concat <axis = -1> (angles, angles) c = Cos (both) s = Sin (both)
        a = Mul (x, c) b = Mul (x, s) y = Add (a, b) }""",
        {"x": normal(4, 32), "positions": FAR}, kept="angles both c s", inverse=INVERSE[None]),
    "a range of positions": case(
        """g (float[N, 16] x) => (float[N, 16] y) { shape = Shape (x) n = Gather (shape, first) counted = Range (zero, n, one)
        f = Cast <to = 1> (counted) column = Unsqueeze (f, axes) angles = Mul (column, inverse) s = Sin (angles)
        y = Add (x, s) }""",
        {"x": normal(3000, 16, scale=0.1)},
        kept="column angles s", inverse=INVERSE, first=np.int64(0), zero=np.int64(0), one=np.int64(1), axes=[1]),
    "a table of positions": case(
        """g (float[N, 16] x, int64[N] at) => (float[N, 16] y) { f = Gather (table, at) column = Unsqueeze (f, axes)
        angles = Mul (column, inverse) c = Cos (angles) y = Mul (x, c) }""",
        {"x": normal(3, 16), "at": np.array([7, 2051, 5003])},
        kept="f column angles c", table=np.arange(6000.0), inverse=INVERSE, axes=[1]),
}  # fmt: skip


@tried(CASTS | SCHEMAS | OPSETS | STRUCTURES | SIZES | POSITIONS)
def test_structures_that_conversions_break(check: Callable[[FailureCase], None], case: FailureCase) -> None:
    check(case)
