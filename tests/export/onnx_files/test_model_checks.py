from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, parser

from halfserve.export.export_errors import ExportError
from halfserve.export.onnx_files.model_checks import no_model, require_sound, require_sound_graphs, require_whole_tensors
from halfserve.export.onnx_files.model_file import open_model
from halfserve.export.onnx_fp16.convert import convert_float_to_float16
from tests.export.stored_models import in_one_file, sums, with_a_body, with_data_files


def test_sound_models_pass() -> None:
    require_sound(sums(), "m")
    require_sound(with_a_body(), "m")


Change = Callable[[onnx.ModelProto], object]


def put(message: Any, **fields: Any) -> Any:
    """Replace fields of a message, repeated ones by lists, and return it."""
    for name, value in fields.items():
        message.ClearField(name)
        if isinstance(value, list):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    return message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.ClearField("graph"), "m is not an ONNX model or is damaged: it has no graph"),
        (lambda m: m.graph.ClearField("output"), "m is not an ONNX model or is damaged: it has no outputs"),
        (lambda m: put(m, ir_version=99), r"m has IR version 99; onnx .* knows up to \d+; upgrade onnx"),
        (lambda m: put(m, ir_version=2), "m has IR version 2 and opsets .*; expected IR 3 or later and an opset"),
        (lambda m: put(m.opset_import[0], version=999), r"m has opset 999; onnx .* knows up to \d+; upgrade onnx"),
        (lambda m: m.ClearField("opset_import"), "m has IR version 10 and opsets none; expected"),
        (
            lambda m: put(m.opset_import[0], domain="com.example"),
            "m: node 'add0' is a 'Add', but the model imports no opset of ONNX's own operators",
        ),
        (
            lambda m: put(m.graph.node[0], op_type="Adds"),
            r"m: node 'add0' is a 'Adds', which ONNX's opset 20 does not have \(did you mean 'Add'\?\); give",
        ),
        (
            lambda m: (put(m.graph.node[0], op_type="Gelu"), put(m.opset_import[0], version=19)),
            "m: node 'add0' is a 'Gelu', which ONNX's opset 19 does not have; it came later",
        ),
    ],
)
def test_what_no_tool_could_use_is_refused(change: Change, message: str) -> None:
    model = sums()
    change(model)
    with pytest.raises(ExportError, match=message):
        require_sound(model, "m")


def test_an_unknown_operator_in_a_body_is_found() -> None:
    model = with_a_body()
    model.graph.node[1].attribute[0].g.node[0].op_type = "Nonesuch"
    with pytest.raises(ExportError, match="is a 'Nonesuch', which ONNX's opset 20 does not have"):
        require_sound(model, "m")


def test_operators_of_other_domains_and_own_functions_are_the_users() -> None:
    model = sums()
    model.graph.node[0].domain, model.graph.node[0].op_type = "com.example", "Fancy"
    model.graph.node[1].op_type = "Own"
    body = [helper.make_node("Add", ["a", "b"], ["c"])]
    model.functions.append(helper.make_function("", "Own", ["a", "b"], ["c"], body, list(model.opset_import)))
    require_sound(model, "m")


@pytest.mark.parametrize(
    ("head", "hint"),
    [
        (b"version https://git-lfs.github.com", "it is a Git LFS pointer: run `git lfs pull`"),
        (b"PK\x03\x04rest", "it is a zip archive, as PyTorch checkpoints are"),
        (b"<!DOCTYPE html>", "it is a web page"),
        (b"anything", "it breaks off"),
    ],
)
def test_what_it_is_instead_is_guessed(head: bytes, hint: str) -> None:
    assert f"m is not an ONNX model or is damaged: {hint}" in str(no_model("m", head, "it breaks off"))


def test_without_a_guess_the_line_is_short() -> None:
    assert str(no_model("m", b"?")) == "m is not an ONNX model or is damaged"


