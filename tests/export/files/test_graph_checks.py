from __future__ import annotations

from collections.abc import Callable

import onnx
import pytest
from onnx import TensorProto, helper, parser

from export.errors import ExportError
from export.files.graph_checks import require_sound_graphs
from export.onnx_fp16.convert_float_to_float16 import convert_float_to_float16

TEXT = """<ir_version: 9, opset_import: ["": 17, "loc": 1]>
g (bool c, float[2] x) => (float[2] y) <float[2] w = {1, 2}> {
  a = Add (x, w)
  b = If (c) <then_branch = t () => (float[2] p) { p = loc.Twice (a) }, else_branch = e () => (float[2] q) { q = Neg (w) }>
  y = Relu (b) }
<domain: "loc", opset_import: ["": 17]> Twice (r) => (s) { s = Add (r, r) }"""


@pytest.fixture
def model() -> onnx.ModelProto:
    return parser.parse_model(TEXT)


def test_values_may_come_from_outside_and_in_any_order(model: onnx.ModelProto) -> None:
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend(reversed(nodes))
    require_sound_graphs(model, "m")


def _reads(model: onnx.ModelProto) -> None:
    model.graph.node[2].input[0] = "lost"


def _body_reads(model: onnx.ModelProto) -> None:
    model.graph.node[1].attribute[0].g.node[0].input[0] = "lost"


def _function_reads(model: onnx.ModelProto) -> None:
    model.functions[0].node[0].input[1] = "lost"


def _twice(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Neg", ["x"], ["a"]))


def _output(model: onnx.ModelProto) -> None:
    model.graph.output[0].name = "lost"


def _body_output(model: onnx.ModelProto) -> None:
    model.graph.node[1].attribute[1].g.output[0].name = "lost"


def _attribute(model: onnx.ModelProto) -> None:
    model.graph.node[2].attribute.add(name="alpha", f=1.0)


def _weight(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].data_type = 99


def _element(model: onnx.ModelProto) -> None:
    model.graph.value_info.add(name="a").type.tensor_type.elem_type = 99


def _sequence(model: onnx.ModelProto) -> None:
    model.graph.value_info.add(name="a").type.sequence_type.SetInParent()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_reads, r"node 'y' \(Relu\) reads 'lost', which nothing makes"),
        (_body_reads, r"node 'p' \(Twice\) reads 'lost', which nothing makes"),
        (_function_reads, r"node 's' \(Add\) reads 'lost', which nothing makes"),
        (_twice, r"node 'a' \(Neg\) makes 'a', which is there already"),
        (_output, "no node makes the output 'lost'"),
        (_body_output, "no node makes the output 'lost'"),
        (_attribute, r"the attribute 'alpha' of node 'y' \(Relu\) states no type"),
        (_weight, "the weight 'w' has the element type 99, which ONNX lacks"),
        (_element, "'a' has the element type 99, which ONNX lacks"),
        (_sequence, "'a' is a sequence of no type"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(
    model: onnx.ModelProto, change: Callable[[onnx.ModelProto], None], reason: str
) -> None:
    change(model)
    with pytest.raises(ExportError, match=f"^the model is not a valid ONNX model: {reason}; export it again$"):
        convert_float_to_float16(model)


def test_maps_are_refused_with_the_way_out() -> None:
    """What scikit-learn's converter puts behind every classifier."""
    scores = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 2])
    maps = helper.make_sequence_type_proto(helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(1, [])))
    zipped = helper.make_node("ZipMap", ["x"], ["y"], domain="ai.onnx.ml", classlabels_int64s=[0, 1])
    graph = helper.make_graph([zipped], "g", [scores], [helper.make_value_info("y", maps)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 1)])
    model.ir_version = 9
    with pytest.raises(ExportError, match="'y' holds maps, which can be neither converted nor served; .*zipmap=False"):
        convert_float_to_float16(model)
