from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from export.onnx_fp16.repair.fold_batch_norm import FoldBatchNorm
from tests.export.onnx_fp16.models import parse
from tests.export.onnx_fp16.repair.same import operators, repaired, same, untouched

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
    inputs = ["x", "w", *(["b"] if with_bias else [])]
    nodes = [
        helper.make_node(op, inputs, ["c"], name="linear", group=groups),
        helper.make_node("BatchNormalization", ["c", "scale", "bias", "mean", "var"], ["y"], name="norm", epsilon=1e-3),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, into, 6, 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, out, None, None])],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


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
    after = same(convolution(op, groups, per_group, with_bias=with_bias, seed=seed), FoldBatchNorm(), {"x": x})
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
    after = same(model, FoldBatchNorm(), {"x": random.standard_normal((5, 8)).astype(np.float32)})
    assert operators(after) == ["Gemm"]


def test_statistics_over_the_range_leave_weights_that_fit() -> None:
    model = convolution("Conv", 1, (3, 4), with_bias=False, seed=3)
    for tensor in model.graph.initializer:
        if tensor.name == "var":
            tensor.CopyFrom(numpy_helper.from_array(np.full(4, 9.8e7, np.float32), "var"))
    x = np.random.default_rng(0).standard_normal((2, 3, 6, 6)).astype(np.float32)
    after = same(model, FoldBatchNorm(), {"x": x})
    assert max(np.abs(numpy_helper.to_array(tensor)).max() for tensor in after.graph.initializer) < 65504


def test_with_nothing_to_fold_into_it_is_spelled_out_only_where_that_helps() -> None:
    text = (
        "g (float[2, 4, 3, 3] x) => (float[2, 4, 3, 3] y) { r = Relu (x) y = BatchNormalization (r, scale, bias, mean, var) }"
    )
    large = {**statistics(4, 0), "scale": np.full(4, 3e4), "var": np.full(4, 9.8e7)}
    x = np.random.default_rng(0).standard_normal((2, 4, 3, 3)).astype(np.float32)
    assert operators(same(parse(text, **large), FoldBatchNorm(), {"x": x})) == ["Relu", "Mul", "Add"]
    untouched(parse(text, **statistics(4, 0)), FoldBatchNorm())


@pytest.mark.parametrize("shape", ["2, 4, 4", "A, B, C"])
def test_rows_of_channels_stay_where_the_columns_of_the_weights_are_as_many(shape: str) -> None:
    # A layer over the last axis, and a norm over the one before: the norm's four channels are not the weights' four columns.
    model = parse(
        f"g (float[{shape}] x) => (float[{shape}] y) "
        "{ h = MatMul (x, w) y = BatchNormalization (h, scale, bias, mean, var) }",
        w=np.random.default_rng(0).standard_normal((4, 4)),
        **statistics(4, 1),
    )
    untouched(model, FoldBatchNorm())


def test_a_stack_of_matrices_stays() -> None:
    model = parse(
        "g (float[8] x) => (float[2, 4] y) { h = MatMul (x, w) y = BatchNormalization (h, scale, bias, mean, var) }",
        w=np.random.default_rng(0).standard_normal((2, 8, 4)),
        **statistics(4, 1),
    )
    untouched(model, FoldBatchNorm())


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
    untouched(model, FoldBatchNorm())


def test_the_report_names_both_nodes_and_the_factor() -> None:
    (repair,) = repaired(convolution("Conv", 1, (3, 4), with_bias=True, seed=0), FoldBatchNorm())[1]
    assert (repair.pass_name, repair.nodes) == ("fold-batch-norm", ("norm",))
    assert "folded into Conv 'linear' in float64" in repair.text


def test_weights_that_two_convolutions_share_are_copied() -> None:
    model = parse(
        """g (float[2, 4, 6, 6] x) => (float[2, 4, 6, 6] y, float[2, 4, 6, 6] z) {
        c = Conv (x, w) y = BatchNormalization (c, scale, bias, mean, var) z = Conv (x, w) }""",
        w=np.random.default_rng(0).standard_normal((4, 4, 1, 1)),
        **statistics(4, 0),
    )
    same(model, FoldBatchNorm(), {"x": np.random.default_rng(1).standard_normal((2, 4, 6, 6)).astype(np.float32)})


def test_the_oldest_format_gets_no_initializer_that_is_not_an_input() -> None:
    text = " ".join(
        f"{name} = Constant <value = float[1] {{{number}.0}}> ()" for number, name in enumerate(statistics(1, 0), 1)
    )
    body = f"w = Constant <value = float[1, 1, 1, 1] {{3.0}}> () {text} c = Conv (x, w)"
    norm = "y = BatchNormalization (c, scale, bias, mean, var)"
    model = parse(f"g (float[2, 1, 6, 6] x) => (float[2, 1, 6, 6] y) {{ {body} {norm} }}", opset=9, ir=3)
    after = same(model, FoldBatchNorm(), {"x": np.ones((2, 1, 6, 6), np.float32)})
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
    same(model, FoldBatchNorm(), {"x": x, "c": np.array(True)})


@pytest.mark.parametrize("name", ["linear", "norm"])
def test_what_a_user_wants_in_float32_stays_as_it_is(name: str) -> None:
    model = convolution("Conv", 1, (3, 4), with_bias=True, seed=0)
    node = next(node for node in model.graph.node if node.name == name)
    node.metadata_props.add(key="halfserve.keep", value="asked for")
    untouched(model, FoldBatchNorm())