def test_the_newest_opset_is_known() -> None:
    require_sound(sums(opset=onnx.defs.onnx_opset_version()), "m")


GRAPH = """<ir_version: 9, opset_import: ["": 17, "loc": 1]>
g (bool c, float[2] x) => (float[2] y) <float[2] w = {1, 2}> {
  a = Add (x, w)
  b = If (c) <then_branch = t () => (float[2] p) { p = loc.Twice (a) }, else_branch = e () => (float[2] q) { q = Neg (w) }>
  y = Relu (b) }
<domain: "loc", opset_import: ["": 17]> Twice (r) => (s) { s = Add (r, r) }"""


def branch(model: onnx.ModelProto, number: int) -> onnx.GraphProto:
    """A branch of the If, which is the second node."""
    return model.graph.node[1].attribute[number].g


@pytest.fixture
def graph_model() -> onnx.ModelProto:
    return parser.parse_model(GRAPH)


def test_values_may_come_from_outside_and_in_any_order(graph_model: onnx.ModelProto) -> None:
    nodes = list(graph_model.graph.node)
    del graph_model.graph.node[:]
    graph_model.graph.node.extend(reversed(nodes))
    before = graph_model.SerializeToString(deterministic=True)
    require_sound_graphs(graph_model, "m")
    assert graph_model.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: put(m.graph.node[2], input=["lost"]), r"node 'y' \(Relu\) reads 'lost', which nothing makes"),
        (lambda m: put(branch(m, 0).node[0], input=["lost"]), r"node 'p' \(Twice\) reads 'lost', which nothing makes"),
        (lambda m: put(m.functions[0].node[0], input=["r", "lost"]), r"node 's' \(Add\) reads 'lost', which nothing makes"),
        (
            lambda m: m.graph.node.append(helper.make_node("Neg", ["x"], ["a"])),
            r"node 'a' \(Neg\) makes 'a', which is there already",
        ),
        (lambda m: put(m.graph.output[0], name="lost"), "no node makes the output 'lost'"),
        (lambda m: put(branch(m, 1).output[0], name="lost"), "no node makes the output 'lost'"),
        (
            lambda m: m.graph.node[2].attribute.add(name="alpha", f=1.0),
            r"the attribute 'alpha' of node 'y' \(Relu\) states no type",
        ),
        (lambda m: put(m.graph.initializer[0], data_type=99), "the weight 'w' has the element type 99, which ONNX lacks"),
        (
            lambda m: put(m.graph.value_info.add(name="a").type.tensor_type, elem_type=99),
            "'a' has the element type 99, which ONNX lacks",
        ),
        (lambda m: m.graph.value_info.add(name="a").type.sequence_type.SetInParent(), "'a' is a sequence of no type"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(graph_model: onnx.ModelProto, change: Change, reason: str) -> None:
    change(graph_model)
    with pytest.raises(ExportError, match=f"^the model is not a valid ONNX model: {reason}; export it again$"):
        convert_float_to_float16(graph_model)


def test_maps_are_refused_with_the_way_out() -> None:
    """What scikit-learn's converter puts behind every classifier."""
    scores = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 2])
    maps = helper.make_sequence_type_proto(helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(1, [])))
    zipped = helper.make_node("ZipMap", ["x"], ["y"], domain="ai.onnx.ml", classlabels_int64s=[0, 1])
    graph = helper.make_graph([zipped], "g", [scores], [helper.make_value_info("y", maps)])
    graph_model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 1)])
    graph_model.ir_version = 9
    with pytest.raises(ExportError, match="'y' holds maps, which can be neither converted nor served; .*zipmap=False"):
        convert_float_to_float16(graph_model)


