from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from export.errors import ExportError
from export.files.model_file import open_model
from export.files.tensor_checks import require_whole_tensors
from tests.export.onnx_files import in_one_file, sums, with_data_files

KINDS = [kind for kind in TensorProto.DataType.values() if kind not in (TensorProto.UNDEFINED, TensorProto.STRING)]


@pytest.mark.parametrize("kind", KINDS, ids=TensorProto.DataType.Name)
@pytest.mark.parametrize("count", [0, 1, 3, 8])
def test_what_onnx_itself_writes_of_each_type_is_whole(kind: int, count: int) -> None:
    model = sums()
    model.graph.initializer.append(helper.make_tensor("more", kind, [count], np.zeros(count)))
    require_whole_tensors(model, "m")


def test_texts_and_weights_as_bytes_or_in_data_files_are_whole(tmp_path: Path) -> None:
    model = sums()
    model.graph.initializer.add(name="texts", data_type=TensorProto.STRING, dims=[2, 1], string_data=[b"a", b""])
    require_whole_tensors(model, "m")
    open_model(with_data_files(model, tmp_path / "m.onnx"))


def _short(weight: TensorProto) -> None:
    weight.raw_data = weight.raw_data[:1000]


def _none(weight: TensorProto) -> None:
    weight.ClearField("raw_data")


def _negative(weight: TensorProto) -> None:
    weight.dims[0] = -1


def _huge(weight: TensorProto) -> None:
    weight.dims[0] = 2**62


def _untyped(weight: TensorProto) -> None:
    weight.data_type = TensorProto.UNDEFINED


def _texts(weight: TensorProto) -> None:
    weight.data_type = TensorProto.STRING


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_short, "has 1,000 bytes, its type and shape say 2,048"),
        (_none, "has 0 values in float_data, its type and shape say 512"),
        (_negative, r"has the shape \[-1\]"),
        (_huge, "has 2,048 bytes, its type and shape say 18,446,744,073,709,551,616"),
        (_untyped, "states no element type"),
        (_texts, "has values as bytes, which its element type cannot have"),
    ],
)
@pytest.mark.parametrize("is_attribute", [False, True])
def test_a_damaged_tensor_is_named(change: Callable[[TensorProto], None], reason: str, is_attribute: bool) -> None:
    model = sums()
    weight = model.graph.initializer[0]
    if is_attribute:
        node = helper.make_node("Constant", [], ["constant"], value=weight)
        model.graph.node.append(node)
        weight = model.graph.node[-1].attribute[0].t
    change(weight)
    with pytest.raises(ExportError, match=f"^the model is not a valid ONNX model: the tensor 'w0' {reason}; export it again$"):
        open_model(model)


def test_a_weight_that_stays_in_the_file_is_not_filled_up_with_the_next_one(tmp_path: Path) -> None:
    model = sums(2, 2**16)
    weight: onnx.TensorProto = model.graph.initializer[0]
    weight.raw_data = weight.raw_data[: 2**17]
    with pytest.raises(ExportError, match="the tensor 'w0' has 131,072 bytes, its type and shape say 262,144"):
        open_model(in_one_file(model, tmp_path / "m.onnx"))
