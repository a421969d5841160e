"""Converts a half-precision ONNX model to compute in fp32, with the same fp16 or bf16 weights.

ONNX Runtime has few CPU kernels in fp16, fewer in bf16, and surrounds other operators with casts. Computing in fp32 throughout
is as fast as an fp32 model, and more accurate than half-precision arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet

from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, numpy_helper

from halfserve.protos.onnx_tensors import all_tensors
from halfserve.serve.backends.onnx_runtime.onnx_file import nodes_below

FP32 = TensorProto.FLOAT
HALF_TYPES = {TensorProto.FLOAT16: "fp16", TensorProto.BFLOAT16: "bf16"}
# Of all operators of ONNX and of ONNX Runtime's own domain.
TYPE_ATTRIBUTES = frozenset({"to", "dtype", "output_dtype", "precision", "softmax_precision", "output_datatype"})


def half_types(model: ModelProto) -> frozenset[int]:
    """The half-precision types of weights, inputs, outputs or casts."""
    return frozenset(number for number in _types(model) if number in HALF_TYPES)


def upcast_to_fp32(model: ModelProto) -> None:
    """Change every fp16 and bf16 type to fp32, in place: weights, constants, casts, inputs, outputs, subgraphs, functions."""
    for tensor in all_tensors(model):
        _upcast_tensor(tensor)
    for graph in _graphs(model):
        for value in (*graph.input, *graph.output, *graph.value_info):
            _upcast_type(value.type)
    types = TypeAttributes(model.functions)
    for function in model.functions:
        for value in function.value_info:
            _upcast_type(value.type)
        for default in function.attribute_proto:
            _upcast_attribute(default, types.of_calls(function))
    for node in _nodes(model):
        for attribute in node.attribute:
            _upcast_attribute(attribute, types.of(node))


def _types(model: ModelProto) -> Iterator[int]:
    yield from (tensor.data_type for tensor in all_tensors(model))
    for graph in _graphs(model):
        yield from (v.type.tensor_type.elem_type for v in (*graph.input, *graph.output))
    types = TypeAttributes(model.functions)
    for function in model.functions:
        for default in function.attribute_proto:
            if default.name in types.of_calls(function):
                yield default.i
    for node in _nodes(model):
        yield from (attribute.i for attribute in node.attribute if attribute.name in types.of(node))


def _graphs(model: ModelProto) -> Iterator[GraphProto]:
    yield model.graph
    for node in _nodes(model):
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield attribute.g
            yield from attribute.graphs


def _nodes(model: ModelProto) -> Iterator[NodeProto]:
    return nodes_below(model.graph.node, *(function.node for function in model.functions))


def _upcast_attribute(attribute: AttributeProto, types: AbstractSet[str]) -> None:
    # No operator of ONNX or ONNX Runtime has an attribute with a list of types.
    if attribute.name in types and attribute.i in HALF_TYPES:
        attribute.i = FP32
    if attribute.HasField("tp"):
        _upcast_type(attribute.tp)


def _upcast_tensor(tensor: TensorProto) -> None:
    if tensor.data_type in HALF_TYPES:
        array = numpy_helper.to_array(tensor).astype("float32")
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def _upcast_type(proto: TypeProto) -> None:
    kind = proto.WhichOneof("value")
    if kind in {"tensor_type", "sparse_tensor_type"}:
        tensor = getattr(proto, kind)
        if tensor.elem_type in HALF_TYPES:
            tensor.elem_type = FP32
    elif kind in {"sequence_type", "optional_type"}:
        _upcast_type(getattr(proto, kind).elem_type)


class TypeAttributes:
    """The integer attributes that hold a tensor type, also where a model's functions pass them on under other names."""

    def __init__(self, functions: Sequence[FunctionProto]) -> None:
        """`functions` are all of the model's; they may call each other."""
        self._by_function: dict[tuple[str, str, str], AbstractSet[str]] = {
            _key(function): frozenset() for function in functions
        }
        grows = True
        while grows:
            grows = False
            for function in functions:
                found = self._handed_on(function)
                grows |= found != self._by_function[_key(function)]
                self._by_function[_key(function)] = found

    def of_calls(self, function: FunctionProto) -> AbstractSet[str]:
        """Names of the type attributes of a function."""
        return self._by_function[_key(function)]

    def of(self, node: NodeProto) -> AbstractSet[str]:
        """Names of the type attributes that a node may have."""
        return self._by_function.get((node.domain, node.op_type, node.overload), TYPE_ATTRIBUTES)

    def _handed_on(self, function: FunctionProto) -> AbstractSet[str]:
        attributes = ((attribute, self.of(node)) for node in nodes_below(function.node) for attribute in node.attribute)
        return {
            attribute.ref_attr_name for attribute, types in attributes if attribute.ref_attr_name and attribute.name in types
        }


def _key(function: FunctionProto) -> tuple[str, str, str]:
    return function.domain, function.name, function.overload
