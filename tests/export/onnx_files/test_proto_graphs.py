from __future__ import annotations

import numpy as np
from onnx import helper, numpy_helper

from halfserve.export.onnx_files.proto_graphs import all_graphs, all_nodes
from halfserve.files.onnx_tensors import all_tensors
from tests.export.stored_models import sums, with_a_body


def test_bodies_are_walked_too() -> None:
    model = with_a_body()
    assert {node.name for node in all_nodes(model)} == {"constant", "if", "inner_add", "other"}
    assert {graph.name for graph in all_graphs(model)} == {"with_a_body", "then", "else"}
    assert {tensor.name for tensor in all_tensors(model)} == {"inner", "value"}


def test_bodies_within_bodies_are_walked_once() -> None:
    inner, outer = with_a_body(), with_a_body()
    outer.graph.node[1].attribute[0].g.node.append(inner.graph.node[1])
    names = [node.name for node in all_nodes(outer)]
    assert sorted(names) == ["constant", "if", "if", "inner_add", "inner_add", "other", "other"]
    assert len(list(all_graphs(outer))) == 5


def test_functions_are_walked() -> None:
    model = sums()
    value = numpy_helper.from_array(np.ones(2, np.float32), "in_function")
    body = [helper.make_node("Constant", [], ["c"], name="of_function", value=value)]
    model.functions.append(helper.make_function("own", "F", [], ["c"], body, list(model.opset_import)))
    assert "of_function" in {node.name for node in all_nodes(model)}
    assert "in_function" in {tensor.name for tensor in all_tensors(model)}
