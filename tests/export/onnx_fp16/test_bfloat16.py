"""Conversion to bfloat16: its types, what stays exact, and which repairs run."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir
import pytest

from halfserve.export.conversion_settings import ConversionSettings
from halfserve.export.export_errors import ExportError, UsageError
from halfserve.export.half_types import BF16, TargetDevice
from halfserve.export.onnx_fp16.convert import convert, convert_float_to_float16
from halfserve.export.onnx_fp16.planning.decisions import BETWEEN_REASON, GRID_REASON, NORM_REASON, SOFTMAX_REASON, SUM_REASON
from tests.export.onnx_fp16.models import FLOAT, halve, normal, ops, reasons, types
from tests.export.stored_models import parse

BFLOAT16 = onnx.TensorProto.BFLOAT16
POSITION_REASON = "positions need more digits for their sine or cosine"
TWO_LAYERS = "g (float[n,4] x) => (float[n,4] y) { a = MatMul (x, w) b = Tanh (a) y = MatMul (b, w) }"


def halved(
    model: onnx.ModelProto, *, repair: bool = False, target_device: TargetDevice = "any"
) -> tuple[onnx.ModelProto, dict[str, str]]:
    """A model in bfloat16, checked in full, and the reasons of its float32 nodes by name."""
    converted, report = halve(model, repair=repair, dtype="bfloat16", target_device=target_device)
    assert report.to_json()["target_device"] == target_device
    onnx.checker.check_model(converted, full_check=True)
    assert report.dtype == "bfloat16"
    return converted, reasons(report)


def kept(model: onnx.ModelProto, *, repair: bool = False, target_device: TargetDevice = "any") -> dict[str, str]:
    return halved(model, repair=repair, target_device=target_device)[1]


def test_nodes_and_weights_are_bfloat16_between_float32_interfaces() -> None:
    converted, found = halved(parse(TWO_LAYERS, w=normal(4, 4)))
    assert found == {}
    assert ops(converted) == ["Cast", "MatMul", "Tanh", "MatMul", "Cast"]
    assert {name: kind for name, kind in types(converted).items() if name in "xwaby"} == {
        "x": FLOAT,
        "y": FLOAT,
        **dict.fromkeys("wab", BFLOAT16),
    }
    weights = onnx.numpy_helper.to_array(converted.graph.initializer[0])
    assert np.array_equal(weights.astype(np.float32), normal(4, 4).astype(ml_dtypes.bfloat16).astype(np.float32))


def test_inputs_and_outputs_become_bfloat16_where_asked() -> None:
    converted = convert_float_to_float16(parse(TWO_LAYERS, w=normal(4, 4)), keep_io_types=False, dtype="bfloat16")
    assert ops(converted) == ["MatMul", "Tanh", "MatMul"]
    assert {types(converted)[name] for name in "xy"} == {BFLOAT16}


def test_converting_again_with_the_same_type_changes_nothing() -> None:
    work = onnx_ir.from_proto(parse(TWO_LAYERS, w=normal(4, 4)))
    once = onnx_ir.to_proto(convert(work, ConversionSettings(dtype="bfloat16")).model).SerializeToString(deterministic=True)
    again = convert(work, ConversionSettings(dtype="bfloat16"))
    assert again.report.converted_before
    assert again.report.dtype == "bfloat16"
    assert onnx_ir.to_proto(again.model).SerializeToString(deterministic=True) == once
    assert work.metadata_props["halfserve.converted"] == "bfloat16"


@pytest.mark.parametrize(("first", "second"), [("float16", "bfloat16"), ("bfloat16", "float16")])
def test_a_model_of_the_other_half_type_is_refused(first: str, second: str) -> None:
    model, _ = halve(parse(TWO_LAYERS, w=normal(4, 4)), dtype=first)  # type: ignore[arg-type]  # (parametrized)
    with pytest.raises(ExportError, match=f"MatMul 'a' computes in {first}; expected a float32 model"):
        halve(model, dtype=second)  # type: ignore[arg-type]  # (parametrized)


def test_an_unknown_type_is_an_error_that_names_both() -> None:
    with pytest.raises(UsageError, match="dtype is 'fp8'; expected 'float16' or 'bfloat16'"):
        convert(onnx_ir.from_proto(parse(TWO_LAYERS, w=normal(4, 4))), ConversionSettings(dtype="fp8"))  # type: ignore[arg-type]


def test_an_operator_without_bfloat16_names_the_opset_that_has_it() -> None:
    text = "g (float[1,4,8,8] x, bool[1,4,8,8] c) => (float[1,4,8,8] y) { h = Conv (x, w) y = Where (c, h, x) }"
    model = parse(text, opset=15, ir=8, w=normal(4, 4, 1, 1))
    offer = "the model has 15: --upgrade-opset (upgrade_opset=True) raises it"
    assert kept(model) == {
        "h": f"Conv takes bfloat16 from opset 22 on; {offer}",
        "y": f"Where takes bfloat16 from opset 16 on; {offer}",
    }
    raised = convert_float_to_float16(model, dtype="bfloat16", upgrade_opset=True)
    assert [entry.version for entry in raised.opset_import] == [22]
    assert {types(raised)[name] for name in ("w", "h")} == {BFLOAT16}


NORMS = """g (float[n,s,4] x) => (float[n,s,4] y) {
    a = MatMul (x, w) p = Softmax (a) b = MatMul (p, w) r = Add (b, a)
    n = LayerNormalization (r, one, one) y = MatMul (n, w) }"""


def test_norms_and_softmax_between_bfloat16_nodes_become_bfloat16_for_cuda() -> None:
    model = parse(NORMS, w=normal(4, 4), one=np.ones(4))
    assert kept(model) == kept(model, target_device="cpu") == {"p": SOFTMAX_REASON, "n": NORM_REASON}
    converted, reasons = halved(model, target_device="cuda")
    assert reasons == {}
    assert ops(converted).count("Cast") == 2


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ("a = MatMul (x, w) y = Softmax (a)", SOFTMAX_REASON),  # the answer would be rounded
        ("n = LayerNormalization (x, one, one) y = MatMul (n, w)", NORM_REASON),  # the input would be rounded
        (
            "k = Constant <value = int64 {1}> () a = CumSum (x, k) n = LayerNormalization (a, one, one) y = MatMul (n, w)",
            NORM_REASON,
        ),
    ],
)
def test_norms_and_softmax_beside_float32_stay_float32_for_cuda(nodes: str, reason: str) -> None:
    model = parse(f"g (float[n,s,4] x) => (float[n,s,4] y) {{ {nodes} }}", w=normal(4, 4), one=np.ones(4))
    assert reason in kept(model, target_device="cuda").values()


def test_nodes_without_a_cuda_kernel_stay_float32_except_for_cpus() -> None:
    nodes = "h = Conv (x, w) l = LeakyRelu (h) y = MaxPool <kernel_shape = [2, 2]> (l)"
    text = f"g (float[1,4,8,8] x) => (float[1,4,7,7] y) {{ {nodes} }}"
    model = parse(text, opset=22, ir=10, w=normal(4, 4, 1, 1))
    lacking = "ONNX Runtime's CUDA provider has no bfloat16 kernel for {}, and refuses models with such a node"
    reasons = {"l": lacking.format("LeakyRelu of opset 16"), "y": lacking.format("MaxPool of opset 22")}
    assert kept(model) == kept(model, target_device="cuda") == reasons
    assert kept(model, target_device="cpu") == {}


def test_a_raise_that_costs_a_cuda_kernel_is_offered_for_cpus_alone() -> None:
    text = "g (float[1,4,8,8] x) => (float[1,4,7,7] y) { h = Conv (x, w) y = MaxPool <kernel_shape = [2, 2]> (h) }"
    model = parse(text, opset=17, ir=8, w=normal(4, 4, 1, 1))
    offer = "--upgrade-opset raises it for --target cpu alone, as CUDA has no kernel for MaxPool of opset 22"
    assert kept(model)["h"] == f"Conv takes bfloat16 from opset 22 on; the model has 17; {offer}"
    assert kept(model, repair=True)["h"].endswith("the model has 17: --upgrade-opset (upgrade_opset=True) raises it")


def test_what_only_float16_needs_is_not_repaired() -> None:
    text = """g (float[n,4] x, float[n,4] m) => (float[n,4] y) { h = MatMul (x, w) k = Mul (m, large) s = Add (h, k)
        p = Softmax (s) c = Pow (p, three) d = MatMul (c, w) y = Div (d, tiny) }"""
    model = parse(text, w=normal(4, 4) * 1e6, large=np.array(-1e9), three=np.array(3.0), tiny=np.array(1e-12))
    converted, report = halve(model, repair=True, dtype="bfloat16")
    assert report.repairs == ()
    assert reasons(report) == {"p": SOFTMAX_REASON}
    assert (report.ledger.overflow, report.ledger.flushed) == (0, 0)
    assert halve(model, repair=True)[1].repairs, "or else float16 needs none either, and this shows nothing"
    assert ops(converted).count("Cast") == 5


def test_norms_and_softmax_in_parts_are_joined_and_stay_exact() -> None:
    text = """g (float[2,16] a) => (float[2,16] y) { m = ReduceMean <axes = [-1]> (a) d = Sub (a, m) q = Mul (d, d)
        v = ReduceMean <axes = [-1]> (q) e = Add (v, epsilon) r = Sqrt (e) n = Div (d, r) h = MatMul (n, w)
        x = Exp (h) t = ReduceSum <keepdims = 1> (x, last) y = Div (x, t) }"""
    model = parse(text, opset=17, ir=8, epsilon=1e-12, w=normal(16, 16), last=np.array([-1]))
    converted, report = halve(model, repair=True, dtype="bfloat16")
    assert [node for node in ops(converted) if node not in ("Cast", "Constant")] == ["LayerNormalization", "MatMul", "Softmax"]
    assert set(reasons(report).values()) == {NORM_REASON, SOFTMAX_REASON}


def test_a_mask_of_the_smallest_float32_stays_finite() -> None:
    text = """g (float[n,4] x, bool[n,4] c) => (float[n,4] y) { h = MatMul (x, w)
        m = Where (c, zero, lowest) s = Add (h, m) y = Softmax (s) }"""
    model = parse(text, w=normal(4, 4), zero=np.array(0.0), lowest=np.array(np.finfo(np.float32).min))
    converted, found = halved(model)
    assert found == {"y": SOFTMAX_REASON}
    lowest = next(tensor for tensor in converted.graph.initializer if tensor.name == "lowest")
    assert float(onnx.numpy_helper.to_array(lowest)) == -BF16.largest


LATE = "TopK takes bfloat16 from opset 24 on; the model has 20"
PARTS = "a norm in parts: bfloat16 has too few digits for a sum of squares"
ANGLES = "g (float[300,4] x) => (float[300,4] y) { a = Mul (p, f) s = Sin (a) h = MatMul (x, w) y = Mul (s, h) }"
TURNS, SQUARE = normal(1, 4), normal(4, 4)
GRID: dict[str, Any] = {"k": normal(2, 2, 1, 1), "w": normal(2, 2), "half": 0.5, "base": normal(1, 8, 8, 2)}


def one_node(node: str) -> str:
    return f"g (float[2,3,4] x) => (float[a,b,c] y) {{ {node} }}"


# The graph, its weights, and what stays in float32.
EXACT: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("g (float[2,4] x) => (float[2,2] y) { k = Constant <value = int64[1] {2}> () y, i = TopK (x, k) }", {}, {"y": LATE}),
    (one_node("y = LayerNormalization (x, w, w)"), {"w": np.ones(4)}, {"y": NORM_REASON}),
    (one_node("y = com.microsoft.SkipLayerNormalization (x, x, w)"), {"w": np.ones(4)}, {"y": NORM_REASON}),
    (one_node("y = Softmax (x)"), {}, {"y": SOFTMAX_REASON}),
    (one_node("y = LogSoftmax (x)"), {}, {"y": SOFTMAX_REASON}),
    (one_node("y = ReduceMean <keepdims = 1> (x)"), {}, {"y": SUM_REASON}),
    (one_node("k = Constant <value = int64 {1}> () y = CumSum (x, k)"), {}, {"y": SUM_REASON}),
    (  # elementwise nodes between exact ones
        """g (float[2,3,4] x) => (float[2,3,4] y, float[2,3,4] z) {
        h = MatMul (x, w) s = ReduceSum <keepdims = 1> (h) n = ReduceSum <keepdims = 1> (h) m = Div (s, n)
        a = Softmax (m) y = MatMul (h, w) z = Add (a, h) }""",
        {"w": SQUARE}, {"s": SUM_REASON, "n": SUM_REASON, "m": BETWEEN_REASON, "a": SOFTMAX_REASON},
    ),
    (  # the way to a sampling grid
        """g (float[1,2,8,8] x, float[1,8,8,2] shift) => (float[1,2,8,8] y) {
        h = Conv (x, k) o = MatMul (shift, w) s = Mul (o, half) grid = Add (s, base) y = GridSample (h, grid) }""",
        GRID, dict.fromkeys(("s", "grid", "y"), GRID_REASON),
    ),
    # tables of positions over 256
    (ANGLES, {"p": np.arange(300.0)[:, None], "f": TURNS, "w": SQUARE}, dict.fromkeys("as", POSITION_REASON)),
    (ANGLES, {"p": np.arange(300.0)[:, None] % 200, "f": TURNS, "w": SQUARE}, {}),
]  # fmt: skip
REPAIRED: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    (
        "g (float[n,1] time) => (float[n,4] y) { a = Mul (time, f) c = Cos (a) y = MatMul (c, w) }",
        {"f": TURNS, "w": SQUARE}, dict.fromkeys("ac", "a large angle needs more digits for its sine or cosine"),
    ),
    (
        """g (float[2,16] a) => (float[2,16] y) { q = Mul (a, a) v = ReduceMean <axes = [-1], keepdims = 1> (q)
        r = Sqrt (v) n = Div (a, r) y = MatMul (n, w) }""",
        {"w": normal(16, 16)}, dict.fromkeys("qvrn", PARTS),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "weights", "expected"), EXACT + REPAIRED)
def test_what_eight_bits_are_too_few_for_stays_exact(text: str, weights: dict[str, Any], expected: dict[str, str]) -> None:
    opset = 17 if "axes = [-1]" in text else 22 if "Conv" in text or "Mul (p, f)" in text or "time" in text else 20
    model = parse(text, opset=opset, ir=10, imports=', "com.microsoft": 1' if "microsoft" in text else "", **weights)
    assert kept(model, repair=text in [row[0] for row in REPAIRED]) == expected


def test_quantizing_nodes_keep_their_scales() -> None:
    text = """g (float[n,4] x) => (float[n,4] y) { h = MatMul (x, w) q = QuantizeLinear (h, s, z) d = DequantizeLinear (q, s, z)
        y = MatMul (d, w) }"""
    assert kept(parse(text, opset=21, ir=10, s=0.01, z=np.int8(0), w=SQUARE)).keys() == {"q", "d"}
