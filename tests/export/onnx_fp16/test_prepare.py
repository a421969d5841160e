from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import pytest

from export.errors import ExportError
from export.files.sparse_weights import densify
from export.onnx_fp16.convert_float_to_float16 import convert_float_to_float16
from export.onnx_fp16.model_files import convert_file
from export.onnx_fp16.passes import PassError, run_passes
from export.onnx_fp16.report import Repair
from tests.export.onnx_fp16.models import FLOAT, FLOAT16, clean_both_ways, halve, normal, ops, parse, reasons, run

FUNCTIONS = """
<ir_version: 9, opset_import: ["": 20, "local": 1]>
g (float[3] x, int64[3] i) => (float[3] y) {
    [first] a = local.twice <factor: float = 2.0> (x)
    [second] b = local.twice <factor: float = 3.0> (a)
    f = Cast <to = 1> (i)
    y = Add (b, f)
}
<domain: "local", opset_import: ["": 20]>
twice <factor: float> (v) => (w) { k = Constant <value_float: float = @factor> () s = Mul (v, k) w = Tanh (s) }
"""


def test_functions_are_inlined() -> None:
    model = onnx.parser.parse_model(FUNCTIONS)
    converted = clean_both_ways(model, {"x": normal(3), "i": np.array([1, 2, 3])})
    assert list(converted.functions) == []
    assert [op for op in ops(converted) if op in ("Mul", "Tanh")] == ["Mul", "Tanh"] * 2


def test_a_blocked_call_keeps_all_that_it_stands_for() -> None:
    kept = reasons(halve(onnx.parser.parse_model(FUNCTIONS), node_block_list=["second"])[1])
    assert len(kept) == 2
    assert set(kept.values()) == {"in node_block_list"}


def test_functions_that_call_each_other_in_a_ring_are_an_error() -> None:
    text = FUNCTIONS.replace("w = Tanh (s)", "w = local.twice <factor: float = 1.0> (s)").replace(
        'opset_import: ["": 20]>\ntwice', 'opset_import: ["": 20, "local": 1]>\ntwice'
    )
    with pytest.raises(ExportError, match="functions cannot be inlined: .*inline them before"):
        halve(onnx.parser.parse_model(text))


def sparse(indices: list[int] | list[list[int]], dims: list[int]) -> onnx.SparseTensorProto:
    values = onnx.helper.make_tensor("w", FLOAT, [2], [1.5, 2.5])
    where = np.asarray(indices)
    return onnx.helper.make_sparse_tensor(
        values, onnx.helper.make_tensor("i", onnx.TensorProto.INT64, where.shape, where.ravel()), dims
    )


@pytest.mark.parametrize("indices", [[1, 3], [[0, 1], [1, 1]]])
def test_sparse_weights_become_dense(indices: list[int] | list[list[int]]) -> None:
    model = parse("g (float[2, 2] x) => (float[2, 2] y) { y = Add (x, w) }")
    model.graph.sparse_initializer.append(sparse(indices, [2, 2]))
    converted = convert_float_to_float16(model)
    onnx.checker.check_model(converted, full_check=True)
    assert [tensor.data_type for tensor in converted.graph.initializer] == [FLOAT16]
    np.testing.assert_array_equal(run(converted, x=np.zeros((2, 2), np.float32))[0], [[0, 1.5], [0, 2.5]])


def test_sparse_constants_become_dense() -> None:
    model = parse("g (float[4] x) => (float[4] y) { y = Relu (x) }")
    node = onnx.helper.make_node("Constant", [], ["w"], sparse_value=sparse([1, 3], [4]))
    model.graph.node.insert(0, node)
    model.graph.node[1].CopyFrom(onnx.helper.make_node("Add", ["x", "w"], ["y"]))
    np.testing.assert_array_equal(run(convert_float_to_float16(model), x=np.zeros(4, np.float32))[0], [0, 1.5, 0, 2.5])


def test_sparse_weights_and_constants_of_files_become_dense(tmp_path: Path) -> None:
    model = parse("g (float[4] x) => (float[4] y) { a = Add (x, w) y = Add (a, c) }")
    model.graph.sparse_initializer.append(sparse([1, 3], [4]))
    model.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["c"], sparse_value=sparse([0, 2], [4])))
    onnx.save(model, tmp_path / "in.onnx")
    convert_file(tmp_path / "in.onnx", tmp_path / "out.onnx")
    converted = onnx.load(tmp_path / "out.onnx")
    onnx.checker.check_model(converted, full_check=True)
    np.testing.assert_array_equal(run(converted, x=np.zeros(4, np.float32))[0], [1.5, 1.5, 2.5, 2.5])


def test_a_sparse_weight_in_a_data_file_is_refused() -> None:
    model = parse("g (float[4] x) => (float[4] y) { y = Add (x, w) }")
    model.graph.sparse_initializer.append(sparse([1, 3], [4]))
    model.graph.sparse_initializer[0].values.data_location = onnx.TensorProto.EXTERNAL
    with pytest.raises(ExportError, match="sparse tensor 'w' lies in a data file, expected it in the model: save the model in"):
        densify(model)


def test_a_sparse_weight_that_does_not_fit_is_an_error() -> None:
    model = parse("g (float[4] x) => (float[4] y) { y = Add (x, w) }")
    model.graph.sparse_initializer.append(sparse([1, 9], [4]))
    with pytest.raises(ExportError, match=r"sparse tensor 'w': its indices do not fit shape \[4\]; export the model again"):
        convert_float_to_float16(model)


class Step:
    """A repair that does what it is told."""

    def __init__(self, name: str, fails_in: str = "") -> None:
        self.name, self._fails_in = name, fails_in
        self.steps: list[str] = []

    def _do(self, step: str) -> None:
        self.steps.append(step)
        if step == self._fails_in:
            raise ValueError("no luck\nsecond line")

    def requires(self, model: onnx_ir.Model) -> None:
        self._do("requires")

    def call(self, model: onnx_ir.Model) -> list[Repair]:
        self._do("call")
        return [Repair(pass_name=self.name, nodes=("a",), text="done")]

    def ensures(self, model: onnx_ir.Model) -> None:
        self._do("ensures")


def test_passes_run_in_order_between_their_checks() -> None:
    model = onnx_ir.from_proto(parse("g (float[3] x) => (float[3] y) { y = Relu (x) }"))
    first, second = Step("first"), Step("second")
    assert [repair.pass_name for repair in run_passes(model, [first, second])] == ["first", "second"]
    assert first.steps == second.steps == ["requires", "call", "ensures"]


@pytest.mark.parametrize("step", ["requires", "call", "ensures"])
def test_a_pass_that_fails_is_named_with_its_step_and_those_before_it(step: str) -> None:
    model = onnx_ir.from_proto(parse("g (float[3] x) => (float[3] y) { y = Relu (x) }"))
    with pytest.raises(PassError, match=rf"the repair 'second' failed in `{step}` \(no luck\); passes before it: first;"):
        run_passes(model, [Step("first"), Step("second", fails_in=step), Step("third")])
