from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from export.errors import ExportError
from export.files.model_file import serialize
from export.verification.synthetic import synthesize
from tests.export.sessions import open_session, run_session

TEXT = """
<ir_version: 8, opset_import: ["": 17]>
g (int64[batch,seq] input_ids, int64[batch,seq] attention_mask, int64[batch,seq] position_ids, float[batch,3,h,w] image,
   bool[batch] flag, int64[batch] other) => (float[batch,seq,4] y) {
    cast = Cast<to=6>(input_ids)
    words = Gather(vocabulary, cast)
    places = Gather(positions, position_ids)
    y = Add(words, places)
}
"""


@pytest.fixture
def bert() -> onnx.ModelProto:
    model = parser.parse_model(TEXT)
    tables = {"vocabulary": (3, 4), "positions": (16, 4)}
    model.graph.initializer.extend(numpy_helper.from_array(np.ones(shape, np.float32), name) for name, shape in tables.items())
    return model


def test_inputs_follow_shapes_types_tables_and_names(bert: onnx.ModelProto) -> None:
    ids, mask, positions, image, flag, other = synthesize(bert)
    assert (ids.shape, ids.dtype) == ((2, 16), np.int64)
    assert set(np.unique(ids)) == {0, 1, 2}
    assert (mask == 1).all()
    assert np.array_equal(positions, [np.arange(16)] * 2)
    assert (image.shape, image.dtype) == ((2, 3, 32, 32), np.float32)
    assert 0.9 < image.std() < 1.1
    assert flag.all()
    assert other.max() < 8
    feeds = {v.name: a for v, a in zip(bert.graph.input, (ids, mask, positions, image, flag, other), strict=True)}
    (y,) = run_session(open_session(serialize(bert), "ORT_ENABLE_BASIC"), feeds).values()
    assert y.shape == (2, 16, 4)


def test_sizes_can_be_asked_for_by_name_or_place(bert: onnx.ModelProto) -> None:
    arrays = synthesize(bert, dims={"seq": 5, "batch": 3, "image.2": 64})
    assert [array.shape for array in arrays[:4]] == [(3, 5), (3, 5), (3, 5), (3, 3, 64, 32)]


def test_the_same_seed_gives_the_same_inputs(bert: onnx.ModelProto) -> None:
    pairs = zip(synthesize(bert, seed=3), synthesize(bert, seed=3), strict=True)
    assert all(np.array_equal(one, other) for one, other in pairs)
    assert not np.array_equal(synthesize(bert, seed=3)[3], synthesize(bert, seed=4)[3])


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ({"sequence": 4}, "no input has a dimension 'sequence'; there are attention_mask.0, attention_mask.1, batch,"),
        ({"seq": 0}, "dimension 'seq' is 0; expected at least 1"),
        ({"image.1": 4}, "no input has a dimension 'image.1'"),
    ],
)
def test_sizes_that_no_input_has_are_refused(bert: onnx.ModelProto, dims: dict[str, int], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        synthesize(bert, dims=dims)


@pytest.mark.parametrize("size", [10**14, 2**62, 10**30])
def test_sizes_beyond_memory_are_refused(bert: onnx.ModelProto, size: int) -> None:
    with pytest.raises(ExportError, match=rf"of shape \[2, {size}\] does not fit in memory; ask for smaller sizes"):
        synthesize(bert, dims={"seq": size})


@pytest.mark.parametrize(
    ("elem_type", "shape", "message"),
    [
        (TensorProto.FLOAT, None, "input 'x' declares no shape, so none can be made up; give samples"),
        (TensorProto.STRING, ["n"], r"input 'x' is string \[n\]; values for it cannot be made up: give samples"),
        (TensorProto.BFLOAT16, ["n"], r"input 'x' is bfloat16 \[n\], which cannot be verified: export the model again, in"),
    ],
)
def test_inputs_that_cannot_be_made_up_say_what_to_do(elem_type: int, shape: list[str] | None, message: str) -> None:
    values = [helper.make_tensor_value_info(name, elem_type, shape) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    with pytest.raises(ExportError, match=message):
        synthesize(model)
