from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from export.files.model_file import serialize
from export.verification.metrics import Array
from export.verification.simulate import round_every_node
from tests.export.sessions import open_session, run_session

X = np.random.default_rng(0).uniform(-30, 900, (3, 200, 2)).astype(np.float16)


def model(node: str = "CumSum (x, axis)", axis: int = 1, inputs: str = "", *, ir_version: int = 8) -> onnx.ModelProto:
    text = f"g (float16[N, M, K] x{inputs}) => (float16[N, M, K] y) {{ y = {node} }}"
    parsed = parser.parse_model(f'<ir_version: {ir_version}, opset_import: ["": 17]> {text}')
    if not inputs:
        parsed.graph.initializer.append(numpy_helper.from_array(np.array(axis), "axis"))
    return parsed


def run(onnx_model: onnx.ModelProto, x: Array = X) -> Array:
    (y,) = run_session(open_session(serialize(round_every_node(onnx_model)), "ORT_ENABLE_BASIC"), {"x": x}).values()
    return y


def one_by_one(x: Array, axis: int, *, exclusive: bool = False, reverse: bool = False) -> Array:
    """numpy's float16, entry after entry."""
    entries = np.moveaxis(x, axis, 0)[:: -1 if reverse else 1]
    total, sums = np.zeros_like(entries[0]), []
    with np.errstate(over="ignore"):
        for entry in entries:
            before, total = total, total + entry
            sums.append(before if exclusive else total)
    return np.moveaxis(np.array(sums)[:: -1 if reverse else 1], 0, axis)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_each_addition_is_rounded(axis: int, exclusive: bool, reverse: bool) -> None:
    node = f"CumSum <exclusive = {int(exclusive)}, reverse = {int(reverse)}> (x, axis)"
    assert np.array_equal(run(model(node, axis)), one_by_one(X, axis, exclusive=exclusive, reverse=reverse))


def test_ones_add_up_to_2048() -> None:
    assert run(model(), np.ones((1, 4096, 1), np.float16)).max() == 2048


def test_an_axis_without_entries_has_no_sums() -> None:
    assert run(model(), np.zeros((2, 0, 3), np.float16)).shape == (2, 0, 3)


def test_bodies_know_the_axis_of_the_graph_around_them() -> None:
    branch = "b = {} () => (float16[N, M, K] {}) {{ {} = CumSum (x, axis) }}"
    node = f"If (f) <then_branch {branch.format('t', 'a', 'a')[1:]}, else_branch {branch.format('e', 'b', 'b')[1:]}>"
    branching = model(node)
    branching.graph.initializer.append(numpy_helper.from_array(np.array(True), "f"))
    assert np.array_equal(run(branching), one_by_one(X, 1))


@pytest.mark.parametrize("constant", ["value_int = 1", "value = int32 {1}", "value = int64[1] {1}"])
def test_the_axis_may_be_a_constant_node(constant: str) -> None:
    written = model()
    del written.graph.initializer[:]
    text = f'<ir_version: 8, opset_import: ["": 17]> g () => (int64 axis) {{ axis = Constant <{constant}> () }}'
    written.graph.node.insert(0, parser.parse_model(text).graph.node[0])
    assert np.array_equal(run(written), one_by_one(X, 1))


def test_an_axis_that_is_computed_leaves_one_node() -> None:
    rounded = round_every_node(model("CumSum (x, axis)", inputs=", int64 axis"))
    assert [node.op_type for node in rounded.graph.node] == ["Cast", "CumSum", "Cast"]


def test_sums_of_float32_stay() -> None:
    wide = model("CumSum (x, axis)")
    for value in (*wide.graph.input, *wide.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    assert [node.op_type for node in round_every_node(wide).graph.node] == ["CumSum"]
