from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, helper, numpy_helper

from halfserve.serve.backends.onnx_runtime.onnx_interface import is_open_ended
from tests.models import save_model
from tests.serve.engine.model_folders import load

INT64, FLOAT, BOOL, STRING = TensorProto.INT64, TensorProto.FLOAT, TensorProto.BOOL, TensorProto.STRING


def model(*nodes: NodeProto, kind: int = INT64) -> ModelProto:
    """A model n -> y; "one" and "two" are weights."""
    weights = [numpy_helper.from_array(np.array([number], np.int64), name) for number, name in ((1, "one"), (2, "two"))]
    taken, given = (helper.make_tensor_value_info(name, kind, ["batch"]) for name in "ny")
    graph = helper.make_graph(list(nodes), "g", [taken], [given], weights)
    # As IR 3 has it: a weight that is listed as an input, too.
    graph.input.append(helper.make_value_info("two", TypeProto()))
    return helper.make_model(graph)


def node(kind: str, *inputs: str, to: str = "y", **attributes: Any) -> NodeProto:
    return helper.make_node(kind, inputs, [to], **attributes)


def branch(*nodes: NodeProto) -> GraphProto:
    return helper.make_graph(list(nodes), "branch", [], [helper.make_tensor_value_info("y", INT64, None)])


def counting() -> GraphProto:
    """A loop's body that adds one."""
    numbers = [helper.make_tensor_value_info(name, INT64, []) for name in ("i", "s", "s2")]
    goes_on = [helper.make_tensor_value_info(name, BOOL, []) for name in ("c", "c2")]
    nodes = [node("Identity", "c", to="c2"), node("Add", "s", "i", to="s2")]
    return helper.make_graph(nodes, "body", [numbers[0], goes_on[0], numbers[1]], [goes_on[1], numbers[2]])


def calling(*nodes: NodeProto) -> ModelProto:
    """A model that is one call of a function m -> y."""
    made = model(helper.make_node("Made", ["n"], ["y"], domain="own"))
    made.functions.append(helper.make_function("own", "Made", ["m"], ["y"], list(nodes), [helper.make_opsetid("", 20)]))
    return made


@pytest.mark.parametrize(
    "open_ended",
    [
        model(node("Loop", "n", "", "one", body=counting())),
        model(node("ConstantOfShape", "n")),
        model(node("Add", "n", "one", to="m"), node("Range", "one", "m", "two")),
        model(node("Shape", "n", to="s"), node("Mul", "s", "n", to="m"), node("Expand", "one", "m")),
        model(node("If", "one", then_branch=branch(node("Tile", "one", "n")), else_branch=branch(node("Neg", "n")))),
        calling(node("Abs", "m", to="k"), node("Tile", "m", "k")),
        model(node("Identity", "n"), kind=STRING),
    ],
    ids=["a loop", "a size", "a range", "a size that is computed", "a branch", "a function", "strings"],
)
def test_values_decide_how_long_it_takes(open_ended: ModelProto) -> None:
    assert is_open_ended(open_ended)


@pytest.mark.parametrize(
    "bounded",
    [
        model(node("Expand", "n", "two")),
        model(node("Shape", "n", to="s"), node("ConstantOfShape", "s")),
        model(node("Shape", "n", to="s"), node("Concat", "s", "one", to="m"), node("Tile", "one", "m")),
        model(node("If", "one", then_branch=branch(node("Abs", "n")), else_branch=branch(node("Neg", "n")))),
        calling(node("Abs", "m", to="y")),
    ],
    ids=["by a weight", "by a shape", "by what is made of a shape", "a branch", "a function"],
)
def test_shapes_decide_how_long_it_takes(bounded: ModelProto) -> None:
    assert not is_open_ended(bounded)


@pytest.mark.parametrize(("kind", "on_loop"), [("Range", False), ("Mul", True)])
def test_no_batch_that_may_take_any_time_runs_on_the_event_loop(tmp_path: Path, kind: str, on_loop: bool) -> None:
    node = helper.make_node(kind, ["zero", "n", "one"] if kind == "Range" else ["n", "one"], ["y"])
    numbers = {"zero": np.array(0, np.int64), "one": np.array(1, np.int64)}
    path = save_model(
        tmp_path / "m.onnx", [node], [("n", INT64, [])], [("y", INT64, ["size"] if kind == "Range" else [])], numbers
    )
    (instance,) = load(path).batcher.instances
    assert instance.may_run_on_loop is on_loop
    instance.stop()
