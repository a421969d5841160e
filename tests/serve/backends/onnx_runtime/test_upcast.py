from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnxruntime.capi._pybind_state import get_all_operator_schema

from halfserve.serve.backends.onnx_runtime.onnx_preparation import UPCAST, half_types, retype
from tests.models import save_mlp

FP16, FP32, BOOL, INT64 = TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.BOOL, TensorProto.INT64


def no_fp16_left(model: onnx.ModelProto) -> bool:
    """By text, so that it does not share a walk over the graph with the code under test."""
    text = onnx.printer.to_text(model)
    return "float16" not in text and "to: int = 10" not in text


def session(model: onnx.ModelProto) -> ort.InferenceSession:
    onnx.checker.check_model(model, full_check=True)
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def test_an_mlp_gives_the_fp16_models_answer_in_fp32(tmp_path: Path) -> None:
    fp16 = onnx.load(save_mlp(tmp_path / "mlp.onnx"))
    fp32 = onnx.load(tmp_path / "mlp.onnx")
    retype(fp32, UPCAST)
    assert half_types(fp16) == {FP16}
    assert not half_types(fp32)
    assert no_fp16_left(fp32)
    x = np.random.default_rng(1).standard_normal((5, 64)).astype(np.float16)
    (half,) = ReferenceEvaluator(fp16).run(None, {"x": x})
    (single,) = session(fp32).run(None, {"x": x.astype(np.float32)})
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, np.asarray(half, np.float32), atol=4e-3)


def model_with_everything() -> onnx.ModelProto:
    """fp16 in a constant, a cast, a ConstantOfShape, an If's branches, a local function and value_info."""
    half = numpy_helper.from_array(np.array([0.5], np.float16), "half")
    branch = {
        name: helper.make_graph(
            [helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.array([value], np.float16), "c"))],
            name,
            [],
            [helper.make_tensor_value_info("c", FP16, [1])],
        )
        for name, value in (("then_branch", 2.0), ("else_branch", 3.0))
    }
    function = helper.make_function(
        "local",
        "Twice",
        ["v"],
        ["w"],
        [helper.make_node("Cast", ["v"], ["s"], to=FP16), helper.make_node("Add", ["s", "s"], ["w"])],
        [helper.make_opsetid("", 20)],
    )
    nodes = [
        helper.make_node("Cast", ["x"], ["x16"], to=FP16),
        helper.make_node("Mul", ["x16", "half"], ["m"]),
        helper.make_node("If", ["flag"], ["b"], None, None, None, None, **branch),
        helper.make_node("ConstantOfShape", ["shape"], ["fill"], value=numpy_helper.from_array(np.array([7], np.float16))),
        helper.make_node("Add", ["m", "b"], ["s1"]),
        helper.make_node("Add", ["s1", "fill"], ["s2"]),
        helper.make_node("Twice", ["s2"], ["y"], domain="local"),
    ]
    graph = helper.make_graph(
        nodes,
        "everything",
        [helper.make_tensor_value_info("x", FP32, [1]), helper.make_tensor_value_info("flag", BOOL, [])],
        [helper.make_tensor_value_info("y", FP16, [1])],
        [half, numpy_helper.from_array(np.array([1], np.int64), "shape")],
        value_info=[helper.make_tensor_value_info("m", FP16, [1])],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("local", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=[function], ir_version=9)


@pytest.mark.parametrize(("flag", "expected"), [(True, 19.0), (False, 21.0)])
def test_every_place_that_can_hold_fp16_is_upcast(flag: bool, expected: float) -> None:
    model = model_with_everything()
    onnx.checker.check_model(model, full_check=True)
    retype(model, UPCAST)
    assert no_fp16_left(model)
    (y,) = session(model).run(None, {"x": np.array([1.0], np.float32), "flag": np.array(flag)})
    assert (y.dtype, y.tolist()) == (np.dtype(np.float32), [expected])


def test_an_fp32_model_is_left_as_it_is() -> None:
    graph = helper.make_graph(
        [helper.make_node("Cast", ["x"], ["y"], to=INT64)],
        "cast",
        [helper.make_tensor_value_info("x", FP32, [1])],
        [helper.make_tensor_value_info("y", INT64, [1])],
    )
    model = helper.make_model(graph)
    before = model.SerializeToString(deterministic=True)
    assert not half_types(model)
    retype(model, UPCAST)
    assert model.SerializeToString(deterministic=True) == before


def test_the_default_of_a_functions_type_attribute_is_upcast() -> None:
    text = """
      <ir_version: 9, opset_import: ["" : 20, "local" : 1]>
      agraph (float[n] x) => (float16[n] y) { y = local.Convert (x) }
      <domain: "local", opset_import: ["" : 20]>
      Convert <to: int = 10> (v) => (w) { w = Cast <to: int = @to> (v) }
    """
    model = onnx.parser.parse_model(text)
    onnx.checker.check_model(model)
    retype(model, UPCAST)
    (y,) = session(model).run(None, {"x": np.array([1.0], np.float32)})
    assert y.dtype == np.float32


FUNCTIONS = """
  <domain: "local", opset_import: ["" : 20]>
  Convert <target> (v) => (w) { w = Cast <to: int = @target> (v) }
  <domain: "local", opset_import: ["" : 20, "local" : 1]>
  Inner <kind: int = 10> (v) => (w) { w = local.Convert <target: int = @kind> (v) }
  <domain: "local", opset_import: ["" : 20]>
  Scaled <to> (v) => (w) { f = Constant <value_int: int = @to> () g = CastLike (f, v) w = Mul (v, g) }
"""


@pytest.mark.parametrize(
    ("call", "expected"),
    [("local.Convert <target: int = 10> (x)", 3.0), ("local.Inner (x)", 3.0), ("local.Inner <kind: int = 10> (x)", 3.0)],
)
def test_a_type_that_reaches_a_cast_through_functions_is_upcast(call: str, expected: float) -> None:
    head = '<ir_version: 9, opset_import: ["" : 20, "local" : 1]>'
    model = onnx.parser.parse_model(f"{head} agraph (float[n] x) => (float16[n] y) {{ h = {call} y = Add (h, h) }} {FUNCTIONS}")
    assert half_types(model) == {FP16}
    retype(model, UPCAST)
    assert not half_types(model)
    (y,) = session(model).run(None, {"x": np.array([1.5], np.float32)})
    assert (y.dtype, y.tolist()) == (np.dtype(np.float32), [expected])


def test_a_number_that_a_function_takes_is_not_mistaken_for_a_type() -> None:
    head = '<ir_version: 9, opset_import: ["" : 20, "local" : 1]>'
    call = "y = local.Scaled <to: int = 10> (x)"
    model = onnx.parser.parse_model(f"{head} agraph (float16[n] x) => (float16[n] y) {{ {call} }} {FUNCTIONS}")
    retype(model, UPCAST)
    (y,) = session(model).run(None, {"x": np.array([1.5], np.float32)})
    assert y.tolist() == [15.0]


def test_a_sparse_constant_is_upcast() -> None:
    values = numpy_helper.from_array(np.array([3], np.float16), "values")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(np.array([1], np.int64), "indices"), [2])
    nodes = [helper.make_node("Constant", [], ["c"], sparse_value=sparse), helper.make_node("Add", ["x", "c"], ["y"])]
    x, y = (helper.make_tensor_value_info(name, FP16, [2]) for name in ("x", "y"))
    model = helper.make_model(
        helper.make_graph(nodes, "sparse", [x], [y]), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    retype(model, UPCAST)
    assert not half_types(model)
    (answer,) = session(model).run(None, {"x": np.array([1.5, 2], np.float32)})
    assert (answer.dtype, answer.tolist()) == (np.dtype(np.float32), [1.5, 5.0])


def test_a_sparse_weight_is_upcast() -> None:
    values = numpy_helper.from_array(np.array([3], np.float16), "w")
    x, y = (helper.make_tensor_value_info(name, FP16, [2]) for name in ("x", "y"))
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "sparse", [x], [y])
    graph.sparse_initializer.append(
        helper.make_sparse_tensor(values, numpy_helper.from_array(np.array([1], np.int64), "indices"), [2])
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    retype(model, UPCAST)
    assert not half_types(model)
    plain = ort.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )  # for onnx's check a sum takes none
    (answer,) = plain.run(None, {"x": np.array([1.5, 2], np.float32)})
    assert (answer.dtype, answer.tolist()) == (np.dtype(np.float32), [1.5, 5.0])


