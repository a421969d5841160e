"""Changes the half-precision types of an ONNX model: to fp32, or to the other one, with the same weights.

ONNX Runtime has few CPU kernels in fp16, fewer in bf16, and surrounds other operators with casts. Computing in fp32 throughout
is as fast as an fp32 model, and more accurate than half-precision arithmetic. Processors with bf16 arithmetic need OpenVINO.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, helper, numpy_helper

from halfserve.files.onnx_tensors import all_tensors
from halfserve.serve.backends.onnx_runtime.onnx_file import nodes_below

FP32 = TensorProto.FLOAT
HALF_TYPES: Mapping[int, str] = {TensorProto.FLOAT16: "fp16", TensorProto.BFLOAT16: "bf16"}
# Replacements of types, by the type in the file.
UPCAST: Mapping[int, int] = dict.fromkeys(HALF_TYPES, FP32)
FP16_AS_BF16: Mapping[int, int] = {TensorProto.FLOAT16: TensorProto.BFLOAT16}
BF16_AS_FP16: Mapping[int, int] = {TensorProto.BFLOAT16: TensorProto.FLOAT16}
# Attributes that hold a type, of all operators of ONNX and of ONNX Runtime's own domain.
TYPE_ATTRIBUTES = frozenset({"to", "dtype", "output_dtype", "precision", "softmax_precision", "output_datatype"})


def half_types(model: ModelProto) -> frozenset[int]:
    """Return the half-precision types of weights, inputs, outputs or casts."""
    return frozenset(number for number in _types(model) if number in HALF_TYPES)


def upcast_to_fp32(model: ModelProto) -> None:
    """Change every fp16 and bf16 type to fp32, in place."""
    retype(model, UPCAST)


def retype(model: ModelProto, to: Mapping[int, int]) -> None:
    """Change types in place, in weights, constants, casts, inputs, outputs, subgraphs and functions.

    `to` has the new TensorProto types, by the types that they replace. The model may be without its weights.
    """
    for tensor in all_tensors(model):
        _retype_tensor(tensor, to)
    for graph in _graphs(model):
        for value in (*graph.input, *graph.output, *graph.value_info):
            _retype_type(value.type, to)
    types = TypeAttributes(model.functions)
    for function in model.functions:
        for value in function.value_info:
            _retype_type(value.type, to)
        for default in function.attribute_proto:
            _retype_attribute(default, types.of_calls(function), to)
    for node in _nodes(model):
        for attribute in node.attribute:
            _retype_attribute(attribute, types.of(node), to)


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


def _retype_attribute(attribute: AttributeProto, types: AbstractSet[str], to: Mapping[int, int]) -> None:
    # No operator of ONNX or ONNX Runtime has an attribute with a list of types.
    if attribute.name in types and attribute.i in to:
        attribute.i = to[attribute.i]
    if attribute.HasField("tp"):
        _retype_type(attribute.tp, to)


def _retype_tensor(tensor: TensorProto, to: Mapping[int, int]) -> None:
    if tensor.data_type in to:
        array = numpy_helper.to_array(tensor).astype(helper.tensor_dtype_to_np_dtype(to[tensor.data_type]))
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def _retype_type(proto: TypeProto, to: Mapping[int, int]) -> None:
    kind = proto.WhichOneof("value")
    if kind in {"tensor_type", "sparse_tensor_type"}:
        tensor = getattr(proto, kind)
        tensor.elem_type = to.get(tensor.elem_type, tensor.elem_type)
    elif kind in {"sequence_type", "optional_type"}:
        _retype_type(getattr(proto, kind).elem_type, to)


class TypeAttributes:
    """The integer attributes that hold a tensor type, also where a model's functions pass them on under other names."""

    def __init__(self, functions: Sequence[FunctionProto]) -> None:
        """`functions`: all functions of the model, which may call each other."""
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
        """Return the names of the type attributes of a function."""
        return self._by_function[_key(function)]

    def of(self, node: NodeProto) -> AbstractSet[str]:
        """Return the names of the type attributes that a node may have."""
        return self._by_function.get((node.domain, node.op_type, node.overload), TYPE_ATTRIBUTES)

    def _handed_on(self, function: FunctionProto) -> AbstractSet[str]:
        attributes = ((attribute, self.of(node)) for node in nodes_below(function.node) for attribute in node.attribute)
        return {
            attribute.ref_attr_name for attribute, types in attributes if attribute.ref_attr_name and attribute.name in types
        }


def _key(function: FunctionProto) -> tuple[str, str, str]:
    return function.domain, function.name, function.overload
