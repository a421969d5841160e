"""Models whose configuration lists some of their outputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from serve.engine.errors import BackendError, ModelLoadError
from tests.models import save_model
from tests.serve.engine.model_folders import load

ROWS = 'output { name: "twice" data_type: TYPE_FP32 dims: 3 }'
X = np.arange(6, dtype=np.float32).reshape(2, 3)


def write(root: Path, config: str) -> Path:
    """x [batch, 3] -> total, which has no rows; root and twice, which have."""
    nodes = [
        helper.make_node("Add", ["x", "x"], ["twice"]),
        helper.make_node("Sqrt", ["x"], ["root"]),
        helper.make_node("ReduceSum", ["x"], ["total"], keepdims=0),
    ]
    rows: list[int | str] = ["batch", 3]
    fp32 = TensorProto.FLOAT
    for path in (root / "m" / "1" / "model.onnx", root / "m" / "1" / "fp32" / "model.onnx"):
        save_model(path, nodes, [("x", fp32, rows)], [("total", fp32, []), ("root", fp32, rows), ("twice", fp32, rows)])
    (root / "m" / "config.pbtxt").write_text(config)
    return root


def test_outputs_that_are_not_listed_are_not_there(tmp_path: Path) -> None:
    model = load(write(tmp_path, ROWS.replace("dims: 3", "dims: [-1, 3]")))
    assert list(model.outputs) == ["twice"]
    assert [entry.name for entry in model.config.output] == ["twice"]
    answer = model.backends[0].run({"x": X})
    assert list(answer) == ["twice"]
    np.testing.assert_array_equal(answer["twice"], 2 * X)


def test_where_none_is_listed_all_are_there(tmp_path: Path) -> None:
    model = load(write(tmp_path, "max_batch_size: 0"))
    assert list(model.outputs) == list(model.backends[0].run({"x": X})) == ["total", "root", "twice"]


def test_outputs_that_are_not_listed_need_not_have_rows(tmp_path: Path) -> None:
    model = load(write(tmp_path, f"max_batch_size: 8 {ROWS}"))
    assert (model.max_batch_size, model.outputs["twice"].shape) == (8, (-1, 3))
    with pytest.raises(ModelLoadError, match="not every input and output of the model begins with a dimension of any size"):
        load(write(tmp_path, "max_batch_size: 8"))


def test_an_output_that_is_not_in_the_file_is_named_beside_all_that_are(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="output 'three' is not in the model, which has 'root', 'total', 'twice'"):
        load(write(tmp_path, f"max_batch_size: 0 {ROWS.replace('twice', 'three')}"))


def test_the_twin_answers_the_same_outputs(tmp_path: Path) -> None:
    guard = 'parameters { key: "halfserve.precision_guard" value { string_value: "fallback" } }'
    model = load(write(tmp_path, f"max_batch_size: 8 {ROWS} {guard}"))
    assert model.guard is not None
    assert list(model.outputs) == ["twice"]


def test_every_copy_leaves_them_out(tmp_path: Path) -> None:
    model = load(write(tmp_path, f"max_batch_size: 8 {ROWS} instance_group {{ count: 2 kind: KIND_CPU }}"))
    assert [list(copy.run({"x": X})) for copy in model.backends] == [["twice"], ["twice"]]


def test_a_copy_that_is_given_up_computes_no_further(tmp_path: Path) -> None:
    copy = load(write(tmp_path, f"max_batch_size: 8 {ROWS}")).backends[0]
    copy.give_up()
    with pytest.raises(BackendError, match="failed on this request"):
        copy.run({"x": X})