NODES = """<ir_version: 9, opset_import: ["": 20, "loc": 1]>
g (bool c, float[2] x) => (float[2] y, float[2] z) <int64 n = {3}, float[2] w = {1, 2}> {
  a = Cast <to = 1> (x)
  b = If (c) <then_branch = t () => (float[2] p) { p = Neg (a) }, else_branch = e () => (float[2] q) { q = Neg (w) }>
  y = Loop (n, , b) <body = l (int64 i, bool go, float[2] v) => (bool on, float[2] u) { on = Identity (go) u = Neg (v) }>
  z = loc.Twice () }
<domain: "loc", opset_import: ["": 20]> Twice () => (s) { s = Constant <value = float {1}> () }"""


@pytest.fixture
def node_model() -> onnx.ModelProto:
    return parser.parse_model(NODES)


def test_a_model_with_bodies_optional_inputs_and_functions_is_complete(node_model: onnx.ModelProto) -> None:
    before = node_model.SerializeToString(deterministic=True)
    require_sound(node_model, "the model")
    assert node_model.SerializeToString(deterministic=True) == before


def test_a_function_of_the_models_own_may_have_the_name_of_an_operator(node_model: onnx.ModelProto) -> None:
    """Its inputs and attributes are its own."""
    node_model.functions.append(helper.make_function("", "Cast", ["r"], ["s"], [helper.make_node("Neg", ["r"], ["s"])], []))
    del node_model.graph.node[0].attribute[:]
    require_sound(node_model, "the model")
    del node_model.functions[-1]
    with pytest.raises(ExportError, match=r"node 'a' \(Cast\)"):
        require_sound(node_model, "the model")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.graph.node[0].ClearField("input"), r"node 'a' \(Cast\) has 0 inputs, expected 1 or more"),
        (
            lambda m: (put(branch(m, 1).node[0], output=[]), put(branch(m, 1).output[0], name="a")),
            r"node '' \(Neg\) has 0 outputs, expected 1 or more",
        ),
        (lambda m: m.graph.node[0].ClearField("attribute"), r"node 'a' \(Cast\) lacks its attribute 'to'"),
        (
            lambda m: put(m.graph.node[0], attribute=[helper.make_attribute("to", 1.0)]),
            r"node 'a' \(Cast\) has the attribute 'to' of another type than its operator's",
        ),
        (lambda m: m.graph.node[2].ClearField("attribute"), r"node 'y' \(Loop\) lacks its attribute 'body'"),
        (lambda m: m.graph.node[2].input.pop(), r"node 'y' \(Loop\) has 2 inputs, but its body takes 3"),
        (lambda m: branch(m, 1).ClearField("output"), r"node 'b' \(If\) has 1 outputs, but its 'else_branch' gives 0"),
        (
            lambda m: m.graph.node[2].attribute[0].g.output.pop(),
            r"node 'y' \(Loop\) has 1 outputs, but its 'body' gives 0",
        ),
    ],
)
def test_a_node_that_lacks_something_is_named(node_model: onnx.ModelProto, change: Change, reason: str) -> None:
    change(node_model)
    with pytest.raises(ExportError, match=f"^the model is not a valid ONNX model: {reason}; export it again$"):
        require_sound(node_model, "the model")


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


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda w: put(w, raw_data=w.raw_data[:1000]), "has 1,000 bytes, its type and shape say 2,048"),
        (lambda w: w.ClearField("raw_data"), "has 0 values in float_data, its type and shape say 512"),
        (lambda w: put(w, dims=[-1]), r"has the shape \[-1\]"),
        (lambda w: put(w, dims=[2**62]), "has 2,048 bytes, its type and shape say 18,446,744,073,709,551,616"),
        (lambda w: put(w, data_type=TensorProto.UNDEFINED), "states no element type"),
        (lambda w: put(w, data_type=TensorProto.STRING), "has values as bytes, which its element type cannot have"),
    ],
)
@pytest.mark.parametrize("is_attribute", [False, True])
def test_a_damaged_tensor_is_named(change: Callable[[TensorProto], object], reason: str, is_attribute: bool) -> None:
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