def test_sequences_and_optionals_are_upcast_and_what_functions_say_of_their_values() -> None:
    body = """
        has = OptionalHasElement (none)
        list = local.Twice (x)
        whole = ConcatFromSequence <axis: int = 0> (list)
        y = If (has) <
            then_branch = g1 () => (float16[m] t) { t = OptionalGetElement (none) },
            else_branch = g2 () => (float16[m] e) { e = Identity (whole) }
        >"""
    twice = """<opset_import: ["" : 20], domain: "local"> Twice (x) => (list) { a = Neg (x) list = SequenceConstruct (x, a) }"""
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 20, "local" : 1]> agraph (float16[n] x) => (float16[m] y) {{ {body} }} {twice}'
    )
    half = helper.make_tensor_type_proto(FP16, ["n"])
    none = helper.make_node("Optional", [], ["none"])
    none.attribute.append(helper.make_attribute("type", half))
    model.graph.node.insert(0, none)
    model.graph.value_info.append(helper.make_value_info("list", helper.make_sequence_type_proto(half)))
    model.functions[0].value_info.append(helper.make_tensor_value_info("a", FP16, ["n"]))
    retype(model, UPCAST)
    assert "elem_type: 10\n" not in str(model)
    (answer,) = session(model).run(None, {"x": np.array([1.5, 2], np.float32)})
    assert (answer.dtype, answer.tolist()) == (np.dtype(np.float32), [1.5, 2.0, -1.5, -2.0])


def test_no_operator_has_a_list_of_tensors_or_types() -> None:
    lists = {"TENSORS", "SPARSE_TENSORS", "TYPE_PROTOS"}
    schemas = (*get_all_operator_schema(), *onnx.defs.get_all_schemas_with_history())
    kinds = {str(a.type).removeprefix("AttrType.") for schema in schemas for a in schema.attributes.values()}
    assert "SPARSE_TENSOR" in kinds
    assert not kinds & lists
