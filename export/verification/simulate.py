"""What a GPU computes in float16, on a CPU: a model that rounds after every node.

ONNX Runtime has no float16 arithmetic on most CPUs. It casts a chain of nodes to float32 and drops the casts in between, at
every optimisation level, "disable all" included: `1 * 300 * 300 / 300` answers 300 there, and infinity on a GPU, whose every
node rounds. Casts that the model itself holds are never dropped, so they are written into it here: each node's float16 inputs
are raised to float32, and its results are rounded back. Inside a node the sum is float32, as in cuBLAS and cuDNN.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import onnx
from onnx import TensorProto, helper, inliner, shape_inference

from export.errors import ExportError

if TYPE_CHECKING:
    from collections.abc import Iterator

# These move or convert values: they cannot round, so the runtime may do as it likes.
_MOVERS = """
    Cast CastLike Constant ConstantOfShape Concat Expand Flatten Gather GatherElements GatherND Identity Pad Reshape Shape Size
    Slice Split Squeeze Tile Transpose Unsqueeze
"""
MOVERS = frozenset(_MOVERS.split())


def round_every_node(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of an fp16 model whose nodes compute in float32 and round each result to float16; its inputs and outputs stay.

    Raises:
        ExportError: The types of the model's values cannot be inferred, so it cannot be simulated.
    """
    try:
        typed = shape_inference.infer_shapes(inliner.inline_local_functions(model), strict_mode=True)
    except (shape_inference.InferenceError, ValueError) as error:
        raise ExportError(f"cannot tell the types of the model's values: {str(error).splitlines()[0]}") from error
    _rewrite(typed.graph, set(), count())
    return typed


def _rewrite(graph: onnx.GraphProto, outer_halves: set[str], scopes: Iterator[int]) -> None:
    halves = outer_halves | set(_half_values(graph))
    rounder = _Rounder(halves, next(scopes))
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        bodies = [body for attribute in node.attribute for body in _bodies(attribute)]
        for body in bodies:
            _rewrite(body, halves, scopes)
        if bodies or node.op_type in MOVERS or not any(name in halves for name in node.input):
            nodes.append(node)
        else:
            nodes += rounder.around(node)
    del graph.node[:]
    graph.node.extend(nodes)
    del graph.value_info[:]


class _Rounder:
    """Puts casts around the nodes of one graph; the scope's number keeps names apart between a graph and its bodies."""

    def __init__(self, halves: set[str], scope: int) -> None:
        self._halves = halves
        self._scope = scope
        self._raised: set[str] = set()

    def around(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        """The node in float32 between its casts; an input that an earlier node had raised is not raised again."""
        wide = onnx.NodeProto()
        wide.CopyFrom(node)
        for index, name in enumerate(node.input):
            if name in self._halves:
                wide.input[index] = f"{name}/as_float32_{self._scope}"
                if name not in self._raised:
                    self._raised.add(name)
                    yield helper.make_node("Cast", [name], [wide.input[index]], to=TensorProto.FLOAT)
        rounded = [(index, name) for index, name in enumerate(node.output) if name in self._halves]
        for index, name in rounded:
            wide.output[index] = f"{name}/before_rounding"
        yield wide
        for index, name in rounded:
            yield helper.make_node("Cast", [wide.output[index]], [name], to=TensorProto.FLOAT16)


def _bodies(attribute: onnx.AttributeProto) -> list[onnx.GraphProto]:
    return [attribute.g] if attribute.type == onnx.AttributeProto.GRAPH else list(attribute.graphs)


def _half_values(graph: onnx.GraphProto) -> Iterator[str]:
    for value in [*graph.input, *graph.output, *graph.value_info]:
        if value.type.tensor_type.elem_type == TensorProto.FLOAT16:
            yield value.name
    for initializer in graph.initializer:
        if initializer.data_type == TensorProto.FLOAT16:
            yield initializer.name
