from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from export.files.model_file import open_model
from export.placement.islands import find_islands
from tests.export.onnx_files import sums, with_a_body
from tests.export.placement.half_models import half_model


def test_connected_float32_nodes_are_one_island() -> None:
    (island,) = find_islands(open_model(half_model()), {"sqrt": "kept", "exp": "kept", "tan": "not there"})
    assert island.nodes == ("exp", "sqrt")
    assert island.op_types == {"Exp": 1, "Sqrt": 1}
    assert island.reasons == ("kept",)


def test_casts_part_islands() -> None:
    model = half_model()
    between = [
        helper.make_node("Cast", ["d"], ["d16"], name="there", to=TensorProto.FLOAT16),
        helper.make_node("Cast", ["d16"], ["d32"], name="back", to=TensorProto.FLOAT),
    ]
    model.graph.node[4].input[0] = "d32"
    nodes = [*model.graph.node[:4], *between, *model.graph.node[4:]]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    assert [island.nodes for island in find_islands(open_model(model))] == [("exp",), ("sqrt",)]


def test_a_float32_model_is_one_island_and_a_float16_one_has_none() -> None:
    (island,) = find_islands(open_model(sums()))
    assert len(island.nodes) == 5
    assert find_islands(open_model(sums(dtype=np.float16))) == ()


def test_bodies_have_islands_of_their_own() -> None:
    groups = [island.nodes for island in find_islands(open_model(with_a_body()))]
    assert sorted(groups) == [("if",), ("inner_add",), ("other",)]


def test_float32_scales_do_not_make_a_node_float32() -> None:
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT16, [1, 1, size, size]) for name, size in (("x", 2), ("y", 4))
    ]
    scales = helper.make_tensor("scales", TensorProto.FLOAT, [4], [1, 1, 2, 2])
    node = helper.make_node("Resize", ["x", "", "scales"], ["y"], name="resize")
    graph = helper.make_graph([node], "resize", values[:1], values[1:], [scales])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    assert find_islands(open_model(model)) == ()
