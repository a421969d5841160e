from __future__ import annotations

from collections.abc import Callable

import onnx
import pytest
from onnx import helper, parser

from export.errors import ExportError
from export.files.model_checks import require_sound

TEXT = """<ir_version: 9, opset_import: ["": 20, "loc": 1]>
g (bool c, float[2] x) => (float[2] y, float[2] z) <int64 n = {3}, float[2] w = {1, 2}> {
  a = Cast <to = 1> (x)
  b = If (c) <then_branch = t () => (float[2] p) { p = Neg (a) }, else_branch = e () => (float[2] q) { q = Neg (w) }>
  y = Loop (n, , b) <body = l (int64 i, bool go, float[2] v) => (bool on, float[2] u) { on = Identity (go) u = Neg (v) }>
  z = loc.Twice () }
<domain: "loc", opset_import: ["": 20]> Twice () => (s) { s = Constant <value = float {1}> () }"""


@pytest.fixture
def model() -> onnx.ModelProto:
    return parser.parse_model(TEXT)


def test_a_model_with_bodies_optional_inputs_and_functions_is_complete(model: onnx.ModelProto) -> None:
    require_sound(model, "the model")


def test_a_function_of_the_models_own_may_have_the_name_of_an_operator(model: onnx.ModelProto) -> None:
    """Its inputs and attributes are its own."""
    model.functions.append(helper.make_function("", "Cast", ["r"], ["s"], [helper.make_node("Neg", ["r"], ["s"])], []))
    del model.graph.node[0].attribute[:]
    require_sound(model, "the model")


def _no_input(model: onnx.ModelProto) -> None:
    del model.graph.node[0].input[:]


def _no_output(model: onnx.ModelProto) -> None:
    del model.graph.node[1].attribute[1].g.node[0].output[:]
    model.graph.node[1].attribute[1].g.output[0].name = "a"


def _no_attribute(model: onnx.ModelProto) -> None:
    del model.graph.node[0].attribute[:]


def _other_type(model: onnx.ModelProto) -> None:
    model.graph.node[0].attribute[0].CopyFrom(helper.make_attribute("to", 1.0))


def _no_body(model: onnx.ModelProto) -> None:
    del model.graph.node[2].attribute[:]


def _less_for_the_body(model: onnx.ModelProto) -> None:
    del model.graph.node[2].input[2]


def _less_of_a_branch(model: onnx.ModelProto) -> None:
    del model.graph.node[1].attribute[1].g.output[:]


def _less_of_a_loop(model: onnx.ModelProto) -> None:
    del model.graph.node[2].attribute[0].g.output[1]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_no_input, r"node 'a' \(Cast\) has 0 inputs, expected 1 or more"),
        (_no_output, r"node '' \(Neg\) has 0 outputs, expected 1 or more"),
        (_no_attribute, r"node 'a' \(Cast\) lacks its attribute 'to'"),
        (_other_type, r"node 'a' \(Cast\) has the attribute 'to' of another type than its operator's"),
        (_no_body, r"node 'y' \(Loop\) lacks its attribute 'body'"),
        (_less_for_the_body, r"node 'y' \(Loop\) has 2 inputs, but its body takes 3"),
        (_less_of_a_branch, r"node 'b' \(If\) has 1 outputs, but its 'else_branch' gives 0"),
        (_less_of_a_loop, r"node 'y' \(Loop\) has 1 outputs, but its 'body' gives 0"),
    ],
)
def test_a_node_that_lacks_something_is_named(
    model: onnx.ModelProto, change: Callable[[onnx.ModelProto], None], reason: str
) -> None:
    change(model)
    with pytest.raises(ExportError, match=f"^the model is not a valid ONNX model: {reason}; export it again$"):
        require_sound(model, "the model")
