from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from halfserve.export.onnx_fp16.repair.folding import FOLD_BATCH_NORM, FOLD_SCALE, SPELL_OUT_BATCH_NORM
from tests.export.onnx_fp16.repair.same import assert_untouched, compare, operators, repaired, same
from tests.export.stored_models import parse

Array = np.ndarray[Any, Any]


def statistics(channels: int, seed: int, largest_var: float = 2.0) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {
        "scale": random.uniform(0.5, 2, channels),
        "bias": random.standard_normal(channels),
        "mean": random.standard_normal(channels),
        "var": random.uniform(0.1, largest_var, channels),
    }


def convolution(op: str, groups: int, per_group: tuple[int, int], *, with_bias: bool, seed: int) -> onnx.ModelProto:
    """A (transposed) convolution with a BatchNorm behind it, on [2, in, 6, 6]."""
    random = np.random.default_rng(seed)
    into, out = per_group[0] * groups, per_group[1] * groups
    shape = (out, per_group[0], 3, 3) if op == "Conv" else (into, per_group[1], 3, 3)
    weights = {"w": random.standard_normal(shape), **statistics(out, seed)}
    if with_bias:
        weights["b"] = random.standard_normal(out)
    text = f"""g (float[2, {into}, 6, 6] x) => (float[2, {out}, ?, ?] y) {{
        [linear] c = {op} <group = {groups}> (x, w{", b" if with_bias else ""})
        [norm] y = BatchNormalization <epsilon = 0.001> (c, scale, bias, mean, var) }}"""
    return parse(text, opset=17, ir=8, **weights)


