"""Turn a half-precision ONNX model into one that computes in fp32, from the same (fp16 or bf16) weights.

ONNX Runtime has CPU kernels in fp16 for few operators, in bf16 for fewer, and surrounds the others with casts. Computing in
fp32 throughout is as fast as an fp32 model there and closer to the truth than half-precision arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, numpy_helper

from protos.onnx_tensors import all_tensors
from serve.backends.onnx_runtime.type_attributes import TypeAttributes, nodes_below

FP32 = TensorProto.FLOAT
HALF_TYPES = {TensorProto.FLOAT16: "fp16", TensorProto.BFLOAT16: "bf16"}


def half_types(model: ModelProto) -> frozenset[int]:
    """The half-precision types that weights, inputs, outputs or casts of the model have; none for a model without."""
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
    # No operator, of the standard or of ONNX Runtime's own, has an attribute that is a list of types.
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