@settings(max_examples=25)
@given(
    st.sampled_from(["Conv", "ConvTranspose"]),
    st.integers(1, 3),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.booleans(),
    st.integers(0, 99),
)
def test_it_goes_into_any_convolution(op: str, groups: int, per_group: tuple[int, int], with_bias: bool, seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal((2, per_group[0] * groups, 6, 6)).astype(np.float32)
    after = same(convolution(op, groups, per_group, with_bias=with_bias, seed=seed), FOLD_BATCH_NORM, {"x": x})
    assert operators(after) == [op]
    assert len(after.graph.initializer) == 2, "what only the norm read is gone"


@pytest.mark.parametrize(
    ("gemm", "w", "c"),
    [("Gemm <beta = 0.5> (x, w, c)", (8, 4), (4,)), ("Gemm <transB = 1, alpha = 2.0> (x, w, c)", (4, 8), (1, 4)),
     ("Gemm (x, w)", (8, 4), None), ("MatMul (x, w)", (8, 4), None)],
)  # fmt: skip
def test_it_goes_into_matrices(gemm: str, w: tuple[int, int], c: tuple[int, ...] | None) -> None:
    random = np.random.default_rng(0)
    weights = {"w": random.standard_normal(w), **({"c": random.standard_normal(c)} if c else {}), **statistics(4, 1)}
    model = parse(
        f"g (float[5, 8] x) => (float[5, 4] y) {{ h = {gemm} y = BatchNormalization (h, scale, bias, mean, var) }}", **weights
    )
    after = same(model, FOLD_BATCH_NORM, {"x": random.standard_normal((5, 8)).astype(np.float32)})
    assert operators(after) == ["Gemm"]


def test_statistics_over_the_range_leave_weights_that_fit() -> None:
    model = convolution("Conv", 1, (3, 4), with_bias=False, seed=3)
    for tensor in model.graph.initializer:
        if tensor.name == "var":
            tensor.CopyFrom(numpy_helper.from_array(np.full(4, 9.8e7, np.float32), "var"))
    x = np.random.default_rng(0).standard_normal((2, 3, 6, 6)).astype(np.float32)
    after = same(model, FOLD_BATCH_NORM, {"x": x})
    assert max(np.abs(numpy_helper.to_array(tensor)).max() for tensor in after.graph.initializer) < 65504


def test_with_nothing_to_fold_into_it_is_spelled_out_only_where_that_helps() -> None:
    text = (
        "g (float[2, 4, 3, 3] x) => (float[2, 4, 3, 3] y) { r = Relu (x) y = BatchNormalization (r, scale, bias, mean, var) }"
    )
    large = {**statistics(4, 0), "scale": np.full(4, 3e4), "var": np.full(4, 9.8e7)}
    x = np.random.default_rng(0).standard_normal((2, 4, 3, 3)).astype(np.float32)
    assert operators(same(parse(text, **large), SPELL_OUT_BATCH_NORM, {"x": x})) == ["Relu", "Mul", "Add"]
    assert_untouched(parse(text, **statistics(4, 0)), SPELL_OUT_BATCH_NORM)


@pytest.mark.parametrize("shape", ["2, 4, 4", "A, B, C"])
def test_rows_of_channels_stay_where_the_columns_of_the_weights_are_as_many(shape: str) -> None:
    # A layer over the last axis, and a norm over the one before: the norm's four channels are not the weights' four columns.
    model = parse(
        f"g (float[{shape}] x) => (float[{shape}] y) "
        "{ h = MatMul (x, w) y = BatchNormalization (h, scale, bias, mean, var) }",
        w=np.random.default_rng(0).standard_normal((4, 4)),
        **statistics(4, 1),
    )
    assert_untouched(model, FOLD_BATCH_NORM)


def test_a_stack_of_matrices_stays() -> None:
    model = parse(
        "g (float[8] x) => (float[2, 4] y) { h = MatMul (x, w) y = BatchNormalization (h, scale, bias, mean, var) }",
        w=np.random.default_rng(0).standard_normal((2, 8, 4)),
        **statistics(4, 1),
    )
    assert_untouched(model, FOLD_BATCH_NORM)


@pytest.mark.parametrize(
    "text",
    [
        "y = BatchNormalization (c, scale, bias, mean, var) z = Relu (c)",  # others read what is normalized
        "z = Identity (x) s = Relu (scale) y = BatchNormalization (c, s, bias, mean, var)",
    ],
)
def test_what_cannot_be_folded_stays(text: str) -> None:
    outputs = "float[2, 4, 6, 6] y, float[2, c, 6, 6] z"
    model = parse(
        f"g (float[2, 4, 6, 6] x) => ({outputs}) {{ c = Conv (x, w) {text} }}",
        w=np.random.default_rng(0).standard_normal((4, 4, 1, 1)),
        **statistics(4, 0),
    )
    assert_untouched(model, FOLD_BATCH_NORM)


def test_the_report_names_both_nodes_and_the_factor() -> None:
    (repair,) = repaired(convolution("Conv", 1, (3, 4), with_bias=True, seed=0), FOLD_BATCH_NORM)[1]
    assert (repair.pass_name, repair.nodes) == ("fold-batch-norm", ("norm",))
    assert "folded into Conv 'linear' in float64" in repair.text


def test_weights_that_two_convolutions_share_are_copied() -> None:
    model = parse(
        """g (float[2, 4, 6, 6] x) => (float[2, 4, 6, 6] y, float[2, 4, 6, 6] z) {
        c = Conv (x, w) y = BatchNormalization (c, scale, bias, mean, var) z = Conv (x, w) }""",
        w=np.random.default_rng(0).standard_normal((4, 4, 1, 1)),
        **statistics(4, 0),
    )
    same(model, FOLD_BATCH_NORM, {"x": np.random.default_rng(1).standard_normal((2, 4, 6, 6)).astype(np.float32)})


def test_the_oldest_format_gets_no_initializer_that_is_not_an_input() -> None:
    text = " ".join(
        f"{name} = Constant <value = float[1] {{{number}.0}}> ()" for number, name in enumerate(statistics(1, 0), 1)
    )
    body = f"w = Constant <value = float[1, 1, 1, 1] {{3.0}}> () {text} c = Conv (x, w)"
    norm = "y = BatchNormalization (c, scale, bias, mean, var)"
    model = parse(f"g (float[2, 1, 6, 6] x) => (float[2, 1, 6, 6] y) {{ {body} {norm} }}", opset=9, ir=3)
    after = same(model, FOLD_BATCH_NORM, {"x": np.ones((2, 1, 6, 6), np.float32)})
    assert operators(after) == ["Conv"]
    assert len(after.graph.input) == 1


def test_bodies_are_repaired_too() -> None:
    model = parse(
        """g (float[2, 4, 6, 6] x, bool c) => (float[2, 4, 6, 6] y) {
        y = If (c) <
          then_branch = a () => (float[2, 4, 6, 6] p) { q = Conv (x, w) p = BatchNormalization (q, scale, bias, mean, var) },
          else_branch = b () => (float[2, 4, 6, 6] r) { r = Relu (x) }> }""",
        w=np.random.default_rng(0).standard_normal((4, 4, 1, 1)),
        **statistics(4, 0),
    )
    x = np.random.default_rng(1).standard_normal((2, 4, 6, 6)).astype(np.float32)
    same(model, FOLD_BATCH_NORM, {"x": x, "c": np.array(True)})


@pytest.mark.parametrize("name", ["linear", "norm"])
def test_what_a_user_wants_in_float32_stays_as_it_is(name: str) -> None:
    model = convolution("Conv", 1, (3, 4), with_bias=True, seed=0)
    node = next(node for node in model.graph.node if node.name == name)
    node.metadata_props.add(key="halfserve.keep", value="asked for")
    assert_untouched(model, FOLD_BATCH_NORM)


@settings(max_examples=30)
@given(st.integers(-40, 20), st.lists(st.integers(-20, 30), min_size=1, max_size=3), st.integers(0, 9))
def test_powers_of_two_move_without_a_trace(weight: int, factors: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    steps = " ".join(f"h{i + 1} = Mul (h{i}, f{i})" for i in range(len(factors)))
    numbers: dict[str, Any] = {f"f{i}": np.array(2.0**factor) for i, factor in enumerate(factors)}
    model = parse(
        f"g (float[3, 8] x) => (float[3, 8] y) {{ h0 = MatMul (x, w) {steps} y = Identity (h{len(factors)}) }}",
        w=random.standard_normal((8, 8)) * 2.0**weight,
        **numbers,
    )
    after, _ = repaired(model, FOLD_SCALE)
    compare(model, after, {"x": random.standard_normal((3, 8)).astype(np.float32)}, 1e-6)


def test_vanishing_weights_become_ordinary() -> None:
    random = np.random.default_rng(0)
    model = parse(
        "g (float[1, 3, 6, 6] x) => (float[1, 4, 4, 4] y) { c = Conv (x, w, b) d = Mul (c, up) y = Div (d, down) }",
        w=random.standard_normal((4, 3, 3, 3)) * 1e-9,
        b=random.standard_normal(4) * 1e-9,
        up=np.array(2e5),
        down=np.array(1e-3),
    )
    after = same(model, FOLD_SCALE, {"x": random.standard_normal((1, 3, 6, 6)).astype(np.float32)})
    assert operators(after) == ["Conv"]
    assert all(1e-2 < np.abs(numpy_helper.to_array(tensor)).max() < 10 for tensor in after.graph.initializer)


LINEAR_SETTINGS = [
    ("Conv <strides = [2, 2], pads = [1, 1, 1, 1], dilations = [2, 2]>", (1, 4, 6, 6), (4, 4, 3, 3)),
    ("Conv <group = 2>", (1, 4, 6, 6), (4, 2, 3, 3)),
    ("ConvTranspose <strides = [2, 2], output_padding = [1, 1]>", (1, 4, 6, 6), (4, 4, 3, 3)),
    ("Gemm <alpha = 2.0, beta = 0.5, transA = 1>", (3, 5), (3, 4)),
    ("Gemm <transB = 1>", (5, 3), (4, 3)),
]


@pytest.mark.parametrize(("linear", "x", "w"), LINEAR_SETTINGS)
def test_the_operator_keeps_its_settings(linear: str, x: tuple[int, ...], w: tuple[int, ...]) -> None:
    random = np.random.default_rng(0)
    sizes, result = ", ".join(map(str, x)), ", ".join("ABCD"[: len(x)])
    model = parse(
        f"g (float[{sizes}] x) => (float[{result}] y) {{ h = {linear} (x, w, b) y = Mul (h, up) }}",
        w=random.standard_normal(w) * 1e-9, b=random.standard_normal(4) * 1e-9, up=np.array(2.0**28),
    )  # fmt: skip
    after = same(model, FOLD_SCALE, {"x": random.standard_normal(x).astype(np.float32)})
    assert operators(after) == [linear.partition(" ")[0]]


@pytest.mark.parametrize("name", ["h", "y"])
def test_scales_that_a_user_keeps_in_float32_stay(name: str) -> None:
    model = parse(
        "g (float[3, 8] x) => (float[3, 8] y) { h = MatMul (x, w) y = Mul (h, up) }", w=np.eye(8) * 1e-9, up=np.array(2e8)
    )
    node = next(node for node in model.graph.node if name in node.output)
    node.metadata_props.add(key="halfserve.keep", value="asked for")
    assert_untouched(model, FOLD_SCALE)


@pytest.mark.parametrize(
    ("text", "w"),
    [
        ("h = MatMul (x, w) y = Mul (h, half)", 1.0),  # float16 holds both
        ("h = MatMul (x, w) y = Div (half, h)", 1e-9),  # divides by the product
        ("h = MatMul (x, w) m = Mul (h, large) y = Add (h, m)", 1e-9),  # others read the product
        ("h = MatMul (x, w) m = Mul (h, vector) y = Identity (m)", 1e-9),
    ],
)
def test_what_gains_nothing_stays(text: str, w: float) -> None:
    model = parse(
        f"g (float[3, 8] x) => (float[3, 8] y) {{ {text} }}",
        w=np.ones((8, 8)) * w, half=np.array(0.5), large=np.array(2e5), vector=np.full(8, 2e5),
    )  # fmt: skip
    assert_untouched(model, FOLD_SCALE)
